"""The contract of a stage, apart from its code."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from leaderless.base.named_functions import Declarations, Function, name_of
from leaderless.config import RecipeError
from leaderless.planner.workflow.columns import IMAGES, LATER_IMAGES, SEEN_COLUMNS

if TYPE_CHECKING:
    from leaderless.config import Recipe
    from leaderless.planner.workflow.workflow import Node, Workflow


Rows = Literal["same", "expand", "filter", "regroup"]
"""Effect of a stage on rows: it keeps them, makes samples from prompts, drops some, or forms new groups."""
SAMPLING: tuple[RowEffect, ...] = ("expand", "extend")
"""Effects of stages that sample: from prompts, or from the samples of others, which they put out with their own."""
RoleUse = Literal["generate", "score", "train"]
"""Use of a role: to sample with it, to compute log-probabilities, or to change its weights."""
AnyUse = RoleUse | Literal["judge"]
"""The same, or to ask it about samples, as only the node that computes rewards does."""
RowEffect = Rows | Literal["extend", "join"]
"""The same, adding samples to given ones, or adding rows to rows of other nodes, as only nodes of the planner do."""

Names = Sequence[str] | Callable[["Recipe", "Node"], Sequence[str]]
"""Names of columns or metrics, or a function of the recipe and the node that gives them."""

WrittenColumns = Sequence[str] | Callable[["Recipe", "Node", "Workflow"], Sequence[str]]
"""Names of columns, or a function of the recipe, the node and its workflow that gives them."""


@dataclass(frozen=True)
class StageSpec:
    """The contract of a stage: what the planner needs to know to place it.

    Attributes:
        implementation: Function that runs it, as `package.module:function`; only workers import it.
        implementations: Functions of products for which it is another one: of `episodes`, `online` and `bodies`, and of
            `continuous` generation.
        reads: Columns that it needs.
        writes: Columns that it adds or replaces.
        reads_if_written: Columns that it reads where an earlier node writes them for others; no node runs for it.
        reads_if_carried: Further columns that it needs where samples may be older than a step: behind a channel, or
            carried over by repeated nodes.
        reads_if_made: Further columns that it needs if an earlier node writes them; that node runs for it.
        sampled_with: Settings of `rollout` that it assumes to be the same for all of its samples.
        rows: Effect on rows.
        needs_whole_groups: Whether all samples of a prompt must be on the same rank.
        compares_groups: Function that says whether they must be under a recipe, where others do not ask for that.
        needs_whole_episodes: Whether all samples of an episode must be, if some episodes have several.
        streams: Whether it can process some groups of a step before the others are there, as no number depends on other
            groups.
        roles: Use of each role of the node, by the name of its parameter: to generate, score, train or judge.
        critics: Roles of the node that are value models, not language models, by the names of their parameters.
        takes_own_rows: Whether it uses its role on the rows that the role sampled, or the role that it is the
            reference of.
        asks_teachers: Function that says whether it uses the teachers of a recipe, to score.
        grades: Whether responses are graded on its ranks, so that it asks those judges that are models of the recipe.
        idle_steps: Number of first steps in which it does not train its role, as a function of the recipe.
        has_effect: Whether it has an effect beyond its columns, such as an update, and runs even if no node reads them;
            may be a function of the recipe.
        metrics: Metrics that it reports.
        check: Function that raises `RecipeError` for settings with which the stage cannot work.
        summary: One line for the reader.
    """

    implementation: str
    reads: Names = ()
    writes: WrittenColumns = ()
    reads_if_written: tuple[str, ...] = ()
    reads_if_carried: Names = ()
    reads_if_made: Names = ()
    sampled_with: Names = ()
    rows: RowEffect = "same"
    needs_whole_groups: bool = False
    compares_groups: Callable[[Recipe], bool] = field(default=lambda recipe: False)  # noqa: ARG005
    needs_whole_episodes: bool = False
    streams: bool = False
    roles: Mapping[str, AnyUse] = field(default_factory=dict)
    critics: tuple[str, ...] = ()
    takes_own_rows: bool = False
    asks_teachers: Callable[[Recipe], bool] = field(default=lambda recipe: False)  # noqa: ARG005
    grades: bool = False
    idle_steps: Callable[[Recipe], int] = field(default=lambda recipe: 0)  # noqa: ARG005
    has_effect: bool | Callable[[Recipe], bool] = False
    metrics: Names = ()
    check: Callable[[Recipe, Node], None] | None = None
    summary: str = ""
    implementations: Mapping[str, str] = field(default_factory=dict)

    @property
    def role_use(self) -> RoleUse | Literal["none"]:
        """Use of the main role: the one that is trained, else the one that generates, else the one that scores."""
        uses: tuple[RoleUse, ...] = ("train", "generate", "score")
        return next((use for use in uses if use in self.roles.values()), "none")

    def under(self, recipe: Recipe) -> StageSpec:
        """The contract under a recipe."""
        return replace(self, needs_whole_groups=self.needs_whole_groups or self.compares_groups(recipe))

    @property
    def samples(self) -> bool:
        """Whether it makes samples."""
        return self.rows in SAMPLING

    def is_critic(self, node: Node, role: str | None) -> bool:
        """Whether a role is a value model for a node of this stage whose roles have been resolved."""
        return any(dict(node.roles).get(name) == role for name in self.critics)

    def with_guests(self, node: Node) -> StageSpec:
        """The contract of a node of this stage with the judges and teachers that the planner has given to the node."""
        judges: dict[str, AnyUse] = {name: "judge" for name, _ in node.judges}
        teachers: dict[str, AnyUse] = {name: "score" for name, _ in node.teachers}
        return replace(self, roles={**self.roles, **judges, **teachers})

    def roles_of(self, node: Node) -> dict[str, str]:
        """The role for each parameter but for judges and teachers; the node must give those that the stage declares."""
        key, declared = f"nodes.{node.name}", ", ".join(f"{name} ({use})" for name, use in self.roles.items())
        given = dict(node.roles)
        if node.role is not None and given:
            raise RecipeError.at(f"{key}.roles", "comes next to `role`: give one of the two")
        if not self.roles:
            if node.role is not None or given:
                raise RecipeError.at(
                    f"{key}.role" if node.role else f"{key}.roles",
                    f"stage '{node.run}' declares no use of a role: declare it, as "
                    '@stage(roles={"policy": "score"}), or leave the role out',
                )
            return {}
        if node.role is not None and len(self.roles) == 1:
            return {next(iter(self.roles)): node.role}
        if not given and len(self.roles) == 1:
            raise RecipeError.at(f"{key}.role", f"stage '{node.run}' needs a role, as role: policy")
        if given.keys() != self.roles.keys():
            raise RecipeError.at(
                f"{key}.roles", f"stage '{node.run}' uses the roles {declared}: give each, as roles: {{NAME: ROLE}}"
            )
        return given

    def settings_of(self, recipe: Recipe, node: Node) -> Recipe:
        """The recipe with the settings that hold for a node of this stage."""
        return recipe.as_seen_by(node.role, [node.role] if self.samples and node.role else node.agents)

    def reads_of(self, recipe: Recipe, node: Node) -> tuple[str, ...]:
        """Columns that a node of this stage reads under a recipe."""
        columns = names_for(recipe, node, self.reads)
        if recipe.body is not None and {"tokens", "response_mask"} <= {*columns} and self.roles:
            steps = ["env_steps"] * (bool(self.critics) and recipe.algorithm.advantage.values_steps)
            return tuple(dict.fromkeys([*columns, *SEEN_COLUMNS, "choices", "turns", *steps]))
        images = [IMAGES] * recipe.has_images + [LATER_IMAGES] * recipe.has_later_images
        return tuple(dict.fromkeys([*columns, *images])) if "prompt_tokens" in columns else columns

    def writes_of(self, recipe: Recipe, node: Node, workflow: Workflow) -> tuple[str, ...]:
        """Columns that a node of this stage writes in a workflow under a recipe."""
        return tuple(self.writes(recipe, node, workflow) if callable(self.writes) else self.writes)

    def num_updates(self, recipe: Recipe, node: Node) -> int:
        """Optimizer updates in the whole run, for a node that trains."""
        before, steps = self.idle_steps(recipe), recipe.steps
        if recipe.algorithm.team.rotate_steps and node.role in node.team:
            before, steps = (num_turns(recipe, node, count) for count in (before, steps))
        return max(0, steps - before) * recipe.batch.updates_per_step

    def is_effective(self, recipe: Recipe) -> bool:
        """Whether the stage has an effect beyond its columns under a recipe."""
        return self.has_effect(recipe) if callable(self.has_effect) else self.has_effect


def names_for(recipe: Recipe, node: Node, names: Names) -> tuple[str, ...]:
    """Names that a stage declares, as they are for a node under a recipe."""
    return tuple(names(recipe, node) if callable(names) else names)


def has_turn(recipe: Recipe, node: Node, step: int) -> bool:
    """Whether the role of a node is trained in a step, from 1, if roles are trained in rotation."""
    return not recipe.algorithm.team.rotate_steps or num_turns(recipe, node, step) > num_turns(recipe, node, step - 1)


def num_turns(recipe: Recipe, node: Node, steps: int) -> int:
    """In how many of the first steps the role of a node is trained, if roles are trained in rotation."""
    length = recipe.algorithm.team.rotate_steps
    rounds, rest = divmod(steps, length * len(node.team))
    assert node.role is not None
    return rounds * length + min(max(rest - node.team.index(node.role) * length, 0), length)


STAGES = Declarations("stage", StageSpec, "@leaderless.stage(reads=..., writes=...)", num_arguments=2)


def stage(  # noqa: PLR0913 - what a user may say of a stage
    *,
    reads: Names = (),
    writes: WrittenColumns = (),
    rows: Rows = "same",
    needs_whole_groups: bool = False,
    streams: bool = False,
    roles: Mapping[str, RoleUse] | None = None,
    critics: Sequence[str] = (),
    has_effect: bool = False,
    metrics: Names = (),
    check: Callable[[Recipe, Node], None] | None = None,
) -> Callable[[Function], Function]:
    """Declare a custom function as a stage, which workflows name as `package.module:function`.

    The function takes `(batch: Batch, context: StageContext)` and returns a `Batch` with the columns that it writes.

    Args:
        reads: Columns that it needs, or a function of the recipe and the node that gives them.
        writes: Columns that it adds or replaces, or a function of the recipe, the node and its workflow that gives
            them; the stage must return exactly these.
        rows: Effect on rows.
        needs_whole_groups: Whether all samples of a prompt must be on the same rank.
        streams: Whether it may be called several times in a step, each time with some groups; what it writes about a
            group must not depend on other groups.
        roles: Use of each role, by the name under which `context.models` has it: `generate`, `score` or `train`. A role
            that is trained may be scored, too.
        critics: Names of those roles that are value models: to score with one is to compute values.
        has_effect: Whether it runs even if no node reads what it writes; a stage that trains always does.
        metrics: Metrics that it reports and that `checkpoint.best_metric` may name, or a function of the recipe and
            the node that gives them.
        check: Function that raises `RecipeError` for a recipe and a node with which the stage cannot work.

    Raises:
        ValueError: The declaration is contradictory or malformed.
    """
    for argument, names in (("reads", reads), ("writes", writes), ("metrics", metrics)):
        if not callable(names):
            _check_names(argument, names)
    if rows not in get_args(Rows):
        raise ValueError(f"@stage(rows={rows!r}): must be one of {', '.join(get_args(Rows))}")
    uses = dict(roles or {})
    _check_roles(uses, critics)

    def declare(function: Function) -> Function:
        summary = (function.__doc__ or "").strip().partition("\n")[0]
        spec = StageSpec(
            implementation=name_of(function),
            reads=reads if callable(reads) else tuple(reads),
            writes=writes if callable(writes) else tuple(writes),
            rows=rows,
            needs_whole_groups=needs_whole_groups,
            streams=streams,
            roles=uses,
            critics=tuple(critics),
            has_effect=has_effect or "train" in uses.values(),
            metrics=metrics if callable(metrics) else tuple(metrics),
            check=check,
            summary=summary,
        )
        return STAGES.declare(function, spec)

    return declare


def _check_roles(uses: Mapping[str, RoleUse], critics: Sequence[str]) -> None:
    for name, use in uses.items():
        if not name.isidentifier() or use not in get_args(RoleUse):
            known = ", ".join(get_args(RoleUse))
            raise ValueError(f"@stage(roles={uses!r}): must give plain names one of {known} each")
    for name in _check_names("critics", critics):
        if uses.get(name) not in {"score", "train"}:
            raise ValueError(f"@stage(critics={critics!r}): '{name}' must be one of `roles`, to score or to train")


def _check_names(argument: str, names: Sequence[str]) -> Sequence[str]:
    """The names, which are refused if they are malformed."""
    written, kind = f"@stage({argument}={names!r})", {"metrics": "metrics", "critics": "roles"}.get(argument, "columns")
    if isinstance(names, str):
        raise ValueError(f"{written}: must be a list of {kind}: write {argument}=[{names!r}]")
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(f"{written}: {name!r} is no name of a {kind[:-1]}: use text")
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ValueError(f"{written}: names {twice!r} twice; keep one")
    return names


def tagged(name: str, node: Node) -> str:
    """The name of a node's metric, with the role it is of where several roles sample: `rollout/staleness/solver`.

    Names that already hold a role stay as they are, and so do metrics of all roles together.
    """
    parts = name.split("/")
    return name if not node.tag or {*parts} & {node.tag, node.role, "throughput"} else f"{name}/{node.tag}"


AGES: Mapping[str, tuple[float, float]] = {
    **{str(age): (age, age) for age in range(5)},
    "5-8": (5, 8),
    "9+": (9, math.inf),
}
"""First and last age of each range, in optimizer updates, by its name."""


def may_be_stale(recipe: Recipe, node: Node) -> bool:
    """Whether samples of a node may be trained with later weights than those that sampled them."""
    return bool(recipe.open_channels) or recipe.online is not None or node.is_carried
