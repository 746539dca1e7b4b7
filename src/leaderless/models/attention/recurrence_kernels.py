"""Kernels of packages for recurrences and their convolutions: used where they run, if they are right there.

Wherever flash-linear-attention, causal-conv1d or mamba-ssm is installed, `transformers` takes its functions instead of
those in torch. On the CPU these kernels fail, and numbers in float32 may be multiplied with fewer bits. So kernels
compute half precision on accelerators, and torch computes all else.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations import hub_kernels

from leaderless.models.attention.recurrence import LayerStates, RecurrentLayer

_WITHOUT_KERNELS = frozenset({"cpu"})
"""Devices on which no kernel runs."""
_HALVES = frozenset({torch.bfloat16, torch.float16})
_TRIED_TOKENS = 67
"""Tokens of the text with which kernels are tried: more than a block of theirs."""
_TOLERANCE = 0.05
"""Largest distance from the results of torch, as a share of their norm; rounding to bfloat16 moves them by 0.01."""


class FunctionByDevice:
    """A function of a layer that a kernel computes where it runs, and torch elsewhere.

    Attributes:
        reference: The function in torch.
        is_trusted: Whether the kernel may be called.
    """

    def __init__(self, function: FunctionType) -> None:
        """Wrap a function of `transformers` that calls the kernel, if there is one, and knows its reference."""
        self.reference: Callable[..., object] = function.__wrapped__  # type: ignore[attr-defined]
        self.is_trusted = True
        self._function = function
        self._names = {*inspect.signature(self.reference).parameters}
        functools.update_wrapper(self, self.reference)

    def __call__(self, *given: object, **named: object) -> object:
        """Compute the function."""
        if self.is_trusted and _run_kernels(one for one in (*given, *named.values()) if isinstance(one, Tensor)):
            return self._function(*given, **named)
        return self.reference(*given, **{name: value for name, value in named.items() if name in self._names})


def _run_kernels(tensors: Iterable[Tensor]) -> bool:
    """Whether kernels take these tensors; states of a recurrence may be in float32."""
    return any(one.device.type not in _WITHOUT_KERNELS and one.dtype in _HALVES for one in tensors)


def choose_by_device(model: nn.Module) -> None:
    """Have torch compute the recurrences of a model wherever kernels do not run, from now on."""
    for file in _files(model):
        for name, function in [*vars(file).items()]:
            if isinstance(function, FunctionType) and _has_kernel(function):
                setattr(file, name, FunctionByDevice(function))


def _files(model: nn.Module) -> Iterator[ModuleType]:
    """The files of `transformers` with the layers of a model that read by recurrence."""
    names = dict.fromkeys(type(module).__module__ for module in _mixers(model))
    return (sys.modules[name] for name in names)


def _has_kernel(function: FunctionType) -> bool:
    """Whether this is what `transformers` makes of a function for which there are kernels."""
    return function.__globals__ is vars(hub_kernels) and hasattr(function, "__wrapped__")


def _mixers(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module.forward, RecurrentLayer))


def try_kernels(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Compare kernels with torch, in one layer of each class with random weights; warn, and use torch, if they differ.

    Args:
        model: Model whose weights may have no values yet.
        device: Device that is to compute it.
        dtype: Type of its numbers there.
    """
    if device.type in _WITHOUT_KERNELS or dtype not in _HALVES:
        return
    hidden_size = model.config.get_text_config().hidden_size
    for module in {type(one): one for one in _mixers(model)}.values():
        file = sys.modules[type(module).__module__]
        functions = [one for one in vars(file).values() if isinstance(one, FunctionByDevice) and one.is_trusted]
        if functions and (problem := _problem(module, hidden_size, device, dtype, functions)):
            _trust(functions, is_trusted=False)
            warnings.warn(
                f"layers of class {type(module).__name__} are slower, since torch computes them: a trial of the "
                f"kernels that are installed for them fails: {problem}",
                RuntimeWarning,
                stacklevel=2,
            )


def _trust(functions: Iterable[FunctionByDevice], *, is_trusted: bool) -> None:
    for one in functions:
        one.is_trusted = is_trusted


def _problem(
    module: nn.Module,
    hidden_size: int,
    device: torch.device,
    dtype: torch.dtype,
    functions: Sequence[FunctionByDevice],
) -> str:
    """What kernels do wrong in a layer, with states and gradients; empty if nothing, or if there are none."""
    generator = torch.Generator().manual_seed(0)
    tried = _with_values(module, generator).to(device, dtype)
    rows = torch.randn(2, _TRIED_TOKENS, hidden_size, generator=generator).to(device, dtype)
    _trust(functions, is_trusted=False)
    try:
        expected = _results(tried, rows)
    finally:
        _trust(functions, is_trusted=True)
    try:
        found = _results(tried, rows)
    except Exception as error:  # noqa: BLE001  # packages raise errors of every kind
        return f"{type(error).__name__}: {error}"
    for name, one in expected.items():
        distance = float((found[name].float() - one.float()).norm() / one.float().norm().clamp(min=1e-12))
        if not distance < _TOLERANCE:
            return f"{name} differ by {distance:.2g} of their norm"
    return ""


def _with_values(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy of a layer on the host, with random weights."""
    made = copy.deepcopy(module).to_empty(device="cpu").requires_grad_()
    for weight in made.parameters():
        if weight.ndim == 1:  # biases, scales, and decays by their logarithm
            values = 0.25 + 0.5 * torch.rand(weight.shape, generator=generator)
        else:
            values = torch.randn(weight.shape, generator=generator) / weight[0].numel() ** 0.5
        weight.data = values
    return made


def _results(module: nn.Module, rows: Tensor) -> dict[str, Tensor]:
    """What a layer gives: for a text at once, for the same text in three parts, and gradients of the former."""
    mixer = cast("RecurrentLayer", module.forward).mixer
    rows = rows.detach().requires_grad_()
    whole, states, end = mixer(rows), LayerStates(), _TRIED_TOKENS - 4
    with torch.no_grad():
        parts = [mixer(part, states) for part in torch.split(rows, [end, 3, 1], dim=1)]
    inputs = {"rows": rows, **dict(module.named_parameters())}
    loss = (whole.float() * whole.detach().float().cos()).sum()
    slopes = zip(inputs, torch.autograd.grad(loss, [*inputs.values()], allow_unused=True), strict=True)
    gradients = {f"gradients of {name}": slope for name, slope in slopes if slope is not None}
    return {"results": whole.detach(), "results after states": torch.cat(parts[1:], dim=1), **gradients}
