"""The passes of a batch through a model, as many as memory asks for, for any back end."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from leaderless.base.devices import indexed, release_memory
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.errors import MemoryExhausted, is_out_of_memory
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.uploads import one_copy, placed
from leaderless.planner.memory.limits import CPU_PASS_TOKENS
from leaderless.training.micro_batches import MicroBatch, longest_sample, make_micro_batches, response_lengths


class Passes:
    """The micro-batches of a batch, one after the other; where memory runs out, all of them again, and smaller.

        passes = engine.passes(batch)
        for micro_batch in passes:
            with passes.memory():
                ...

    Attributes:
        number: Number of the micro-batch, from 1; it is 1 again where passes begin again.
    """

    def __init__(self, engine: BoundedPasses, batch: Batch) -> None:
        """Cut the batch only when the first micro-batch is asked for."""
        self._engine, self._batch = engine, batch
        self.number = 0
        self._is_again = False

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield micro-batches, for one pass each; all ranks of the engine go through them together."""
        is_done = False
        while not is_done:
            micro_batches = self._engine.micro_batches(self._batch)
            for self.number, self._micro_batch in enumerate(micro_batches, 1):
                self._engine.process_group.activity.part = f", pass {self.number}/{len(micro_batches)}"
                self._engine.begin_pass(is_last=self.number == len(micro_batches))
                yield self._micro_batch
                if self._is_again:
                    break
            is_done, self._is_again = not self._is_again, False
            if not is_done:
                # Only here is the error gone, which kept the tensors of the failed pass alive.
                gc.collect()
                release_memory(self._engine.device)
        self._engine.end_passes(is_done=True)

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Watch a pass: if memory runs out in it, the next micro-batch is the first of smaller ones.

        Only a module that one rank has for itself can start again. Of several ranks, one that fails within a pass would
        leave the others in a collective, and a sharded module is left half gathered: there the lower bound has to wait
        for the next start of the run.

        Raises:
            MemoryExhausted: Memory has run out, and smaller micro-batches are not allowed, not possible, or have to
                wait for the next start.
        """
        is_over = True
        try:
            yield
            is_over = False
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._engine.lower_bound(self._batch, self._micro_batch, error)
            self._is_again, is_over = True, False
        finally:
            if is_over:
                self._engine.end_passes(is_done=False)


class BoundedPasses:
    """The part of `Trainable` that cuts batches, smaller ones where memory runs out, and asks the guard of an update.

    Attributes:
        device: Device that computes.
        micro_batch_tokens: Most tokens of one pass on this rank.
        num_parts: Ranks that divide the tokens of each pass.
        is_plain: Whether a pass goes through a plain module, which gathers and converts no weights.
        can_start_again: Whether passes that ran out of memory begin again with smaller ones.
    """

    def __init__(self, process_group: ProcessGroup, device: torch.device, micro_batch_tokens: int) -> None:
        """Begin with a bound that does not change before `adapt_to_memory`."""
        self._process_group, self.device = process_group, indexed(device)
        self.micro_batch_tokens = micro_batch_tokens
        self.num_parts = 1
        self.is_plain = True
        self.can_start_again = process_group.size == 1
        self._on_lowered: Callable[[int], None] | None = None

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that hold this instance."""
        return self._process_group

    def adapt_to_memory(self, on_lowered: Callable[[int], None]) -> None:
        """From now on lower the bound of a pass where memory runs out, and call a function with each new bound."""
        self._on_lowered = on_lowered

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Cut a batch for the memory bound; a plain module on a CPU gets passes of a limited size."""
        enough_tokens = CPU_PASS_TOKENS if self.device.type == "cpu" and self.is_plain else None
        bound = self.micro_batch_tokens * self.num_parts
        has_copies = self.device.type != "cpu"
        return make_micro_batches(batch, bound, self._process_group, enough_tokens, has_copies=has_copies)

    @torch.no_grad()
    def scores(self, batch: Batch, score: Callable[[MicroBatch], Tensor], shape: Sequence[int] = ()) -> Jagged:
        """A number for each sampled token of a batch, from a function that computes them for a micro-batch.

        With a shape, there are numbers of this shape for each token.
        """
        lengths = response_lengths(batch.jagged("response_mask"))
        values = torch.empty(int(lengths.sum()), *shape, device=self.device)
        passes = self.passes(batch)
        for micro_batch in passes:
            with passes.memory():
                found = score(micro_batch)
                with one_copy(self.device):
                    places = placed(micro_batch.response_index, self.device)
                values[places] = found
        if self.device.type != "cpu":
            self._process_group.backlog.wait()  # an accelerator that waits for ranks could not name them
        return Jagged(values.cpu(), lengths, "response_tokens")

    def passes(self, batch: Batch) -> Passes:
        """The micro-batches of a batch, which begin again with smaller ones where memory runs out."""
        return Passes(self, batch)

    def begin_pass(self, *, is_last: bool) -> None:
        """Prepare for a micro-batch, which may be the last one of its batch; nothing to do for most back ends."""

    def end_passes(self, *, is_done: bool) -> None:
        """Clean up after the passes of a batch, or after one that failed; nothing to do for most back ends."""

    def is_allowed(self, grad_norm: float, update: int, allow: Callable[[float], bool] | None) -> bool:
        """Whether an update is made with a gradient of a norm, which a guard may refuse.

        Raises:
            RuntimeError: The norm is not finite, and no guard refuses it.
        """
        # The guard is asked first, as it may skip an update whose norm is not finite.
        if allow is not None and not allow(grad_norm):
            return False
        if not math.isfinite(grad_norm):
            raise RuntimeError(
                f"rank {self._process_group.rank}: the gradient norm of update {update} is {grad_norm}: lower the "
                "learning rate, or look at the rewards and advantages of this step"
            )
        return True

    def lower_bound(self, batch: Batch, micro_batch: MicroBatch, error: Exception) -> None:
        """Halve what was too much, but not below the longest sample; raise where the passes cannot start again."""
        num_tokens, longest = (-(-n // self.num_parts) for n in (len(micro_batch.tokens), longest_sample(batch)))
        before = min(self.micro_batch_tokens, num_tokens)
        after = max(before // 2, longest)
        if after >= before:
            remedy = (
                "a pass cannot take less than one sample; lower rollout.max_response_tokens or data.max_prompt_tokens, "
                "set models.<role>.gradient_checkpointing or training.keep_whole=nothing, or use more ranks"
            )
        elif self._on_lowered is None:
            remedy = (
                f"lower batch.micro_batch_tokens={self.micro_batch_tokens} (the longest sample has {longest}), or set "
                "it to auto"
            )
        else:
            self.micro_batch_tokens = after
            self._on_lowered(after)
            if self.can_start_again:
                return
            remedy = (
                f"batch.micro_batch_tokens=auto is lowered to {after} for the next start; the same command continues "
                "with it"
            )
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MemoryExhausted(
            f"rank {self._process_group.rank}: a micro-batch of {num_tokens:,} tokens in "
            f"{len(micro_batch.response_lengths):,} samples, the longest of "
            f"{max(family.longest for family in micro_batch.families):,}, does not fit into the memory of "
            f"{self.device} ({reason}): {remedy}"
        ) from error
