"""Weights in half precision that compute in the place of a rank's float32 weights, converted once for many passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn


class _Slot(NamedTuple):
    """The place of a weight in a module, and what computes there."""

    parameters: dict[str, nn.Parameter | None]
    name: str
    weight: nn.Parameter
    copy: nn.Parameter


class ConvertedWeights:
    """Copies that a module on one rank computes with; the weights themselves are those that training changes.

    The first pass makes them, in a few kernels, and they stay until `release`. The module has them only while a pass
    goes through it, forward or backward. The gradient of a copy is added to its weight's, in float32, as soon as it is
    there.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, exact: Iterable[nn.Module], kept: set[nn.Parameter]
    ) -> None:
        """Prepare a module, whose weights need no values yet.

        Args:
            module: The module.
            dtype: Type in which it computes.
            exact: Modules within it that compute in float32.
            kept: Weights that stay as they are.
        """
        self._module, self._dtype, self._exact, self._kept = module, dtype, [*exact], kept
        self._slots: list[_Slot] = []
        self._are_in_place = False
        module.register_forward_pre_hook(lambda *_: self._place())
        module.register_forward_hook(lambda _module, _inputs, output: self._end_forward(output))
        for one in self._exact:
            convert_inputs(one, torch.float32)

    @property
    def are_there(self) -> bool:
        """Whether there are copies."""
        return bool(self._slots)

    def release(self) -> None:
        """Release the copies: the weights may change, or a pass has failed."""
        self._remove()
        self._slots.clear()

    def _place(self) -> None:
        if not self._slots:
            self._slots = [*self._make()]
        self._are_in_place = True
        for slot in self._slots:
            slot.parameters[slot.name] = slot.copy

    def _remove(self) -> None:
        self._are_in_place = False
        for slot in self._slots:
            slot.parameters[slot.name] = slot.weight

    def _make(self) -> Iterator[_Slot]:
        """Convert all weights at once; those that modules share stay shared."""
        exact = self._kept.union(*(one.parameters() for one in self._exact))
        weights = [one for one in self._module.parameters() if one.is_floating_point() and one not in exact]
        values = [torch.empty_like(one, dtype=self._dtype, requires_grad=False) for one in weights]
        torch._foreach_copy_(values, [one.detach() for one in weights])
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for one, value in zip(weights, values, strict=True):
            copies[one] = nn.Parameter(value, requires_grad=one.requires_grad)
            if one.requires_grad:
                copies[one].register_post_accumulate_grad_hook(_adder(one))  # type: ignore[no-untyped-call]
        for module in self._module.modules():
            parameters = module._parameters  # noqa: SLF001 - an attribute would be looked for in many places
            for name, weight in parameters.items():
                if weight is not None and weight in copies:
                    yield _Slot(parameters, name, weight, copies[weight])

    def _end_forward(self, output: Tensor | tuple[Tensor, ...]) -> None:
        def begin_backward(_: Tensor) -> None:
            """Let layers that keep no activations compute them again with the copies."""
            if not self._are_in_place:
                self._place()
                torch.autograd.Variable._execution_engine.queue_callback(self._remove)  # noqa: SLF001

        self._remove()
        for one in (output,) if isinstance(output, Tensor) else output:
            if one.requires_grad:
                one.register_hook(begin_backward)  # type: ignore[no-untyped-call]


def convert_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Have what enters a module converted to a type, if it is of another one with fractions."""

    def converted(value: object) -> object:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        return tuple(map(converted, value)) if type(value) is tuple else value

    def convert(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[object, dict[str, object]]:
        return converted(args), {name: converted(value) for name, value in kwargs.items()}

    module.register_forward_pre_hook(convert, with_kwargs=True)


def _adder(weight: nn.Parameter) -> Callable[[Tensor], None]:
    """A function that adds the gradient of a copy to the gradient of its weight."""

    def add(copy: Tensor) -> None:
        gradient, copy.grad = copy.grad, None
        assert gradient is not None
        if weight.grad is None:
            weight.grad = gradient.to(weight.dtype, memory_format=torch.contiguous_format)
        else:
            weight.grad += gradient

    return add
