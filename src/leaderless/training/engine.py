"""Engines that train and score a model, however it is sharded: how a back end makes one, and how its state moves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from leaderless.algorithms.divergences import Divergence
from leaderless.algorithms.settings import SacConfig
from leaderless.base.named_functions import load_own
from leaderless.config import RecipeError
from leaderless.config.environment import BodyConfig
from leaderless.config.models import ModelConfig, Offload, OptimizerConfig, Whole
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.blocks import HeldWeights, LocalWeight, Pool
from leaderless.distributed.weights.route import WeightRoute
from leaderless.distributed.weights.stream import fill_weights, send_weights
from leaderless.models.causal_lm import CausalLM, TokenOutputs
from leaderless.models.divergence_scores import TeacherHead
from leaderless.models.scoring import Entropy
from leaderless.planner import Layout
from leaderless.planner.engines import BACKEND_KEY, backend_of
from leaderless.planner.layout import COPIES, EXPERTS, PART
from leaderless.training.forward_passes import Passes
from leaderless.training.micro_batches import MicroBatch


@dataclass(frozen=True)
class UpdateInfo:
    """Outcome of an optimizer step.

    Attributes:
        grad_norm: Global L2 norm of the gradient before clipping.
        learning_rate: Learning rate that was used, or would have been.
        is_made: Whether the weights have changed.
    """

    grad_norm: float
    learning_rate: float
    is_made: bool = True


@dataclass(frozen=True)
class ApartSetup:
    """How a back end starts processes of its own, if it needs any.

    Attributes:
        python: Interpreter of an environment with what the back end needs.
        start_timeout_s: Longest time until a process answers.
        answer_timeout_s: Longest time without an answer after that.
        logs: Folder for the output of the processes.
    """

    python: str
    start_timeout_s: float
    answer_timeout_s: float
    logs: Path


@dataclass(frozen=True)
class BodySetup:
    """Settings of a body that its models depend on.

    Attributes:
        config: Environment of the body, and the unit that has one log-probability.
        sac: Settings of SAC, if this trains the model.
        values_steps: Whether its critic is to have a value for each step of a decision.
    """

    config: BodyConfig
    sac: SacConfig | None = None
    values_steps: bool = False


@dataclass(frozen=True)
class ShardingSetup:
    """Settings of a back end that shards weights and computes with `torch`; others need not read them.

    Attributes:
        donor: Engine of another role, with adapters on the same model, whose other weights this one may use; they stay
            as they are.
        keeps: Parts of a divided model that each rank keeps whole; see `TrainingConfig.keep_whole`.
        compiles: Whether decoder layers are compiled; see `TrainingConfig.compile`.
        max_logits: Most logits that are computed at a time on an accelerator; see `CausalLM`.
        offload_folder: Folder of files for what is offloaded to the disk; by default that of the system's temporary
            files.
        offload_frozen: Place of weights that are not trained while they are not used; see `TrainingConfig`.
    """

    donor: Trainable | None = None
    keeps: Whole = "nothing"
    compiles: Literal["auto"] | bool = False
    max_logits: int | None = None
    offload_folder: Path = Path(tempfile.gettempdir())
    offload_frozen: Offload = "none"


@dataclass(frozen=True)
class EngineSetup:
    """Settings for a back end that makes an engine on one of the ranks of a layout. All of them make it together.

    Attributes:
        role: Role of the model.
        model: Model to load, and how it computes.
        is_critic: Whether it is a value model instead of a language model.
        layout: Ranks that hold the model, and how they divide rows and weights.
        process_group: These ranks, for collectives.
        axis_groups: The peers of this rank along each axis of the layout's mesh, itself included, by axis. If there are
            several along `tp` or `pp`, also, as `part`, all ranks with the same place along both; if along `pp`, these
            once more as `back`, for what goes from later stages to earlier ones. If experts are divided, as `ep` the
            ranks that divide them and, if there are several, as `copies` those with the same ones.
        device: Device that computes.
        optimizer: Settings of the optimizer; None for a model that is only scored.
        num_updates: Optimizer steps of the whole run, for the schedule of the learning rate.
        micro_batch_tokens: Most tokens of one pass.
        apart: Settings for starting separate processes; None if the recipe names no interpreter for them.
        body: The body that the model is for; None for language models.
        is_reward_model: Whether it is a value model that is trained to score whole responses.
        seed: Seed of the run.
        sharding: Settings of a back end that shards weights itself.
    """

    role: str
    model: ModelConfig
    is_critic: bool
    layout: Layout
    process_group: ProcessGroup
    axis_groups: Mapping[str, ProcessGroup]
    device: torch.device
    optimizer: OptimizerConfig | None
    num_updates: int
    micro_batch_tokens: int
    apart: ApartSetup | None = None
    body: BodySetup | None = None
    is_reward_model: bool = False
    seed: int = 0
    sharding: ShardingSetup = ShardingSetup()

    def mesh(self) -> DeviceMesh:
        """The ranks of the layout as a mesh with the axes of the layout, `dp` the outermost."""
        axes, kind = self.layout.axes, self.device.type
        groups = [self.axis_groups[axis].torch_group for axis in axes]
        if len(axes) == 1:
            return DeviceMesh.from_group(groups[0], kind, mesh_dim_names=axes)
        ranks = torch.tensor(self.layout.ranks).reshape([self.layout.sizes[axis] for axis in axes])
        return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=axes)

    def weight_mesh(self) -> DeviceMesh:
        """The ranks of a stage as a mesh: `tp` if there are several, and `dp` with all that divide a part's weights."""
        layout, part, kind = self.layout, self.axis_groups[PART], self.device.type
        if layout.tp == 1:
            return DeviceMesh.from_group(part.torch_group, kind, mesh_dim_names=("dp",))
        groups = [self.axis_groups["tp"].torch_group, part.torch_group]
        stage = layout.coordinates(self.process_group.rank)["pp"]
        ranks = torch.tensor(layout.ranks).reshape(layout.dp, layout.pp, -1)[:, stage].reshape(-1, layout.tp).t()
        return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=("tp", "dp"))

    def expert_mesh(self) -> DeviceMesh:
        """The ranks of a stage as a mesh: `ep` that divide the experts, and `copies` with the same ones, if several."""
        layout, kind = self.layout, self.device.type
        experts = self.axis_groups[EXPERTS].torch_group
        if layout.num_copies == 1:
            return DeviceMesh.from_group(experts, kind, mesh_dim_names=(EXPERTS,))
        ranks = torch.tensor(layout.stage(self.process_group.rank)).reshape(-1, layout.ep).t()
        groups = [experts, self.axis_groups[COPIES].torch_group]
        return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=(EXPERTS, COPIES))


