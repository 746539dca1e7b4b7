"""Work of an engine on the experts of its model: it replays their choices, and balances their loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from leaderless.data.batch import Batch
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.routers import RoutedPass, Routers
from leaderless.models.uploads import placed
from leaderless.training.micro_batches import MicroBatch


@runtime_checkable
class RoutedEngine(Protocol):
    """An engine that knows the loads of experts. All of its ranks call every method together."""

    def expert_loads(self) -> Tensor | None:
        """[2, layers, experts]: how often each expert was chosen, and the sum of its probabilities.

        Of all passes whose gradient has been added up, where sampled tokens are predicted; None without known experts.
        """

    def balance_experts(self, batch: Batch, coefficient: float) -> None:
        """Until the optimizer step, add the gradient of the loss of unequal loads over a batch, times a coefficient.

        The loss is the Switch Transformer's (arXiv 2101.03961, eq. 4-6): E sum_i f_i P_i, with the share f_i of
        choices that fall on expert i of E, and the mean P_i of its probability; the mean over layers. Both are over all
        sampled tokens of the batch on all ranks, so it takes a pass over the batch to know f. With equal loads it is 1.

        Raises:
            RuntimeError: The model has no known experts.
        """


class RoutedPasses:
    """The experts of a model in the passes of its engine, if they are known; passes of others need nothing of this."""

    def __init__(self, routers: Routers, process_group: ProcessGroup, device: torch.device, num_alike: int) -> None:
        """Take the routers of a model; `num_alike` ranks have the same tokens in the same layers."""
        self._routers, self._process_group, self._device = routers, process_group, device
        self._num_alike = num_alike
        self._loads: Tensor | None = None
        self._pull: Tensor | None = None
        self._is_counting = False

    def begin(self, micro_batch: MicroBatch, part: Callable[[Tensor], Tensor]) -> None:
        """Begin a pass over the tokens of a micro-batch, or over a part of them."""
        replayed = None if micro_batch.experts is None else placed(part(micro_batch.experts), self._device)
        if not (torch.is_grad_enabled() or self._is_counting):
            self._routers.begin(replayed)
            return
        weights = torch.bincount(micro_batch.select, minlength=len(micro_batch.tokens)).float()
        self._routers.begin(replayed, placed(part(weights), self._device), self._pull)

    def end(self) -> None:
        """Count the choices of a pass whose gradient is to be added up."""
        if self._routers.now.weights is not None:
            loads = self._routers.now.loads(self._routers.num_layers, self._routers.num_experts)
            self._loads = loads if self._loads is None else self._loads + loads

    def leave(self, hidden: Tensor) -> Tensor:
        """Count a pass that leaves this stage of a pipeline with hidden states.

        Others begin before its backward pass, which may compute layers again: then it is the current pass again.
        """
        self.end()
        if hidden.requires_grad:
            hidden.register_hook(partial(_resume, self._routers, self._routers.now))  # type: ignore[no-untyped-call]
        return hidden

    def discard(self) -> None:
        """Forget what has been counted."""
        self._loads = None

    def stop_pulling(self) -> None:
        """Add no gradient of loads any longer."""
        self._pull = None

    def loads(self) -> Tensor:
        """Loads in the passes whose gradient has been added up, over all ranks."""
        nothing = torch.zeros(2, self._routers.num_layers, self._routers.num_experts, device=self._device)
        loads = self._process_group.sum(nothing if self._loads is None else self._loads, "the loads of experts")
        return loads / self._num_alike

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count choices in passes without a gradient, too; nothing has been counted before."""
        self.discard()
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False
            self.discard()

    def pull(self, loads: Tensor, coefficient: float) -> None:
        """Pull probabilities in all passes from now on; see `RoutedEngine.balance_experts`."""
        counts, sums = loads
        num_layers, num_experts = counts.shape
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
        # Probabilities of a token add up to 1, so their sum is the number of tokens.
        num_tokens = sums.sum(1, keepdim=True).round().clamp(min=1)
        self._pull = coefficient * num_experts * shares / num_tokens / num_layers


def _resume(routers: Routers, one: RoutedPass, gradient: Tensor) -> Tensor:
    """Let the pass whose hidden states get a gradient be the current one."""
    routers.now = one
    return gradient
