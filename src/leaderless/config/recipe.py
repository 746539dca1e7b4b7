"""The recipe: everything a user may set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from leaderless.algorithms.settings import AlgorithmConfig
from leaderless.base.section import Section
from leaderless.config.data import DataConfig, DatasetConfig, TrainingSetConfig
from leaderless.config.environment import ONLINE, BodyConfig, EnvironmentConfig, OnlineConfig
from leaderless.config.layout import ChannelConfig, LayoutConfig, PlacementConfig, ScheduleConfig, expand_auto, or_auto
from leaderless.config.models import (
    ModelConfig,
    OptimizerConfig,
    RoleConfig,
    RoleSection,
    TrainingConfig,
    as_settings,
    origin_of,
)
from leaderless.config.rewards import RewardsConfig
from leaderless.config.rollout import BatchConfig, EvaluationConfig, RolloutConfig
from leaderless.config.run import CheckpointConfig, GuardsConfig, LoggerConfig, RunConfig
from leaderless.config.source import merge_settings

Product = Literal["text", "episodes", "online", "bodies"]
"""Kinds of samples: responses to prompts, episodes in an environment or of clients, and of bodies."""


RESPONSE_LENGTH = "rollout.max_response_tokens"


class Recipe(Section):
    """A model to train, the data and the method; the planner decides on which ranks."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its folder."""
    workflow: str
    """A built-in workflow, a YAML file, or `package.module:function` that returns a `Workflow`."""
    models: Mapping[str, ModelConfig]
    """Model of each role, such as `policy`; by default, `reference` and `critic` start from the policy's model, and
    `planner_reference` and `planner_critic` from the model of the role `planner`."""
    data: DataConfig
    """Training and held-out data."""
    reward: RewardsConfig = RewardsConfig()
    """Rewards of responses."""
    batch: BatchConfig = BatchConfig()
    """Batch sizes."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation of responses."""
    environment: EnvironmentConfig | None = None
    """Environment in which the policy acts. Without one, a prompt gets a response, and that is all."""
    body: BodyConfig | None = None
    """Environment in which the policy moves a body, in place of generating text."""
    online: OnlineConfig | None = None
    """Requests of clients in place of training data: the policy learns from their feedback while it is used."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage, loss, penalty, averaging."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of every trained role."""
    roles: Mapping[str, RoleConfig] = {}
    """Settings that a role has for itself, such as `roles.critic.optimizer`."""
    training: TrainingConfig = TrainingConfig()
    """Training and scoring of models."""
    layout: Mapping[str, LayoutConfig] = Field(default={}, json_schema_extra=or_auto)
    """Ranks and parallel sizes by node, or `auto`: see `placement`. A node without an entry runs where its role is
    trained, if the node that trains it has an entry; else where the first node that it comes after runs; else
    data-parallel on all ranks."""
    placement: PlacementConfig | None = None
    """Choice of all layouts by measured seconds, which `layout: auto` asks for too."""
    channels: Mapping[str, ChannelConfig] = {}
    """Iterations in flight by node: everything that leaves the ranks of the node goes through a channel, so that they
    generate while other ranks train. Without an entry, all ranks go through each step together."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Choice among layouts during the run."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Accuracy on held-out prompts."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written, and which are kept."""
    guards: GuardsConfig = GuardsConfig()
    """Reactions to bad numbers."""
    run: RunConfig = RunConfig()
    """Folder, time limits and records of the run."""
    loggers: tuple[LoggerConfig, ...] = (LoggerConfig(type="tensorboard"),)
    """Trackers that get the numbers of the run, by name or with options. What training writes into the folder of the
    run does not depend on them."""
    steps: int = Field(ge=1)
    """Number of steps, each one pass through the workflow."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the data order and of sampling."""

    @property
    def open_channels(self) -> Mapping[str, ChannelConfig]:
        """The channels that let something be in flight."""
        return {name: channel for name, channel in self.channels.items() if channel.capacity}

    @field_validator("workflow")
    @classmethod
    def _workflow_is_named(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must name a workflow")
        return value

    @model_validator(mode="before")
    @classmethod
    def _layouts_may_be_chosen(cls, value: object) -> object:
        return expand_auto(value) if isinstance(value, Mapping) else value

    @model_validator(mode="before")
    @classmethod
    def _complete_roles(cls, value: object) -> object:
        """Settings of a role are written on top of the general ones."""
        if not isinstance(value, Mapping) or not isinstance(value.get("roles"), Mapping):
            return value
        roles: dict[str, object] = {}
        for role, given in value["roles"].items():
            sections = as_settings(given)
            merged = {
                name: merge_settings(as_settings(value.get(name)), inner) if isinstance(inner, Mapping) else inner
                for name, inner in sections.items()
            }
            roles[role] = merged if isinstance(given, Mapping | RoleConfig) else given
        return {**value, "roles": roles}

    @model_validator(mode="before")
    @classmethod
    def _requests_are_the_data(cls, value: object) -> object:
        """The training data of an online run need not be written."""
        if not isinstance(value, Mapping) or value.get("online") is None:
            return value
        data = {} if value.get("data") is None else value["data"]
        return {**value, "data": {"train": {"path": ONLINE}, **data}} if isinstance(data, Mapping) else value

    @model_validator(mode="after")
    def _fits_its_product(self) -> Recipe:
        PRODUCT_FACTS[self.product].check(self)
        kinds = {role: model.body for role, model in self.models.items()}
        named = sorted(role for role, kind in kinds.items() if kind is not None)
        if named and self.body is None:
            raise ValueError(f"models.{named[0]}.body needs `body`, the environment in which the policy moves")
        return self

    @model_validator(mode="after")
    def _roles_share_what_is_not_theirs(self) -> Recipe:
        for role, config in self.roles.items():
            for name in ("repeat", "team") if config.algorithm is not None else ():
                if getattr(config.algorithm, name) != getattr(self.algorithm, name):
                    raise ValueError(f"roles.{role}.algorithm.{name} must be that of all roles: set algorithm.{name}")
        return self

    @property
    def continuous_channels(self) -> Mapping[str, ChannelConfig]:
        """The channels whose ranks generate continuously."""
        return {name: channel for name, channel in self.open_channels.items() if channel.mode == "continuous"}

    @model_validator(mode="after")
    def _can_follow(self) -> Recipe:
        if self.run.follow is not None and not self.continuous_channels:
            raise ValueError(
                f"run.follow={self.run.follow} does continuous generation again, but no channel has mode: continuous; "
                "any other run has the same numbers whenever it is repeated: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        if self.evaluation.every_steps and self.data.evaluation is None:
            raise ValueError("evaluation.every_steps needs data.evaluation, the held-out prompts")
        roles = set(self.players.values())
        if self.evaluation.every_steps and len(roles) > 1:
            raise ValueError(
                f"evaluation.every_steps: one role plays held-out tasks, but environment.agents names {len(roles)}: "
                "leave it out"
            )
        graded = PRODUCT_FACTS[self.product].graded
        judged = self.data.evaluation.preferences if self.data.evaluation else None
        if self.evaluation.every_steps and self.data.preferences != judged:
            raise ValueError(
                "evaluation.every_steps: the columns chosen and rejected, or response and desirable, must be named in "
                "both data.train and data.evaluation, or in neither"
            )
        if self.evaluation.every_steps and not self.reward.options() and not graded and judged is None:
            raise ValueError("evaluation.every_steps needs a reward, to tell whether a response is correct")
        metric = self.evaluation.metric
        rewards = [*self.reward.options(), *graded]
        if metric is not None and metric not in rewards:
            known = ", ".join(rewards) or "none"
            raise ValueError(f"evaluation.metric='{metric}' is not one of the recipe's rewards ({known})")
        if self.evaluation.temperature == 0 and self.evaluation.responses_per_prompt > 1:
            raise ValueError(
                "evaluation.responses_per_prompt > 1 needs evaluation.temperature > 0: "
                "greedy decoding gives the same response every time"
            )
        return self

    @property
    def product(self) -> Product:
        """Kind of samples: each has a rollout of its own, which the table of stages chooses."""
        given = (name for name, facts in PRODUCT_FACTS.items() if facts.section and getattr(self, facts.section))
        return next(given, "text")

    @property
    def players(self) -> Mapping[str, str]:
        """The role that plays each agent of the environment, by agent; none if a role plays all, or there is none."""
        return self.environment.agents if self.environment is not None else {}

    @property
    def has_episodes(self) -> bool:
        """Whether the rollout's samples are conversations: with an environment, or with clients."""
        return PRODUCT_FACTS[self.product].has_episodes

    @property
    def defers_grades(self) -> bool:
        """Whether episodes whose grader failed stay in the journal until they are graded again."""
        return PRODUCT_FACTS[self.product].defers_grades(self)

    @property
    def has_later_images(self) -> bool:
        """Whether images may follow a prompt, in what an environment shows."""
        return self.environment is not None and self.environment.images

    @property
    def has_images(self) -> bool:
        """Whether prompts, or what follows them, may have images."""
        return self.data.has_images or self.has_later_images

    @property
    def has_tasks(self) -> bool:
        """Whether rows of the dataset are tasks, without prompts."""
        return bool(self.task_section)

    @property
    def task_section(self) -> str:
        """The section that tasks come from; empty where rows are prompts."""
        return PRODUCT_FACTS[self.product].section

    @property
    def task_rewards(self) -> tuple[str, ...]:
        """Rewards that come with the tasks: the environment's, or the feedback of clients."""
        return PRODUCT_FACTS[self.product].rewards

    @property
    def length_setting(self) -> str:
        """The setting that bounds what follows a prompt: a response, an episode, or the steps of a body."""
        return PRODUCT_FACTS[self.product].length_setting

    @property
    def reward_names(self) -> list[str]:
        """Names of the rewards of a sample: the rewards of the recipe, and what comes with episodes."""
        return [*self.reward.options(), *self.task_rewards]

    @property
    def samples_truncated(self) -> bool:
        """Whether some role samples from a distribution without some of the model's tokens."""
        return any(
            one.is_truncated for one in (self.rollout, *(own.rollout or self.rollout for own in self.roles.values()))
        )

    @property
    def row_columns(self) -> Mapping[str, str]:
        """Columns that every row to train on must have, by the setting that names each."""
        sections = {"algorithm": self.algorithm}
        sections |= {f"roles.{role}.algorithm": own.algorithm for role, own in self.roles.items() if own.algorithm}
        return {
            f"{key}.advantage.{name}": column
            for key, section in sections.items()
            for name, column in section.advantage.row_columns.items()
        }

    def model_of(self, role: str) -> ModelConfig | None:
        """The model of a role of the workflow, or None if the recipe names none.

        A role that starts from another one's model starts without its adapters.
        """
        own, origin = self.models.get(role), self.models.get(origin_of(role) or "")
        return own or (origin and origin.model_copy(update={"lora": None}))

    def sections_of(self, role: str | None, agents: Sequence[str] = ()) -> Mapping[RoleSection, str]:
        """The sections that are not the general ones for a node, each with the role that it is written for.

        Args:
            role: Role of the node.
            agents: Roles that sampled the rows of the node. Samples were generated with the `rollout` of their agent,
                of several the one with the longest responses; the `algorithm` of a single agent holds where the node's
                role has none.
        """
        by_length = sorted(agents, key=lambda agent: -self.as_seen_by(agent).rollout.max_response_tokens)
        owners: dict[RoleSection, Sequence[str | None]] = {
            "algorithm": [role, *(agents if len(agents) == 1 else ())],
            "rollout": by_length[:1] or [role],
            "optimizer": [role],
            "training": [role],
        }
        found = {
            section: [role for role in known if role and role in self.roles and getattr(self.roles[role], section)]
            for section, known in owners.items()
        }
        return {section: known[0] for section, known in found.items() if known}

    def as_seen_by(self, role: str | None, agents: Sequence[str] = ()) -> Recipe:
        """The recipe with the settings that hold for a node in place of the general ones; see `sections_of`."""
        sections = self.sections_of(role, agents) if self.roles else {}
        update: dict[str, object] = {name: getattr(self.roles[owner], name) for name, owner in sections.items()}
        seen = self.model_copy(update=update) if update else self
        sampled = [seen, *(self.as_seen_by(agent) for agent in agents if self.roles)]
        if not any(one.rollout.low_precision for one in sampled):
            return seen
        return seen.model_copy(update={"algorithm": seen.algorithm.corrected()})

    def key_of(self, setting: str, role: str | None, agents: Sequence[str] = ()) -> str:
        """The key at which a setting that holds for a node is written: `roles.<role>...`, or the general one."""
        owners = {str(section): owner for section, owner in self.sections_of(role, agents).items()}
        owner = owners.get(setting.partition(".")[0])
        return f"roles.{owner}.{setting}" if owner else setting

    def longest_response(self, agents: Iterable[str] = ()) -> int:
        """Most tokens after the prompt of a sample of one of some roles; without any, of one in general.

        For a body, these are the steps of an episode.
        """
        if self.length_setting != RESPONSE_LENGTH:
            longest: int = attrgetter(self.length_setting)(self)
            return longest
        lengths = (self.as_seen_by(agent).rollout.max_response_tokens for agent in agents)
        return max(lengths, default=self.rollout.max_response_tokens)

    def longest_text(self) -> int:
        """Most tokens of a prompt with its response."""
        return self.data.max_prompt_tokens + self.longest_response()


class ProductFacts(NamedTuple):
    """Facts that hold for all runs of a kind.

    Attributes:
        section: Section of the recipe that makes a run one of this kind, from which tasks come; none for prompts.
        check: Function that refuses other sections next to it.
        has_episodes: Whether samples are conversations.
        rewards: Rewards that come with its tasks.
        graded: Rewards by which held-out tasks may be evaluated, besides the recipe's own.
        length_setting: Setting that bounds what follows a prompt.
        defers_grades: Function that says whether what could not be graded waits in the journal.
    """

    section: str = ""
    check: Callable[[Recipe], None] = lambda _: None
    has_episodes: bool = False
    rewards: tuple[str, ...] = ()
    graded: tuple[str, ...] = ()
    length_setting: str = RESPONSE_LENGTH
    defers_grades: Callable[[Recipe], bool] = lambda _: False


def _check_online(recipe: Recipe) -> None:
    """Requests of clients are the only tasks, and the run is neither evaluated nor replanned."""
    train = recipe.data.train
    known = {"path": ONLINE, "template": None, "system": None}
    if not isinstance(train, TrainingSetConfig) or any(
        getattr(train, name) != known.get(name, field.default) and known.get(name, "") is not None
        for name, field in TrainingSetConfig.model_fields.items()
    ):
        raise ValueError(
            f"data.train must be left out, or be the path '{ONLINE}' with a template or a system message: with "
            "`online`, requests of clients take its place"
        )
    if "{" in train.template:
        raise ValueError("data.train.template must be auto, chat or plain: it says how messages are written")
    if recipe.environment is not None:
        raise ValueError(
            "environment must be left out: with `online`, clients lead the episodes; their tools come with requests"
        )
    if recipe.evaluation.every_steps:
        raise ValueError(
            "evaluation.every_steps must be 0: an online run is not evaluated while clients wait; `leaderless "
            "eval` evaluates its checkpoints"
        )
    if recipe.schedule.replan_every_steps:
        raise ValueError(
            "schedule.replan_every_steps must be 0 with `online`: such a run is stopped, and continued with "
            "another layout"
        )


def _check_tasks(recipe: Recipe) -> None:
    """Rows are tasks, without texts to compose and responses to imitate."""
    sets: dict[str, DatasetConfig] = {**recipe.data.train_sets()}
    if recipe.data.evaluation is not None:
        sets["data.evaluation"] = recipe.data.evaluation
    for key, config in sets.items():
        if "{" in config.template:
            raise ValueError(
                f"{key}.template must be auto, chat or plain: it says how the environment's observations are "
                "written; compose texts of columns in its method `reset`"
            )
        if config.response is not None:
            raise ValueError(
                f"{key}.response: with an environment, all responses are sampled; leave one of the two out"
            )


def _check_environment(recipe: Recipe) -> None:
    """Rows are tasks, and what waits for its grade is written down."""
    _check_tasks(recipe)
    assert recipe.environment is not None, "it makes the run one of this kind"
    failures = recipe.environment.failures
    if failures.grader == "deferred" and not recipe.run.kept_episodes:
        raise ValueError(
            "environment.failures.grader=deferred keeps episodes in the journal until they are graded again, but "
            "run.kept_episodes=0 turns the journal off: set environment.failures.grader to absent, or "
            "run.kept_episodes to at least 1"
        )


def _defers_grades(recipe: Recipe) -> bool:
    assert recipe.environment is not None, "it makes the run one of this kind"
    failures = recipe.environment.failures
    return failures.grader != "absent" and recipe.run.kept_episodes > 0


def _check_body(recipe: Recipe) -> None:
    """The policy of a body generates no text, and its models have no parts of language models."""
    _check_tasks(recipe)
    given = {name: getattr(recipe, name) is not None for name in ("environment", "online")} | {
        "channels: continuous": bool(recipe.continuous_channels),
        "algorithm.replay_experts": recipe.algorithm.replay_experts,
        "algorithm.overlong": bool(recipe.algorithm.overlong.buffer_tokens),
        "rollout.top_p, top_k or min_p": recipe.samples_truncated,
        "data: images": recipe.data.has_images,
    }
    for name in (name for name, is_given in given.items() if is_given):
        raise ValueError(f"{name} cannot be combined with `body`, whose policy generates no text: leave it out")
    for role, model in recipe.models.items():
        if model.lora is not None or model.freeze_vision:
            raise ValueError(f"models.{role}: a policy of a body has no adapters and no frozen part: leave them out")


PRODUCT_FACTS: Mapping[Product, ProductFacts] = {
    "bodies": ProductFacts(
        "body",
        _check_body,
        rewards=("environment",),
        graded=("environment", "success"),
        length_setting="body.max_steps",
    ),
    "online": ProductFacts("online", _check_online, has_episodes=True, rewards=("environment",)),
    "episodes": ProductFacts(
        "environment",
        _check_environment,
        has_episodes=True,
        rewards=("environment",),
        graded=("environment",),
        length_setting="environment.max_episode_tokens",
        defers_grades=_defers_grades,
    ),
    "text": ProductFacts(),
}
"""The facts of each kind of run; a recipe is of the first kind whose section it has."""