class Trainable(Protocol):
    """One instance of a role's model on the ranks of a layout. All of them call every method together.

    A batch has the columns `prompt_tokens`, `tokens` and `response_mask`. Gradients add up over passes and ranks: the
    denominators are in the losses, so that no engine divides by anything. Backward passes are collective too: every
    rank needs a loss that depends on the outputs, even if a micro-batch has no targets there.

    Attributes:
        micro_batch_tokens: Most tokens of one pass; it may be changed between passes.
    """

    micro_batch_tokens: int

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that hold this instance."""

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps that led to the weights."""

    @property
    def is_value_model(self) -> bool:
        """Whether it is a value model, with a scalar head."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens with an embedding."""

    def adapt_to_memory(self, on_lowered: Callable[[int], None]) -> None:
        """From now on lower the bound of a pass where memory runs out, and call a function with each new bound."""

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Cut a batch for this engine's memory bound; the same number of micro-batches on every rank."""

    def passes(self, batch: Batch) -> Passes:
        """The micro-batches of a batch; where memory runs out in one of them, all again, and smaller if possible."""

    def optimizer_step(self, allow: Callable[[float], bool] | None = None) -> UpdateInfo:
        """Clip the gradient, change the weights and clear the gradient.

        Args:
            allow: Function of the norm of the gradient that decides, the same on every rank, whether the weights
                change; without it they do.

        Raises:
            RuntimeError: The gradient is not finite, and `allow` did not refuse it; weights are unchanged.
        """

    def discard_gradient(self) -> None:
        """Discard the gradient that has been added up."""

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight that training changes by its name in `transformers`, whole, on every rank, one at a time."""

    @property
    def is_replica(self) -> bool:
        """Whether another rank has the same part of the weights and of the optimizer, and stands for it."""

    def weight_shapes(self) -> Mapping[str, torch.Size]:
        """Shape of every whole weight that training changes by its name, in an order that is the same on every rank."""

    def write_description(self, folder: Path) -> None:
        """Write the files that `transformers` reads next to the weights, such as `config.json`; one rank calls it."""

    def local_weights(self) -> Iterator[LocalWeight]:
        """This rank's part of every weight, named as in `transformers`, in the memory that training changes.

        Of a model with adapters these are the adapters' weights.
        """

    def state(self) -> dict[str, Tensor]:
        """Weights as `weights.<name>` and what the optimizer keeps, to be saved and to be loaded in place.

        Each is a `DTensor`, or whole and the same on every rank. If they are the very tensors that training changes,
        and are so for good, the engine says it by an attribute `has_live_state`: then they can be saved while a step
        goes on, before its first update.
        """

    def state_loaded(self, policy_version: int) -> None:
        """Take over tensors of `state` that have been written to, and the policy version of their weights."""


class TrainEngine(Trainable, Protocol):
    """A language model: it scores tokens, and is trained."""

    def log_probs(self, batch: Batch) -> Jagged:
        """Log-probabilities of the sampled tokens, float32, without gradient.

        Logits are divided by the column `temperatures` of the batch; without it, by 1.
        """

    def forward(self, micro_batch: MicroBatch, entropy: Entropy = "value") -> TokenOutputs:
        """Log-probabilities and entropies at a micro-batch's sampled tokens, with a graph for the backward pass.

        Args:
            micro_batch: One of those that every rank passes through together.
            entropy: Whether entropies are computed, and whether the loss depends on them.
        """


class AdaptedEngine(TrainEngine, Protocol):
    """An engine of a back end that trains adapters of a language model."""

    def merged_weights(self) -> Iterator[LocalWeight]:
        """This rank's part of every weight of the model, with adapters merged into the weights that they adapt.

        All ranks call it together.
        """

    def base(self) -> TrainEngine:
        """The same model without its adapters, to score tokens; it shares all memory."""


class ReadTeacher(NamedTuple):
    """A teacher that has read a micro-batch.

    Attributes:
        head: Its head, with hidden states at the tokens that this rank computes.
        places: Their numbers among the sampled tokens of the micro-batch.
    """

    head: TeacherHead
    places: Tensor


class PassByPassEngine(TrainEngine, Protocol):
    """A language model in one process that is trained pass by pass, with other optimizer settings for each update.

    Attributes:
        model: The model, whose memory others may use.
        device: Device that computes.
    """

    model: CausalLM
    device: torch.device

    @property
    def is_plain(self) -> bool:
        """Whether it computes with its weights as it holds them."""

    def named_weights(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Trained weights by name."""

    def begin_pass(self, *, is_last: bool) -> None:
        """Begin a pass; gradients of ranks are added behind the last one."""

    def end_passes(self, *, is_done: bool) -> None:
        """End passes, all of which are done or given up."""

    def change_optimizer(self, config: OptimizerConfig) -> None:
        """Use other settings of the same type of optimizer from the next update on."""


