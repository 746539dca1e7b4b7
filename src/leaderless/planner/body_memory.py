"""An estimate of the memory of a rank whose policy moves a body: models, passes, and what episodes have shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from leaderless.config import Recipe, RecipeError
from leaderless.config.body import BodyConfig
from leaderless.planner.body_size import BodySize, LearnerSize, measure_body, measure_learner
from leaderless.planner.layout import all_ranks, most_prompts_of_rank
from leaderless.planner.memory_parts import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    LIBRARIES_BYTES,
    WORKSPACE_BYTES,
    WRITE_BYTES,
    Memory,
    MemoryEstimate,
)
from leaderless.planner.model_memory import FLOAT32_BYTES, number_bytes
from leaderless.planner.parts import RoleInstance, answering
from leaderless.planner.plan import Plan
from leaderless.planner.process_groups import communicators

UNIT_BYTES = 49
"""Bytes of all columns of a unit in a step: place, mask, version, temperature, log-probabilities, and so on."""
STEP_BYTES = 4
"""Bytes of the columns of a step of the environment: its reward."""
COUNT_BYTES = 8
"""Bytes of a count."""


def estimate_body_memory(
    recipe: Recipe, plan: Plan, pass_steps: int, among: Sequence[int] | None = None
) -> MemoryEstimate | None:
    """Estimate the bytes on the rank that holds most; None where the environment or a model cannot be made here.

    Models are made without numbers, and what their passes hold is counted (`leaderless.policies.measured`). What
    simulators need themselves is not known: only the memory that they share with the rank is counted.

    Args:
        recipe: Settings.
        plan: Models, and the ranks that exchange with each other.
        pass_steps: Most steps of the environment in a pass.
        among: Ranks to look at; all by default.
    """
    body, instances = recipe.body, plan.instances
    assert body is not None
    models: list[_Model] = []
    for instance in instances:
        size = _size_of(recipe, instance, body)
        config = recipe.model_of(instance.role)
        if size is None or config is None:
            return None
        is_asked = bool(recipe.evaluation.every_steps) and instance == answering(instances, recipe.evaluation.role)
        generates = instance.generates or is_asked
        learner = _learner_of(recipe, instance, body)
        # SAC trains whole models.
        shards = 1 if learner else instance.layout.dp
        is_recomputed = config.gradient_checkpointing
        models.append(_Model(instance, size, learner, number_bytes(config), shards, generates, is_recomputed))
    if not models:
        return None
    ranks = among or all_ranks(*(instance.layout for instance in instances))
    count = communicators(plan)
    sets = dict.fromkeys((tuple(x for x in models if rank in x.instance.layout), count(rank)) for rank in ranks)

    def fullest(*, is_cpu: bool) -> Memory:
        found = (_Rank(recipe, body, own, pass_steps, num, is_cpu).memory() for own, num in sets)
        return max(found, key=lambda memory: memory.peak)

    return MemoryEstimate(fullest(is_cpu=True), fullest(is_cpu=False))


def _size_of(recipe: Recipe, instance: RoleInstance, body: BodyConfig) -> BodySize | None:
    config = recipe.model_of(instance.role)
    if config is None:
        return None
    try:
        return measure_body(config, f"models.{instance.role}", body, is_critic=instance.is_critic)
    except (RecipeError, NotImplementedError):
        return None  # a run says what is wrong; a plan is possible without


def _learner_of(recipe: Recipe, instance: RoleInstance, body: BodyConfig) -> LearnerSize | None:
    """Critics of a role that SAC trains, whose policy has been measured."""
    config, sac = recipe.model_of(instance.role), recipe.algorithm.sac
    if config is None or sac is None or not instance.is_trained:
        return None
    return measure_learner(config, f"models.{instance.role}", body, sac)


@dataclass(frozen=True)
class _Model:
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
    def saved(self) -> int:
        """Bytes of a rank's share of a checkpoint: weights and moments, and critics that follow others slowly."""
        return 3 * self.trained + 4 * self.critics

    @property
    def gathered(self) -> int:
        """Bytes of weights that are gathered for a pass."""
        return (self.size.num_root + 2 * self.size.num_layer) * self.width * self.is_sharded

    @property
    def num_summed(self) -> int:
        """Gradients that are whole at the same time, on their way to the ranks that hold their parts."""
        return max(2 * self.size.num_layer, self.size.num_root) * self.is_sharded


