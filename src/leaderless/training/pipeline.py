"""The passes of one rank of a pipeline, in the order 1F1B: a forward pass for each backward pass, once all are busy.

Every stage goes through the same micro-batches with the same loop, which computes a loss and goes back, one after the
other. The last stage computes what the loss needs and sends it to all others. An earlier stage, when it is asked for
the results of a micro-batch, has by then begun with as many of the next ones as there are stages after it:

    stage 0   F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
    stage 1      F0 F1 B0 F2 B1 F3 B2 ...
    stage 2         F0 B0 F1 B1 F2 ...

So no more micro-batches are held than there are stages (Narayanan et al., arXiv 2006.09503). `torch.distributed.
pipelining` has the same order, but wants micro-batches of one shape and a loop of its own, with the loss on the last
stage alone; here samples are packed, passes have as many tokens as they like, and every rank knows how many from the
samples, which all stages have.

An accelerator sends and receives the messages of a process group one after the other, in the order in which its rank
asks for them, and each waits for its other end. No rank waits for ever, because all ranks ask in one order. It is, for
micro-batch k of stages 0 to p-1,

    forth   hidden states of k from 0 to 1, from 1 to 2, ..., from p-2 to p-1, then of k + 1
    back    results of k from p-1 to 0, to 1, ..., to p-2, gradients of k from p-1 to p-2, ..., from 1 to 0, then k + 1

so that among the messages that are not there, the first one of a process group is the next one on both of its ranks, as
soon as they get to it. What a rank does before that depends on earlier messages alone: a forward pass on hidden states
that are already there, and a backward pass of k on its results and gradients, for which the last stage needs no later
hidden states. In one process group for both directions, hidden states of k + 1 would be ahead of results of k on one
stage, and behind them on another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from leaderless.distributed.in_flight import PendingMessage
from leaderless.models.parallel.pipeline import PipelineParallel
from leaderless.models.parallel.reductions import mapped
from leaderless.training.micro_batches import MicroBatch

HIDDEN = "hidden states of another stage"
GRADIENTS = "gradients of hidden states of another stage"
RESULTS = "what the last stage has computed"
WORDS = "embeddings that both the first and the last stage have"


class _Begun(NamedTuple):
    """A micro-batch that has left this stage."""

    micro_batch: MicroBatch
    hidden: Tensor
    sending: PendingMessage


class StageQueue:
    """This rank's place in the line of stages, and the micro-batches that are in it."""

    def __init__(self, stages: PipelineParallel, device: torch.device, dtype: torch.dtype) -> None:
        """Send hidden states of the type `dtype` from and to the device."""
        self.stages, self._device, self._dtype = stages, device, dtype
        self._coming: deque[MicroBatch] = deque()
        self._begun: deque[_Begun] = deque()
        self._gradients: deque[PendingMessage] = deque()
        self._results: deque[PendingMessage] = deque()

    def expect(self, micro_batches: Sequence[MicroBatch]) -> None:
        """The micro-batches that pass next, in their order."""
        self._coming = deque(micro_batches)
        self._begun.clear()

    def enter(self, num_tokens: int) -> Tensor:
        """[tokens, hidden_size] the hidden states of the stage before; their gradient goes back to it."""
        hidden = self.stages.forth.receive(self._room(num_tokens), self.stages.neighbor(-1), HIDDEN)

        def send_back(gradient: Tensor) -> None:
            # The stage before receives one before it needs another one, so that few are on their way.
            self._gradients.append(self.stages.back.send(gradient.contiguous(), self.stages.neighbor(-1), GRADIENTS))
            _wait_for_all_but(self._gradients, 2)

        if torch.is_grad_enabled():
            hidden.requires_grad_().register_hook(send_back)  # type: ignore[no-untyped-call]
        return hidden

    def publish(self, results: Sequence[Tensor]) -> None:
        """Send what the last stage has computed, [R] each, to all others."""
        if (values := torch.stack([one.detach() for one in results])).numel():
            # The first stage needs them only as many micro-batches later as there are stages: a stage that waited for
            # that after each would stop the others.
            for rank in self.stages.back.ranks[:-1]:
                self._results.append(self.stages.back.send(values, rank, RESULTS))
            _wait_for_all_but(self._results, self.stages.size**2)

    def finish(self) -> None:
        """Wait until all has arrived that was sent, and that was to come: whoever is missing is named here."""
        _wait_for_all_but(self._gradients, 0)
        _wait_for_all_but(self._results, 0)
        self.stages.back.backlog.wait()

    def exchange(self, values: Tensor) -> Tensor:
        """On the first and the last stage, what the other one has in place of these values."""
        stages, is_first = self.stages, self.stages.is_first
        there, here = (stages.forth, stages.back) if is_first else (stages.back, stages.forth)
        other = stages.forth.ranks[-1 if is_first else 0]
        sending = there.send(values.contiguous(), other, WORDS)
        found = here.receive(torch.empty_like(values, memory_format=torch.contiguous_format), other, WORDS)
        sending.wait()
        return found

    def results(self, micro_batch: MicroBatch, compute: Callable[[MicroBatch], Tensor], count: int) -> Sequence[Tensor]:
        """On an earlier stage, `count` results [R] float32 of the last stage for a micro-batch.

        Their backward pass is this stage's, with the gradient that comes from the next one.

        Args:
            micro_batch: The next of those that are expected.
            compute: Function that passes a micro-batch through this stage.
            count: Number of results.
        """
        if not self._begun and not (self._coming and self._coming[0] is micro_batch):
            self._coming = deque([micro_batch])
        while self._coming and len(self._begun) < self.stages.size - self.stages.place:
            one = self._coming.popleft()
            hidden = compute(one)
            sending = self.stages.forth.send(hidden.detach(), self.stages.neighbor(1), HIDDEN)
            self._begun.append(_Begun(one, hidden, sending))
        begun = self._begun.popleft()
        if begun.micro_batch is not micro_batch:
            raise RuntimeError("a pipeline gives results in the order in which micro-batches were cut: keep to it")
        stages = self.stages

        def receive(_: Tensor) -> Tensor:
            values = torch.empty(count, len(micro_batch.targets), device=self._device)
            found = stages.back.receive(values, stages.back.ranks[-1], RESULTS) if values.numel() else values
            begun.sending.wait()
            return found

        # In the place of the hidden states that have been sent; their gradient comes from the next stage.
        room = partial(self._room, len(begun.hidden))
        return mapped(
            begun.hidden, receive, lambda _: stages.back.receive(room(), stages.neighbor(1), GRADIENTS)
        ).unbind()

    def _room(self, num_tokens: int) -> Tensor:
        return torch.empty(num_tokens, self.stages.hidden_size, dtype=self._dtype, device=self._device)


def _wait_for_all_but(sent: deque[PendingMessage], count: int) -> None:
    """Keep the newest of what is being sent, and wait for what is older, which has arrived by now.

    Where an accelerator sends, it is the one that waits, before it goes on.
    """
    while len(sent) > count:
        sent.popleft().wait()
