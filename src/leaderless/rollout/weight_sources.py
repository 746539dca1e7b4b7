"""An engine with the source of its weights: a trainer on the same ranks, or trained ranks elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol, cast

import torch
from torch import Tensor
from typing_extensions import override

from leaderless.base.devices import trim_host_memory
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.remote.server_calls import EngineError
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.blocks import HeldWeights, LocalWeight, Pool, Shape, everything, whole_block
from leaderless.distributed.weights.copies import collected
from leaderless.distributed.weights.route import WeightRoute
from leaderless.distributed.weights.sent import NO_VERSION
from leaderless.distributed.weights.stream import Probe, WeightStream, receive_weights
from leaderless.models.causal_lm import CausalLM
from leaderless.models.lora.linear import is_adapter
from leaderless.rollout.engine import RolloutEngine
from leaderless.rollout.wrapped_engine import ALONE, compared
from leaderless.training.engine import AdaptedEngine, Trainable, TrainEngine


class Serving(Protocol):
    """An engine that generates with the newest weights that its ranks know."""

    engine: RolloutEngine

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps that led to the weights with which it generates now."""

    def phase(self) -> AbstractContextManager[RolloutEngine]:
        """The engine, awake and with weights. All ranks of the instance call it together.

        Raises:
            RuntimeError: The engine does not use these weights after they were loaded.
        """

    def release(self, ranks: AbstractSet[int]) -> None:
        """Release weights that were kept for a further phase, if these ranks, which call it together, hold all of them.

        A phase that needs them gathers them again.
        """

    def close(self) -> None:
        """End the engine."""


class Colocated(Serving):
    """Engine on ranks that also train or score the model; each phase begins with the trainer's weights.

    The weights are a part of each phase: between phases, memory belongs to the trainer. Only those that are wanted in a
    further phase are kept until ranks score or train. On one rank whose engine computes in the type of the trainer's
    weights, these are used as they are.

    Attributes:
        is_released: Whether the engine releases weights after each phase, even if the same are wanted again.
    """

    is_released = False

    def __init__(
        self,
        engine: RolloutEngine,
        trainer: TrainEngine,
        pool: Pool,
        dtype: torch.dtype,
        *,
        shard: ProcessGroup = ALONE,
        probe: Sequence[int] = (),
        may_restart: bool = False,
        is_merged: bool = False,
    ) -> None:
        """Load nothing yet.

        Args:
            engine: Engine of this rank.
            trainer: Instance of the model on the same ranks.
            pool: Its ranks, and how they divide its weights.
            dtype: Type in which the engine computes.
            shard: Ranks that make one engine together.
            probe: Text whose log-probabilities show that the engine has the weights; none if it is not asked.
            may_restart: Whether engines fail and start again by themselves, so that ranks ask each other.
            is_merged: Whether the engine gets weights with the trainer's adapters merged in; see `held_by`.
        """
        self.engine, self._trainer, self._shard, self._probe = engine, trainer, shard, probe
        self._may_restart, self._is_merged = may_restart, is_merged
        group = trainer.process_group
        shapes = held_by(trainer, is_merged=is_merged).shapes
        takers = Pool(pool.layout, everything)
        self._route = WeightRoute("the trainer's weights", shapes, pool, takers, dtype, group.rank, is_gathered=True)
        self._is_copied = len(self._route.local) < len(shapes) or dtype != torch.float32
        self._served_version = -1
        self._num_phases, self._expected_phases = 0, math.inf
        self._keeps_copies = False

    @override
    @property
    def policy_version(self) -> int:
        return self._trainer.policy_version

    @override
    @contextmanager
    def phase(self) -> Iterator[RolloutEngine]:
        version = self._trainer.policy_version
        if self._served_version != version:
            self._served_version = version
            self._expected_phases, self._num_phases = self._num_phases or math.inf, 0
        self._num_phases += 1
        self.engine.wake(self._reload)
        self._bring(is_needed=self.engine.policy_version != version)
        try:
            if self._shard.size == 1:
                yield self.engine
            else:
                with compared(self.engine, self._shard) as engine:
                    yield engine
        except BaseException:
            with suppress(EngineError):  # the error that is being raised says more
                self.engine.sleep(keep_weights=True)
            raise
        if self._may_restart:
            # Another rank's engine may need its weights again: no rank leaves before all engines have them.
            self._bring(is_needed=False)
        # If this version has served as often as the one before it, an update comes next, and new weights with it.
        is_wanted = self._num_phases < self._expected_phases
        self._sleep(keep_weights=is_wanted and not self.is_released)

    @override
    def release(self, ranks: AbstractSet[int]) -> None:
        if self._keeps_copies and ranks >= {*self._trainer.process_group.ranks}:
            self._sleep(keep_weights=False)

    def _sleep(self, *, keep_weights: bool) -> None:
        self.engine.sleep(keep_weights=keep_weights)
        self._keeps_copies = keep_weights and self._is_copied
        if self._is_copied and not keep_weights and self._trainer.process_group.payload_device.type == "cpu":
            trim_host_memory()  # the memory of whole weights would lie next to all that follows

    def _bring(self, *, is_needed: bool) -> None:
        """Give weights to engines until none needs any. All ranks of the trainer call it together."""
        if not self._may_restart:
            if is_needed:
                self._bring_once(is_mine=True)
            return
        while self._does_anyone_need(is_needed=is_needed):
            is_needed = not self._bring_once(is_mine=is_needed)

    def _does_anyone_need(self, *, is_needed: bool) -> bool:
        what = "which engines need weights"
        return bool(self._trainer.process_group.max(torch.tensor([int(is_needed)]), what))

    def _bring_once(self, *, is_mine: bool) -> bool:
        """Gather weights on all ranks, and load them if this rank needs them; returns whether its engine has them."""
        trainer, group = self._trainer, self._trainer.process_group
        stream = receive_weights(self._route, group, group, held_by(trainer, is_merged=self._is_merged))
        stream.probe = probe_of(trainer, self._probe) if self._probe else None
        if is_mine:
            self.engine.load_weights(stream)
        stream.drain(group.activity.beat)  # all ranks gather each weight, wherever it is used
        return not is_mine or self.engine.policy_version == trainer.policy_version

    def _reload(self) -> None:
        """Bring weights to this rank's engine during a phase, at whose end the other ranks wait for it."""
        has_weights = False
        while not has_weights:
            self._does_anyone_need(is_needed=True)
            has_weights = self._bring_once(is_mine=True)

    @override
    def close(self) -> None:
        self.engine.close()


