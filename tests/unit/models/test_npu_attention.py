"""Ascend's fused attention, called as it is documented; the function is a stand-in that checks and computes slowly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from inspect import signature
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from leaderless.models.attention import npu as npu_attention
from leaderless.models.attention import packed, shared_prompts
from leaderless.models.attention.form import AttentionForm
from leaderless.models.attention.npu import fusion_attention, trial_error
from leaderless.models.attention.shared_prompts import ExpandedAttention, Family, NpuAttention, attention_over

CPU = torch.device("cpu")
NPU = cast("torch.device", SimpleNamespace(type="npu"))
FAMILIES = [Family(5, (3, 4, 1)), Family(4, ()), Family(3, (6,)), Family(1, (2, 2)), Family(7, (1, 9))]


def documented(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """The documented signature and constraints, of those ways to call it that are used."""
    assert pse is padding_mask is prefix is None
    assert (keep_prob, pre_tockens, next_tockens, inner_precise) == (1.0, 2147483647, 2147483647, 0)
    assert (gen_mask_parallel, sync) == (True, False)
    assert query.dtype == key.dtype == value.dtype
    assert key.shape == value.shape
    assert head_num == query.shape[1] <= 256, "heads are the second dimension in both layouts"
    assert head_num % key.shape[1] == 0
    assert atten_mask is not None
    assert atten_mask.dtype in {torch.bool, torch.uint8}
    if sparse_mode:
        assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1)), "the compressed mask"
    key, value = (tensor.repeat_interleave(head_num // key.shape[1], dim=1) for tensor in (key, value))
    nothing = torch.empty(0)
    if input_layout == "TND":
        assert sparse_mode == 3
        assert isinstance(actual_seq_qlen, list | tuple)
        assert isinstance(actual_seq_kvlen, list | tuple)
        assert (actual_seq_qlen[-1], actual_seq_kvlen[-1]) == (len(query), len(key))
        assert len(actual_seq_qlen) == len(actual_seq_kvlen) <= 2048
        parts = []
        for (q0, q1), (k0, k1) in zip(pairwise([0, *actual_seq_qlen]), pairwise([0, *actual_seq_kvlen]), strict=True):
            q, k, v = (x.transpose(0, 1) for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
            hidden = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).triu(k1 - k0 - (q1 - q0) + 1)
            parts.append(computed(q, k, v, hidden, scale).transpose(0, 1))
        return torch.cat(parts), nothing, nothing, nothing, 0, 0, 0
    assert input_layout == "BNSD"
    assert actual_seq_qlen is actual_seq_kvlen is None
    if sparse_mode == 2:
        hidden = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
    else:
        assert sparse_mode == 0
        assert atten_mask.shape == (len(query), 1, query.shape[2], key.shape[2])
        hidden = atten_mask.bool()
    return computed(query, key, value, hidden, scale), nothing, nothing, nothing, 0, 0, 0


def computed(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float) -> Tensor:
    scores = (query.float() @ key.float().transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


def with_gradients(attend: Callable[[Tensor, Tensor, Tensor], Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]
    output = attend(*inputs)
    slope = torch.randn(output.shape, generator=generator)
    return [output.detach(), *torch.autograd.grad((output * slope).sum(), inputs)]


def test_packed_attention_is_that_of_samples_with_prompts_of_their_own() -> None:
    num_tokens = sum(family.num_tokens for family in FAMILIES)
    shapes = [(num_tokens, heads, 8) for heads in (4, 2, 2)]
    fused, expanded = NpuAttention(FAMILIES, CPU, documented), ExpandedAttention(FAMILIES, CPU)
    form = AttentionForm(0.3)
    results = [with_gradients(lambda *inputs: way.attend(0, *inputs, form), shapes) for way in (fused, expanded)]  # noqa: B023
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
def test_padded_attention_is_that_of_torch(monkeypatch: pytest.MonkeyPatch, is_causal: bool) -> None:
    shapes = [(3, heads, 6, 8) for heads in (4, 2, 2)]
    mask = None if is_causal else torch.rand(3, 1, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.5
    if mask is not None:
        mask[..., 0] = True

    def attend(*inputs: Tensor) -> Tensor:
        return packed.attend_padded(*inputs, mask, 0.3)

    expected = with_gradients(attend, shapes)
    half = [tensor.to(torch.bfloat16) for tensor in (torch.zeros(shape) for shape in shapes)]
    called: list[str] = []

    def function(*args: object, **options: object) -> tuple[Tensor, ...]:
        called.append(str(args[4]))
        return documented(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(npu_attention, "fusion_attention", lambda _: function)
    attend(*half)
    assert called == ["BNSD"]
    attend(*(tensor.float() for tensor in half))
    assert called == ["BNSD"], "in half precision alone"
    result = with_gradients(lambda *inputs: npu_attention.attend_padded(function, *inputs, mask, 0.3), shapes)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_the_function_is_used_where_a_trial_of_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(signature(documented).parameters)[:5] == ["query", "key", "value", "head_num", "input_layout"]
    assert trial_error(documented, CPU) < npu_attention.TOLERANCE
    find = fusion_attention.__wrapped__
    assert find(CPU) is find(NPU) is None, "torch_npu is not installed"

    def install(function: object) -> None:
        monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu_fusion_attention=function))
        monkeypatch.setattr(npu_attention, "trial_error", lambda tried, _: trial_error(tried, CPU))

    install(documented)
    assert find(NPU) is documented

    def other_signature(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return query, key, value

    def wrong(*args: object, **options: object) -> tuple[Tensor, ...]:
        output, *others = documented(*args, **options)  # type: ignore[arg-type]
        return output * 1.1, *others

    for function, reason in ((other_signature, "unexpected keyword"), (wrong, "is wrong by")):
        install(function)
        with pytest.warns(UserWarning, match=rf"npu_fusion_attention fails: .*{reason}"):
            assert find(NPU) is None


def test_passes_in_half_precision_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = torch.device("meta")  # which tensors can be moved to
    monkeypatch.setattr(shared_prompts, "fusion_attention", lambda _: documented)
    assert isinstance(attention_over(FAMILIES, npu, torch.bfloat16), NpuAttention)
    assert isinstance(attention_over(FAMILIES, npu, torch.float32), ExpandedAttention)
    many = [Family(1, ())] * (npu_attention.MAX_SEQUENCES + 1)
    assert isinstance(attention_over(many, npu, torch.bfloat16), ExpandedAttention)
