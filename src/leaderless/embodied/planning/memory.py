"""An estimate of the memory of a rank whose policy moves a body: models, passes, and what episodes have shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from leaderless.config import Recipe, RecipeError
from leaderless.config.environment import BodyConfig
from leaderless.config.models import Offload
from leaderless.planner.layout import most_prompts_of_rank
from leaderless.planner.memory.model import FLOAT32_BYTES, number_bytes
from leaderless.planner.memory.optimizer_states import kept_of
from leaderless.planner.memory.rank import Bounds, MemoryEstimate, Parts, RankMemory, fullest_rank
from leaderless.planner.plan import Plan
from leaderless.planner.plan_parts import RoleInstance, answering

UNIT_BYTES = 49
"""Bytes of all columns of a unit in a step: place, mask, version, temperature, log-probabilities, and so on."""
STEP_BYTES = 4
"""Bytes of the columns of a step of the environment: its reward."""
COUNT_BYTES = 8
"""Bytes of a count."""


@dataclass(frozen=True)
class BodySize:
    """Sizes of a model of a body.

    Attributes:
        num_parameters: Weights.
        num_trained: Weights with a gradient.
        num_root: Weights that are gathered for the whole of a pass.
        num_layer: Weights of the largest layer, of those that are gathered one by one; 0 without such layers.
        trained_bytes: Bytes at the fullest moment of a forward and backward pass, for each decision, without gradients
            of weights.
        scored_bytes: Bytes at the fullest moment of a pass without gradients, for each decision.
        chunk: Steps of a decision.
        num_units: Log-probabilities of a decision, at most.
        frame_bytes: Bytes of an observation: its images and its state.
        choice_bytes: Bytes of what says what was chosen.
        num_in_blocks: Trained weights of which `adamw_8bit` quantizes the moments.
    """

    num_parameters: int
    num_trained: int
    num_root: int
    num_layer: int
    trained_bytes: int
    scored_bytes: int
    chunk: int
    num_units: int
    frame_bytes: int
    choice_bytes: int
    num_in_blocks: int = 0


@dataclass(frozen=True)
class LearnerSize:
    """Sizes of what SAC learns with, next to its policy.

    Attributes:
        num_critics: Weights of the critics.
        trained_bytes: Bytes at the fullest moment of an update, for each transition, without gradients of weights.
        num_in_blocks: Weights of the critics of which `adamw_8bit` quantizes the moments.
    """

    num_critics: int
    trained_bytes: int
    num_in_blocks: int = 0


def estimate_body_memory(
    recipe: Recipe, plan: Plan, ranks: Sequence[int], bounds: tuple[Bounds, Bounds]
) -> MemoryEstimate | None:
    """The fullest of some ranks; see `estimate_memory`. None if the environment or a model cannot be made here.

    Models are made without numbers, and what their passes hold is counted. What simulators need themselves is not
    known: only the memory that they share with the rank is counted.
    """
    from leaderless.embodied.policies.policy_size import measure_body, measure_learner  # imports torch

    body, sac, models = recipe.body, recipe.algorithm.sac, list[list[BodyModelMemory]]()
    assert body is not None
    for instance in plan.instances:
        config, key = recipe.model_of(instance.role), f"models.{instance.role}"
        if config is None:
            return None
        try:
            size = measure_body(config, key, body, is_critic=instance.is_critic)
        except (RecipeError, NotImplementedError):
            return None  # a run says what is wrong; a plan is possible without
        is_asked = bool(recipe.evaluation.every_steps) and instance == answering(plan.instances, recipe.evaluation.role)
        learner = None if sac is None or not instance.is_trained else measure_learner(config, key, body, sac)
        shards = 1 if learner else instance.layout.dp  # SAC trains whole models
        common = number_bytes(config), shards, instance.generates or is_asked, config.gradient_checkpointing
        models.append([BodyModelMemory(instance, size, learner, *common)])
    return fullest_rank(BodyRank, recipe, plan, models, ranks, bounds)


@dataclass(frozen=True)
class BodyModelMemory:
    """A model on a rank, with the bytes of a number as it computes, and how many ranks divide its weights."""

    instance: RoleInstance
    size: BodySize
    learner: LearnerSize | None
    width: int
    shards: int
    generates: bool
    is_recomputed: bool

    @property
    def is_sharded(self) -> bool:
        """Whether weights are gathered for a pass."""
        return self.learner is None and (self.shards > 1 or self.width != FLOAT32_BYTES)

    @property
    def share(self) -> int:
        """Bytes of a rank's share of the weights."""
        return -(-self.size.num_parameters * FLOAT32_BYTES // self.shards)

    @property
    def trained(self) -> int:
        """The same of those that are trained."""
        return -(-self.size.num_trained * FLOAT32_BYTES // self.shards) * self.instance.is_trained

    @property
    def critics(self) -> int:
        """Bytes of SAC's critics."""
        return 0 if self.learner is None else self.learner.num_critics * FLOAT32_BYTES

    @property
    def gathered(self) -> int:
        """Bytes of weights that are gathered for a pass."""
        return (self.size.num_root + 2 * self.size.num_layer) * self.width * self.is_sharded


@dataclass(frozen=True)
class BodyRank(RankMemory[BodyModelMemory]):
    """A rank whose policy moves a body."""

    @property
    def body(self) -> BodyConfig:
        """Settings of the environment."""
        assert self.recipe.body is not None
        return self.recipe.body

    def saved_bytes(self) -> int:
        """Weights and moments, and critics that follow others slowly."""
        return sum(model.trained + 2 * model.critics + self._optimizer_bytes(model) for model in self.models)

    def _optimizer_bytes(self, model: BodyModelMemory) -> int:
        """What the optimizer keeps of a rank's share of the weights, and of the critics."""
        if not model.trained:
            return 0
        config, size = self.recipe.as_seen_by(model.instance.role).optimizer, model.size
        kept = sum(
            one.bytes_on(model.shards) for one in kept_of(config, size.num_trained, in_blocks=size.num_in_blocks)
        )
        if (learner := model.learner) is not None:
            critics = kept_of(config, learner.num_critics, in_blocks=learner.num_in_blocks)
            kept += sum(one.bytes_on(1) for one in critics)
        return kept

    def _is_away(self, model: BodyModelMemory) -> bool:
        """Whether what the optimizer keeps is elsewhere between updates."""
        place = self.recipe.as_seen_by(model.instance.role).optimizer.offload
        return place == "disk" or (place == "host" and not self.is_cpu)

    def offloaded(self, where: Offload) -> Parts:
        """What optimizers keep elsewhere."""
        own = [one for one in self.models if self.recipe.as_seen_by(one.instance.role).optimizer.offload == where]
        return {f"{one.instance.role} optimizer": self._optimizer_bytes(one) for one in own if one.trained}

    def loading(self) -> Parts:
        """Models are read whole, and then divided."""
        loading = whole = 0
        for model in self.models:
            weights = model.size.num_parameters * FLOAT32_BYTES
            loading = max(loading, whole + weights * (2 if model.is_sharded else 1))
            whole += model.share
        return {"whole weights": loading}

    def waiting(self) -> Parts:
        """Rows of the step, and what simulators share."""
        rows = {"rows of the step": self.rows_bytes()}
        if self.body.processes:
            rows["shared with simulators"] = self.body.num_environments * max(
                model.size.frame_bytes for model in self.models
            )
        if not self.is_cpu:
            return rows | {"rows of a mini-batch, or being packed": self.rows_bytes()}
        # Frames are played one by one, and packed; the allocator keeps what such small pieces have taken.
        return rows | {"rows as they were played": self.rows_bytes() * any(model.generates for model in self.models)}

    def resident(self, model: BodyModelMemory) -> Iterator[tuple[str, int]]:
        """Weights, optimizer and critics."""
        role = model.instance.role
        yield f"{role} weights", model.share
        if model.trained and not self._is_away(model):
            yield f"{role} optimizer", self._optimizer_bytes(model)
        if model.critics:
            yield f"{role} critics", 2 * model.critics
        if model.generates:
            yield f"{role} engine's weights", model.size.num_parameters * model.width

    def phases(self, model: BodyModelMemory) -> Iterator[tuple[str, dict[str, int]]]:
        """Bytes that passes hold."""
        role, size, num = model.instance.role, model.size, self._pass_decisions(model)
        observed, rows = num * size.frame_bytes, self.rows_bytes() * self.is_cpu
        if model.is_recomputed:
            num = min(num, max(1, self.bounds.pass_tokens // size.chunk))
        if model.generates:
            # Where environments step in processes, half of them wait for decisions at a time.
            asked = -(-self.body.num_environments // (2 if self.body.processes else 1))
            yield f"{role} generates", {"activations": asked * (size.scored_bytes + size.frame_bytes)}
        if model.learner is not None:
            yield f"{role} trains", self._learning(model, model.learner)
            return
        if model.instance.scores:
            held = {"gathered weights": model.gathered, "activations": num * size.scored_bytes}
            yield f"{role} scores", held | {"frames of a pass": observed}
        if model.instance.is_trained:
            # Gradients that are whole at the same time, on their way to the ranks that hold their parts.
            num_summed = max(2 * size.num_layer, size.num_root) * model.is_sharded
            summed = num_summed * (model.width + FLOAT32_BYTES * (2 if self.is_cpu else 1))
            held = {
                "gathered weights": model.gathered,
                "rows of a mini-batch": -(-rows // self.recipe.batch.parts_per_step),
                "frames of a pass": observed,
                "activations": num * size.trained_bytes,
                "gradients": model.trained,
                "gradients being summed": summed,
            }
            yield f"{role} trains", held

    def _learning(self, model: BodyModelMemory, learner: LearnerSize) -> dict[str, int]:
        """Bytes that an update of SAC holds: each rank computes the transitions of a batch that it keeps."""
        sac = self.recipe.algorithm.sac
        assert sac is not None
        num = -(-sac.batch_size // model.instance.layout.dp)
        return {
            # What is seen before and after, as it is read and as it is joined.
            "transitions of a batch": 4 * num * model.size.frame_bytes,
            "activations": num * learner.trained_bytes,
            # As they are computed, in one piece to be summed, and as the optimizer takes them.
            "gradients": 3 * max(model.trained, model.critics),
        }

    def _decisions(self, model: BodyModelMemory) -> int:
        """Most decisions of an episode."""
        return -(-self.body.max_steps // model.size.chunk)

    def _episodes(self) -> int:
        """Most episodes of a step on this rank."""
        sampling = [model for model in self.models if model.instance.generates]
        siblings = self.recipe.batch.responses_per_prompt if sampling else 1
        return most_prompts_of_rank(self.recipe, max(model.instance.layout.dp for model in self.models)) * siblings

    def _pass_decisions(self, model: BodyModelMemory) -> int:
        """Most decisions of a pass, which has at least one episode."""
        longest, parts = self._decisions(model), self.recipe.batch.parts_per_step * model.instance.is_trained
        most = -(-self._episodes() // max(1, parts)) * longest
        return min(most, max(longest, self.bounds.pass_tokens // model.size.chunk))

    def rows_bytes(self) -> int:
        """The rows of a step's episodes: what was seen, decided and computed; all episodes are as long as may be."""
        policy = next((model for model in self.models if not model.instance.is_critic), self.models[0])
        decisions = self._decisions(policy)
        units = {"token": policy.size.num_units, "action": policy.size.chunk, "chunk": 1}[self.body.log_prob]
        seen = (decisions + 1) * policy.size.frame_bytes
        decided = policy.size.choice_bytes + units * UNIT_BYTES + policy.size.chunk * STEP_BYTES
        if self.recipe.algorithm.sac is not None:  # what was done: actions, rewards, their number, who acted
            decided += policy.size.choice_bytes + policy.size.chunk * (STEP_BYTES + 1) + COUNT_BYTES
        return self._episodes() * (seen + decisions * decided)