@dataclass(frozen=True)
class _Rank:
    recipe: Recipe
    body: BodyConfig
    models: Sequence[_Model]
    pass_steps: int
    num_communicators: int
    is_cpu: bool

    def memory(self) -> Memory:
        """All parts."""
        resident, phases, host = dict[str, int](), dict[str, dict[str, int]](), dict[str, int]()
        loading = whole = 0
        for model in self.models:
            role, weights = model.instance.role, model.size.num_parameters * FLOAT32_BYTES
            loading = max(loading, whole + weights * (2 if model.is_sharded else 1))
            whole += model.share
            resident[f"{role} weights"] = model.share
            if model.trained:
                resident[f"{role} optimizer"] = 2 * (model.trained + model.critics)
            if model.critics:
                resident[f"{role} critics"] = 2 * model.critics
            if model.generates:
                resident[f"{role} engine's weights"] = model.size.num_parameters * model.width
            for name, parts in self._phases(model):
                phases[name] = max(phases.get(name, {}), parts, key=lambda parts: sum(parts.values()))
        copied = sum(model.saved for model in self.models)
        written = {"files being written": min(WRITE_BYTES, copied)}
        rows = {"rows of the step": self.rows_bytes()}
        if self.body.processes:
            rows["shared with simulators"] = self.body.num_environments * self._frame_bytes()
        kept = {"checkpoint copy": copied, **written} if copied and self.recipe.checkpoint.asynchronous else {}
        libraries, loaded = {"libraries": LIBRARIES_BYTES}, {"whole weights": loading}
        if self.is_cpu:
            if copied:
                phases["checkpoint"] = {} if self.recipe.checkpoint.asynchronous else written
            # Frames are played one by one, and packed; the allocator keeps what such small pieces have taken.
            rows["rows as they were played"] = self.rows_bytes() * any(model.generates for model in self.models)
            return Memory(resident | rows | kept | libraries, phases, {"loading": libraries | loaded}, {})
        resident |= {"driver": CONTEXT_BYTES, "workspaces": WORKSPACE_BYTES}
        if self.num_communicators:
            resident["communication"] = self.num_communicators * COMMUNICATOR_BYTES
        copies = {"rows of a mini-batch, or being packed": self.rows_bytes()}
        host = libraries | kept | rows | copies | loaded
        return Memory(resident, phases, {}, host)

    def _phases(self, model: _Model) -> Iterator[tuple[str, dict[str, int]]]:
        role, size, num = model.instance.role, model.size, self._pass_decisions(model)
        observed, rows = num * size.frame_bytes, self.rows_bytes() * self.is_cpu
        if model.is_recomputed:
            num = min(num, max(1, self.pass_steps // size.chunk))
        if model.generates:
            # Where environments step in processes, half of them wait for decisions at a time.
            asked = -(-self.body.num_environments // (2 if self.body.processes else 1))
            acting = asked * (size.scored_bytes + size.frame_bytes)
            yield f"{role} generates", {"activations": acting}
        if model.learner is not None:
            yield f"{role} trains", self._learning(model, model.learner)
            return
        if model.instance.scores:
            yield (
                f"{role} scores",
                {
                    "gathered weights": model.gathered,
                    "activations": num * size.scored_bytes,
                    "frames of a pass": observed,
                },
            )
        if model.instance.is_trained:
            batch = self.recipe.batch
            summed = model.num_summed * (model.width + FLOAT32_BYTES * (2 if self.is_cpu else 1))
            yield (
                f"{role} trains",
                {
                    "gathered weights": model.gathered,
                    "rows of a mini-batch": -(-rows // batch.parts_per_step),
                    "frames of a pass": observed,
                    "activations": num * size.trained_bytes,
                    "gradients": model.trained,
                    "gradients being summed": summed,
                },
            )

    def _learning(self, model: _Model, learner: LearnerSize) -> dict[str, int]:
        """What an update of SAC holds: each rank computes the transitions of a batch that it keeps."""
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

    def _decisions(self, model: _Model) -> int:
        """Most decisions of an episode."""
        return -(-self.body.max_steps // model.size.chunk)

    def _episodes(self) -> int:
        """Most episodes of a step on this rank."""
        sampling = [model for model in self.models if model.instance.generates]
        siblings = self.recipe.batch.responses_per_prompt if sampling else 1
        return most_prompts_of_rank(self.recipe, max(model.instance.layout.dp for model in self.models)) * siblings

    def _pass_decisions(self, model: _Model) -> int:
        """Most decisions of a pass, which has at least one episode."""
        longest, parts = self._decisions(model), self.recipe.batch.parts_per_step * model.instance.is_trained
        most = -(-self._episodes() // max(1, parts)) * longest
        return min(most, max(longest, self.pass_steps // model.size.chunk))

    def _frame_bytes(self) -> int:
        return max(model.size.frame_bytes for model in self.models)

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
