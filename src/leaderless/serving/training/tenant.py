"""Adapters that a client trains, with their gradient and optimizer."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless.config.models import OptimizerConfig
from leaderless.serving.training.adapters import (
    AdaptedModel,
    AdapterShape,
    Weights,
    cut,
    local_state,
    packed,
    set_weights,
    snapshot,
)
from leaderless.serving.training.losses import loss_of, total
from leaderless.serving.training.wire import Datum, PassRequest, PassResult

TARGETS = "target_tokens"
OPTIMIZER = "optimizer."
"""Start of the names of what the optimizer keeps in the state of an engine."""


@dataclass(frozen=True)
class AdamSettings:
    """Settings of one step of AdamW.

    Attributes:
        learning_rate: Learning rate, at least 0.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Constant next to the root of the second moment.
        weight_decay: Decoupled weight decay.
        grad_clip_norm: Largest norm of the gradient; 0 for any.
    """

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


class Tenant:
    """Adapters on the shared model that are trained, one request after the other."""

    def __init__(self, model: AdaptedModel, shape: AdapterShape, seed: int | None) -> None:
        """Begin with adapters that add nothing.

        Raises:
            ValueError: There can be no such adapters.
        """
        self.shape = shape
        self._model, self._engine = model, model.trainer(shape, seed)

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps so far."""
        return self._engine.policy_version

    def passes(self, request: PassRequest) -> Generator[None, None, PassResult]:
        """Pass sequences through the model, and back unless it is a forward pass only; a pass for each `next`.

        Gradients add up until the next step. If a pass fails, the gradient is as it was before the request.

        Raises:
            ValueError: The request cannot be carried out.
        """
        if request.problem:
            raise ValueError(request.problem)
        loss = loss_of(request.loss)
        settings = loss.settings(request.settings)
        self._check(request.data, loss.inputs)
        engine, found, sum_ = self._engine, list[Tensor](), 0.0
        with self._gradient_kept():
            parts = [*cut([len(one.tokens) for one in request.data], self._model.pass_tokens)]
            for number, part in enumerate(parts, 1):
                data = [request.data[place] for place in part]
                batch = packed([one.tokens for one in data], [one.inputs[TARGETS] for one in data])
                inputs = {
                    name: torch.cat([one.inputs[name] for one in data]).float().to(engine.device)
                    for name in loss.inputs
                }
                engine.begin_pass(is_last=number == len(parts))
                with torch.set_grad_enabled(not request.is_forward_only):
                    log_probs = engine.forward(batch, "none").log_probs
                    losses = loss.compute(log_probs, inputs, settings)
                    if not request.is_forward_only:
                        losses.sum().backward()  # type: ignore[no-untyped-call]
                found += torch.split(log_probs.detach().cpu(), [len(one.tokens) for one in data])
                sum_ += total(losses)
                yield
        engine.end_passes(is_done=True)
        return PassResult(found, {"loss:sum": sum_})

    @contextmanager
    def _gradient_kept(self) -> Iterator[None]:
        """Bring the gradient back to what it was if what is done fails, or is stopped."""
        before = {one: None if one.grad is None else one.grad.clone() for one in self._parameters()}
        try:
            yield
        except BaseException:
            self._engine.end_passes(is_done=False)
            for parameter, gradient in before.items():
                parameter.grad = gradient
            raise

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [one for _, one in self._engine.named_weights()]

    def _check(self, data: Sequence[Datum], names: Sequence[str]) -> None:
        """Refuse sequences that do not fit the model, or the loss with inputs of some names."""
        if not data:
            raise ValueError("data is empty: send at least one sequence")
        for place, one in enumerate(data):
            key, count = f"data[{place}]", len(one.tokens)
            if not 0 < count <= self._model.max_context:
                raise ValueError(
                    f"{key}.model_input has {count} tokens: send between 1 and {self._model.max_context}, the context "
                    "of this server"
                )
            self.check_tokens(f"{key}.model_input", one.tokens)
            for name in (TARGETS, *names):
                if name not in one.inputs:
                    raise ValueError(f"{key}.loss_fn_inputs lacks '{name}': send {', '.join((TARGETS, *names))}")
                if len(one.inputs[name]) != count:
                    own = len(one.inputs[name])
                    raise ValueError(f"{key}.loss_fn_inputs['{name}'] has {own} values for {count} tokens")
            if unknown := sorted(one.inputs.keys() - {TARGETS, *names}):
                raise ValueError(f"{key}.loss_fn_inputs has '{unknown[0]}', which this loss does not use: leave it out")
            self.check_tokens(f"{key}.loss_fn_inputs['{TARGETS}']", one.inputs[TARGETS])
            for name in names:
                if not bool(torch.isfinite(one.inputs[name]).all()):
                    raise ValueError(f"{key}.loss_fn_inputs['{name}'] has a value that is not finite")

    def check_tokens(self, key: str, tokens: Tensor) -> None:
        """Refuse tokens that the model does not know."""
        lowest, highest = int(tokens.min()), int(tokens.max())
        if tokens.is_floating_point() or lowest < 0 or highest >= self._model.vocabulary:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"{key} has token {wrong}, but the model knows 0 to {self._model.vocabulary - 1}")

    def step(self, settings: AdamSettings) -> Mapping[str, float]:
        """Change the adapters by the gradient, and clear it; returns metrics.

        Raises:
            ValueError: There is no gradient, or it is not finite, and is cleared.
        """
        if all(parameter.grad is None for parameter in self._parameters()):
            raise ValueError("there is no gradient: call forward_backward before optim_step")
        self._engine.change_optimizer(
            OptimizerConfig().model_copy(
                update={
                    "learning_rate": settings.learning_rate,
                    "beta1": settings.beta1,
                    "beta2": settings.beta2,
                    "epsilon": settings.eps,
                    "weight_decay": settings.weight_decay,
                    "max_grad_norm": settings.grad_clip_norm or math.inf,
                }
            )
        )
        info = self._engine.optimizer_step(math.isfinite)
        if not info.is_made:
            raise ValueError(
                f"the norm of the gradient is {info.grad_norm}: it was cleared, and the adapters have not changed"
            )
        return {"grad_norm": info.grad_norm, "learning_rate": info.learning_rate}

    def weights(self) -> Weights:
        """Copies of the adapters."""
        return snapshot(self._engine)

    def optimizer(self) -> dict[str, Tensor]:
        """Copies of what the optimizer keeps, by name."""
        state = local_state(self._engine).items()
        return {name: value.clone() for name, value in state if name.startswith(OPTIMIZER)}

    def load(self, weights: Weights, optimizer: Mapping[str, Tensor] | None, num_steps: int) -> None:
        """Take over adapters and optimizer, or begin with a new optimizer; the gradient is cleared.

        Raises:
            ValueError: They are of other adapters.
        """
        self._check_fit(weights)
        self._engine.discard_gradient()
        set_weights(self._engine, weights)
        with torch.no_grad():
            for name, value in local_state(self._engine).items():
                if name.startswith(OPTIMIZER):
                    value.copy_(torch.zeros(()) if optimizer is None else optimizer[name])
        self._engine.state_loaded(0 if optimizer is None else num_steps)

    def _check_fit(self, weights: Weights) -> None:
        own = dict(self._engine.weight_shapes())
        given = {name: one.shape for name, one in weights.items()}
        for name in sorted(own.keys() | given.keys()):
            if own.get(name) != given.get(name):
                has, gets = (tuple(one[name]) if name in one else "nothing" for one in (own, given))
                raise ValueError(f"the saved adapters have {gets} for {name}, but these have {has}: their rank differs")