class DistillingEngine(TrainEngine, Protocol):
    """An engine of a back end whose language models can learn the distributions of others, or be learned from."""

    def likeliest_words(self, batch: Batch, how_many: int, temperature: float) -> Jagged:
        """Likeliest words at each sampled token, [2, how_many + 1] float32 each; see `likeliest_words` of models."""

    def teaching(self, micro_batch: MicroBatch) -> AbstractContextManager[ReadTeacher]:
        """What this model finds at a micro-batch, for passes of a student on the same ranks while it lasts."""

    def forward(
        self,
        micro_batch: MicroBatch,
        entropy: Entropy = "value",
        divergence: Divergence | None = None,
        teacher: ReadTeacher | None = None,
    ) -> TokenOutputs:
        """Compute, with a divergence, also that from a teacher, or from the words that came with the micro-batch."""


class ValueEngine(Trainable, Protocol):
    """A value model: it predicts the reward to come, and is trained."""

    def values(self, batch: Batch) -> Jagged:
        """Value before each sampled token, float32, without gradient."""

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """[R] float32: value before each of a micro-batch's sampled tokens, with a graph for the backward pass."""


@runtime_checkable
class BodyTrainable(Protocol):
    """A policy of a body, or its critic, which is trained."""

    def add_states(self, batch: Batch, total: Callable[[Tensor], Tensor]) -> None:
        """Show a model that normalizes states the states of a step, after its updates.

        Args:
            batch: This rank's episodes.
            total: Function that sums a tensor over the ranks of the node; they call it together.
        """


