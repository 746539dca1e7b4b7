"""Kernels for recurrences: where they are called, and what a run does if they are wrong.

They cannot run here. Loops in their place have their names, arguments and packages, so that it is `transformers` that
finds them.
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.tiny_families import judge, tiny_config
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from leaderless.models.attention import recurrence_kernels
from leaderless.models.attention.in_passes import compute_in_passes
from leaderless.models.attention.recurrence_kernels import FunctionByDevice, try_kernels

CPU, CHUNKS = torch.device("cpu"), "torch_chunk_gated_delta_rule"
Kernel = Callable[..., tuple[Tensor, Tensor | None]]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule (arXiv 2412.06464, equation 10), token by token, in float64.

    Args:
        q: [n, tokens, heads, keys] queries.
        k: [n, tokens, heads, keys] keys.
        v: [n, tokens, value_heads, values] values; several heads of values may share one of keys.
        g: [n, tokens, value_heads] logarithms of decays.
        beta: [n, tokens, value_heads] shares of a value that are written.
        initial_state: [n, value_heads, keys, values] state before the first token.
        output_final_state: Whether the state after the last token is asked for.
        use_qk_l2norm_in_kernel: Whether queries and keys are to have length 1.
    """
    shared = v.shape[2] // q.shape[2]
    query, key = (one.double().repeat_interleave(shared, 2) for one in (q, k))
    if use_qk_l2norm_in_kernel:
        query, key = normalize(query, dim=-1), normalize(key, dim=-1)
    query = query / q.shape[-1] ** 0.5
    state = v.new_zeros(len(v), v.shape[2], q.shape[3], v.shape[3], dtype=torch.float64)
    if initial_state is not None:
        state = initial_state.double()
    found = []
    for step in range(v.shape[1]):
        state = state * g[:, step].double().exp()[..., None, None]
        written = v[:, step].double() - torch.einsum("nhkv,nhk->nhv", state, key[:, step])
        written = written * beta[:, step].double()[..., None]
        state = state + torch.einsum("nhk,nhv->nhkv", key[:, step], written)
        found.append(torch.einsum("nhkv,nhk->nhv", state, query[:, step]))
    return torch.stack(found, 1).to(v.dtype), state.float() if output_final_state else None


@functools.wraps(delta_rule)
def forgetful(*given: Tensor, initial_state: Tensor | None = None, **named: object) -> tuple[Tensor, Tensor | None]:
    """A kernel that reads no state."""
    del initial_state
    return delta_rule(*given, **named)  # type: ignore[arg-type]


def of_another_version(q: Tensor, k: Tensor, v: Tensor, *, decay: Tensor) -> tuple[Tensor, Tensor | None]:
    """A kernel with arguments of other names."""
    raise AssertionError((q, k, v, decay))


@functools.wraps(delta_rule)
def without_slope(*given: Tensor, **named: object) -> tuple[Tensor, Tensor | None]:
    """A kernel that gives right numbers, and leaves out the gradients of decays."""
    detached = {name: one.detach() if name == "g" else one for name, one in named.items() if isinstance(one, Tensor)}
    return delta_rule(*given, **{**named, **detached})  # type: ignore[arg-type]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernel], list[int]]:
    """A function that installs a kernel, and returns a list that grows with each call of it."""

    def install_kernel(kernel: Kernel) -> list[int]:
        calls: list[int] = []
        package, operations, rules = map(ModuleType, ("fla", "fla.ops", "fla.ops.gated_delta_rule"))

        @functools.wraps(kernel)
        def counted(*given: Tensor, **named: object) -> tuple[Tensor, Tensor | None]:
            calls.append(1)
            return kernel(*given, **named)

        rules.chunk_gated_delta_rule = counted  # type: ignore[attr-defined]
        operations.gated_delta_rule, package.ops = rules, operations  # type: ignore[attr-defined]
        for one in (package, operations, rules):
            monkeypatch.setitem(sys.modules, one.__name__, one)
        function = vars(modeling)[CHUNKS]
        reference = getattr(function, "reference", None) or function.__wrapped__
        wrap = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")
        monkeypatch.setattr(modeling, CHUNKS, wrap(reference))
        return calls

    return install_kernel


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that run on the CPU, too."""
    monkeypatch.setattr(recurrence_kernels, "_WITHOUT_KERNELS", frozenset[str]())


def tiny() -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_5_text"))
    compute_in_passes(model)
    return model  # type: ignore[no-any-return]


def trusted() -> bool:
    function = vars(modeling)[CHUNKS]
    assert isinstance(function, FunctionByDevice)
    return function.is_trusted


def test_torch_computes_on_the_host_what_kernels_cannot(tmp_path: Path, install: Callable[[Kernel], list[int]]) -> None:
    """A package for another device does not make a family fail."""
    calls = install(of_another_version)
    verdict = judge(tiny_config("qwen3_5_text"), tmp_path)
    assert verdict.is_right, verdict.reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try_kernels(model := tiny(), CPU, torch.bfloat16)
    model.bfloat16()(input_ids=torch.arange(20)[None], use_cache=False)
    assert not calls


@pytest.mark.usefixtures("everywhere")
def test_a_right_kernel_computes_half_precision_alone(install: Callable[[Kernel], list[int]]) -> None:
    calls = install(delta_rule)
    model = tiny()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try_kernels(model, CPU, torch.bfloat16)
    assert calls
    assert trusted()
    calls.clear()
    tokens = torch.arange(20)[None]
    exact = model(input_ids=tokens, use_cache=False).logits
    assert not calls
    halves = copy.deepcopy(model).bfloat16()(input_ids=tokens, use_cache=False).logits
    assert calls
    torch.testing.assert_close(halves.float(), exact, atol=0.1, rtol=0.02)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (forgetful, "results after states differ by"),
        (of_another_version, "TypeError: .*decay"),
        (without_slope, "gradients of .* differ by"),
    ],
)
def test_a_wrong_kernel_is_named_and_replaced(
    install: Callable[[Kernel], list[int]], kernel: Kernel, reason: str
) -> None:
    calls = install(kernel)
    model = tiny()
    with pytest.warns(RuntimeWarning, match=f"Qwen3_5GatedDeltaNet are slower, .*{reason}"):
        try_kernels(model, CPU, torch.bfloat16)
    assert not trusted()
    calls.clear()
    model.bfloat16()(input_ids=torch.arange(20)[None], use_cache=False)
    assert not calls


@pytest.mark.parametrize("has_state", [False, True])
def test_the_reference_is_a_loop_over_tokens(*, has_state: bool) -> None:
    """What kernels are compared with, in float64, with gradients."""
    function = vars(modeling)[CHUNKS]
    reference = getattr(function, "reference", None) or function.__wrapped__
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    inputs = [drawn(2, 70, 2, 8), drawn(2, 70, 2, 8), drawn(2, 70, 2, 4), drawn(2, 70, 2), drawn(2, 70, 2)]
    state = drawn(2, 2, 8, 4) if has_state else None
    results = []
    for rule in (delta_rule, reference):
        q, k, v, g, beta = inputs
        found, last = rule(
            q,
            k,
            v,
            g=-g.exp(),
            beta=beta.sigmoid(),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        wanted = [*inputs, *([state] if state is not None else [])]
        slopes = torch.autograd.grad((found * found.detach().cos()).sum() + last.pow(2).sum(), wanted)
        results.append((found, last, *slopes))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
