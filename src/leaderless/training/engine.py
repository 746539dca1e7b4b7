"""What trains and scores a model, however it is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from leaderless.data.batch import Batch, Jagged
from leaderless.data.transport import ProcessGroup
from leaderless.models.causal_lm import CausalLM, TokenOutputs
from leaderless.training.micro_batches import MicroBatch

Outputs = TypeVar("Outputs")

LossOf = Callable[[Outputs, MicroBatch], Tensor]
"""The loss of a micro-batch, given what the model says of it; already weighted, so that the sum over all micro-batches
of all ranks is the loss. The global denominators are inside the weights, so that no engine divides by anything."""
TokenLoss = LossOf[TokenOutputs]
"""Of a language model."""
ValueLoss = LossOf[Tensor]
"""Of a value model, which gives [R] float32."""


@dataclass(frozen=True)
class UpdateInfo:
    """What came of an optimizer step.

    Attributes:
        grad_norm: Global L2 norm of the gradient before clipping.
        learning_rate: Learning rate that was used, or would have been.
        is_made: Whether the weights have changed.
    """

    grad_norm: float
    learning_rate: float
    is_made: bool = True


class Trainable(Protocol):
    """One instance of a role's model on the ranks of a layout. All of them call every method together."""

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that hold this instance."""

    @property
    def policy_version(self) -> int:
        """Optimizer steps behind the weights."""

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Cut a batch for this engine's memory bound; the same number of micro-batches on every rank.

        Args:
            batch: Samples with `prompt_tokens`, `tokens` and `response_mask`.
        """

    def run_passes(
        self, batch: Batch, passes: Callable[[Sequence[MicroBatch]], None], undo: Callable[[], None] = lambda: None
    ) -> None:
        """Do something with each micro-batch of a batch; where memory runs out, perhaps once more with smaller ones.

        Args:
            batch: Samples with `prompt_tokens`, `tokens` and `response_mask`.
            passes: Function that goes through the micro-batches.
            undo: Function that removes what passes have left behind before they ran out of memory.

        Raises:
            MemoryExhausted: Memory has run out, and smaller micro-batches are not allowed, not possible, or have to
                wait for the next start.
        """

    def optimizer_step(self, allow: Callable[[float], bool] | None = None) -> UpdateInfo:
        """Clip the gradient, change the weights and clear the gradient.

        Args:
            allow: Function of the norm of the gradient that decides, the same on every rank, whether the weights
                change; without it they do.

        Raises:
            RuntimeError: The gradient is not finite and nobody was asked; weights are unchanged.
        """

    def discard_gradient(self) -> None:
        """Forget the gradient that has been added up."""

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its name in `transformers`, whole, on every rank, one at a time."""

    def state(self) -> dict[str, Tensor]:
        """Weights and optimizer as named tensors, sharded as they are; written to in place when loaded."""

    def state_loaded(self, policy_version: int) -> None:
        """Take note that the tensors of `state` have been written to.

        Args:
            policy_version: Version of what was loaded.
        """


class TrainEngine(Trainable, Protocol):
    """A language model: it scores tokens, is trained, and makes its weights available for generation."""

    def log_probs(self, batch: Batch, temperature: float) -> Jagged:
        """Log-probabilities of the sampled tokens, float32, without gradient.

        Args:
            batch: Samples with `prompt_tokens`, `tokens` and `response_mask`.
            temperature: Divisor of the logits.
        """

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        token_loss: TokenLoss,
        temperature: float,
        *,
        entropy_gradient: bool = False,
    ) -> None:
        """Add the gradient of the loss, summed over micro-batches and ranks, to what is there.

        Args:
            micro_batches: Micro-batches, the same number on every rank.
            token_loss: Loss of a micro-batch; see `LossOf`.
            temperature: Divisor of the logits.
            entropy_gradient: Whether the loss depends on the entropies.
        """

    def unsharded(self) -> AbstractContextManager[CausalLM]:
        """The module with whole weights on every rank, for generation."""


class ValueEngine(Trainable, Protocol):
    """A value model: it predicts the reward to come, and is trained."""

    def values(self, batch: Batch) -> Jagged:
        """What is expected before each sampled token, float32, without gradient.

        Args:
            batch: Samples with `prompt_tokens`, `tokens` and `response_mask`.
        """

    def forward_backward(self, micro_batches: Sequence[MicroBatch], value_loss: ValueLoss) -> None:
        """Add the gradient of the loss, summed over micro-batches and ranks, to what is there.

        Args:
            micro_batches: Micro-batches, the same number on every rank.
            value_loss: Loss of a micro-batch; see `LossOf`.
        """