class BodyCritic(ValueEngine, Protocol):
    """A value model of what a body sees."""

    def final_values(self, batch: Batch) -> Tensor:
        """[n] float32: value of what was seen at the end of each episode."""


def make_train_engine(backend: str, setup: EngineSetup) -> TrainEngine:
    """Make the engine of a language model. All ranks of its layout call it together.

    Raises:
        RecipeError: There is no such back end, what it makes is no `TrainEngine`, or the model cannot be loaded.
    """
    assert not setup.is_critic
    return cast(TrainEngine, _make(backend, setup, TrainEngine))


def make_value_engine(backend: str, setup: EngineSetup) -> ValueEngine:
    """Make the engine of a value model. All ranks of its layout call it together.

    Raises:
        RecipeError: There is no such back end, what it makes is no `ValueEngine`, or the model cannot be loaded.
    """
    assert setup.is_critic
    return cast(ValueEngine, _make(backend, setup, ValueEngine))


def _make(backend: str, setup: EngineSetup, protocol: type[Protocol]) -> object:  # type: ignore[valid-type]
    spec = backend_of(backend)
    name = spec.for_bodies if setup.body is not None and spec.for_bodies else spec.implementation
    engine = cast("Callable[[EngineSetup], object]", load_own(name))(setup)
    names = {name for base in protocol.__mro__ for name in (*vars(base), *getattr(base, "__annotations__", ()))}
    missing = sorted(name for name in names if not name.startswith("_") and not hasattr(engine, name))
    if missing:
        raise RecipeError.at(
            BACKEND_KEY,
            f"'{backend}' made {type(engine).__name__} for role '{setup.role}', which is no {protocol.__name__}: "
            f"it lacks {', '.join(missing)}",
        )
    return engine


def move_state(
    role: str, held: Trainable | None, wanted: Trainable | None, pools: tuple[Pool, Pool], process_group: ProcessGroup
) -> None:
    """Write what one instance keeps, weights and optimizer alike, into another one; nothing is rounded.

    All ranks of both layouts call it together; other ranks may. Each element is sent once, from a rank that holds it to
    each that wants it.

    Args:
        role: Role of the model.
        held: Instance of this rank in the old layout, if it is in it.
        wanted: Instance of this rank in the new layout, if it is in it.
        pools: Old and new layout, and how the back end divides tensors over each.
        process_group: Some ranks, among them all of both layouts.
    """
    source, target = (None if engine is None else _parts(engine) for engine in (held, wanted))
    known = source or target
    if known is None:
        return
    for dtype in known:
        parts = known[dtype]
        route = WeightRoute(f"weights of role '{role}'", parts.shapes, *pools, dtype, process_group.rank)
        own = None if source is None else source[dtype]
        if target is None:
            assert own is not None, "a rank without any of this state takes no part"
            send_weights(route, own, process_group)
        else:
            fill_weights(route, target[dtype], process_group, own)


def _parts(engine: Trainable) -> dict[torch.dtype, HeldWeights]:
    """The state of an instance as this rank holds it, by type, in the order of the model."""
    parts: dict[torch.dtype, list[LocalWeight]] = {}
    for name, value in engine.state().items():
        parts.setdefault(value.dtype, []).append(LocalWeight.of(name, value))
    return {dtype: HeldWeights.of(some, engine.policy_version) for dtype, some in parts.items()}