class Fed(Serving):
    """Engine on ranks that only generate; those that train the model elsewhere send its weights.

    There is no trainer here to ask for weights again. For an engine that may fail and start again, its rank keeps a
    copy of them in host memory. Where differences come to an engine that has no weights as they were sent, its rank
    keeps those rows that come to it before all ranks gather them.

    Attributes:
        route: Way of whole weights to the ranks that generate.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        route: WeightRoute,
        takers: ProcessGroup,
        *,
        shard: ProcessGroup = ALONE,
        may_restart: bool = False,
        keep_cache: bool = True,
        own: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Start without weights.

        Args:
            engine: Engine of this rank.
            route: Way of whole weights to the ranks that generate.
            takers: These ranks.
            shard: Those of them that make one engine together.
            may_restart: Whether the engine fails and starts again by itself.
            keep_cache: Whether responses in progress keep their keys and values; see `RolloutEngine.load_weights`.
            own: Function that gives the engine's weights, if it has them as they were sent.
        """
        self.engine, self.route, self._takers, self._shard = engine, route, takers, shard
        self._may_restart, self._keep_cache, self._own = may_restart, keep_cache, own
        self._kept: dict[str, Tensor] = {}
        self._rows: dict[str, LocalWeight] = {}
        self._probe: Probe | None = None
        self._version = NO_VERSION

    @override
    @property
    def policy_version(self) -> int:
        return self._version

    def reroute(self, route: WeightRoute) -> None:
        """Get weights another way from now on, as the ranks that train are others."""
        self.route = route
        self._rows.clear()  # the first weights come whole

    def receive(self, process_group: ProcessGroup, held: HeldWeights | None, probe: Probe | None) -> None:
        """Take new weights. All ranks of the route call it, or `send_weights`, together.

        Args:
            process_group: All ranks of the route.
            held: Weights that this rank sends, if it trains the model, too.
            probe: A text with its log-probabilities, if the engine is asked for them.

        Raises:
            RuntimeError: They were damaged, or the engine does not use them.
        """
        self.engine.wake(self._reload)
        stream = receive_weights(self.route, process_group, self._takers, held, self._base())
        self._version = NO_VERSION  # what is kept is of two versions for a moment
        if self._may_restart:
            kept = WeightStream(self._keeping(stream), probe=probe)
            kept.drain(process_group.activity.beat)
            self._probe, self._version = probe, stream.policy_version
            self._reload()
        else:
            stream.probe = probe
            self.engine.load_weights(stream.each(self._keep_rows))
            stream.drain(process_group.activity.beat)
            self._version = stream.policy_version
        if process_group.payload_device.type == "cpu":
            trim_host_memory()  # buckets and replaced weights would lie next to all that follows

    def fetch(self, process_group: ProcessGroup, takers: ProcessGroup, probe: Probe | None) -> Callable[[], None]:
        """Receive new weights in any thread; the function that is returned gives them to the engine, in its own thread.

        Requests may be in progress then. See `receive` for what is raised.

        Args:
            process_group: All ranks of the route, for this thread.
            takers: Ranks that generate, for this thread.
            probe: A text with its log-probabilities, if the engine is asked for them.
        """
        stream = receive_weights(self.route, process_group, takers, base=self._base())
        device = self._takers.payload_device
        kept = dict(stream if device.type == "cpu" else collected(stream, self._sizes, device))
        version = stream.policy_version

        def load() -> None:
            self._kept, self._probe, self._version = kept, probe, version
            self.engine.wake(self._reload)  # an engine may start again once for each set of weights
            self._load()
            self._reload()
            for name, tensor in kept.items():
                self._keep_rows(name, tensor)
            if not self._may_restart:
                kept.clear()
            if process_group.payload_device.type == "cpu":
                trim_host_memory()

        return load

    @property
    def _sizes(self) -> list[int]:
        """Bytes of each weight."""
        return [math.prod(shape) * self.route.dtype.itemsize for shape in self.route.shapes.values()]

    def _base(self) -> HeldWeights | None:
        """The weights that came last, as they were sent; None if they are not there, or nothing is added to them."""
        if self.route.sent is None or self._version == NO_VERSION:
            return None
        if self._may_restart:
            whole: Mapping[str, Tensor] = self._kept
        elif self._own is None:
            return HeldWeights(self._rows, self._version) if self._rows else None
        else:
            whole = self._own() if self.engine.policy_version == self._version else {}
        route = self.route
        if any(name not in whole or whole[name].dtype != route.dtype for name in route.shapes):
            return None
        weights = (LocalWeight.of(name, whole[name].view(shape)) for name, shape in route.shapes.items())
        return HeldWeights.of(weights, self._version)

    def _keep_rows(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Keep the rows of a weight that come to this rank, if differences will be added to them; gives the weight."""
        if self.route.sent is not None and self._own is None and not self._may_restart:
            shape = self.route.shapes[name]
            block = self.route.receivers.block(name, shape, self.route.rank)
            rows = block.view(tensor.view(shape), whole_block(shape))
            if name not in self._rows:
                self._rows[name] = LocalWeight(name, shape, block, torch.empty_like(rows, device="cpu"))
            self._rows[name].local.copy_(rows)
        return [(name, tensor)]

    def _keeping(self, stream: WeightStream) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream:
            if name in self._kept:
                self._kept[name].copy_(tensor)
            else:
                self._kept[name] = tensor.to("cpu", copy=True)
            yield name, tensor

    def _reload(self) -> None:
        while self.engine.policy_version != self._version:
            self._load()

    def _load(self) -> None:
        weights = WeightStream(iter(self._kept.items()), self._version, self._probe)
        self.engine.load_weights(weights, keep_cache=self._keep_cache)

    @override
    def release(self, ranks: AbstractSet[int]) -> None:
        """Nothing to do: no trainer needs the memory of its ranks."""

    @override
    @contextmanager
    def phase(self) -> Iterator[RolloutEngine]:
        """Lend the engine, which stays awake, since nothing else needs its memory."""
        if self._version == NO_VERSION:
            raise RuntimeError(f"rank {self.route.rank}: {self.route.what} have not been sent yet")
        self.engine.wake(self._reload)
        with compared(self.engine, self._shard) as engine:
            yield engine

    @override
    def close(self) -> None:
        self.engine.close()


def probe_of(trainer: TrainEngine, tokens: Sequence[int]) -> Probe:
    """The probe with a trainer's log-probabilities. All ranks of the trainer call it together."""
    prompt, scored = (
        Jagged.from_lists([list(part)], torch.int64, axis)
        for part, axis in ((tokens[:1], "prompt_tokens"), (tokens[1:], "tokens"))
    )
    mask = Jagged(torch.ones(len(tokens) - 1, dtype=torch.bool), scored.lengths, "tokens")
    columns = {"prompt_tokens": prompt, "tokens": scored, "response_mask": mask}
    return Probe(tokens, trainer.log_probs(Batch(torch.zeros(1, dtype=torch.int64), columns)).values)


def shapes_of(model: CausalLM, *, is_merged: bool = False) -> dict[str, Shape]:
    """The shapes of a model's weights, by name, as they are sent; see `held_by`."""
    weights = model.model.named_parameters() if is_merged else model.trained_weights()
    return {name: tuple(weight.shape) or (1,) for name, weight in weights if not (is_merged and is_adapter(name))}


def held_by(trainer: Trainable, *, is_merged: bool = False) -> HeldWeights:
    """The weights of a trainer as this rank holds them now; training changes them.

    Of a model with adapters these are the adapters, or else whole weights with the adapters merged in: copies, which
    all ranks of the trainer make together.
    """
    weights = cast("AdaptedEngine", trainer).merged_weights() if is_merged else trainer.local_weights()
    return HeldWeights.of(weights, trainer.policy_version)


def weights_of(model: CausalLM) -> dict[str, Tensor]:
    """The weights with which an engine generates, by name, as they were loaded."""
    return {name: parameter.data for name, parameter in model.trained_weights()}
