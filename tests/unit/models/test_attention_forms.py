"""Windows, chunks, bounded scores and sinks: what each way to attend computes is that of a mask, in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tests.unit.models.test_shared_prompts import FAMILIES as SHORT
from tests.unit.models.test_shared_prompts import mask_of, varlen_of_torch_2_13
from torch import Tensor
from transformers import CONFIG_MAPPING

from leaderless.config.models import ModelConfig
from leaderless.models.attention import shared_prompts, some_keys
from leaderless.models.attention.form import AttentionForm
from leaderless.models.attention.indexed import KeyChoice, SequenceMask
from leaderless.models.attention.joined import JoinedAttention
from leaderless.models.attention.packed import Attention, PackedAttention
from leaderless.models.attention.shared_prompts import ExpandedAttention, Family, VarlenAttention, blocks_of
from leaderless.models.loading.family_trial import NUM_LAYERS, shrunk
from leaderless.models.loading.support import kinds_of
from leaderless.planner.memory.attention_kinds import AttentionKind, attention_kinds
from leaderless.planner.memory.model_size import read_model_size

CPU = torch.device("cpu")
FAMILIES = [*SHORT, Family(23, (17, 2, 30, 17)), Family(29, ()), Family(9, (11, 6, 25, 4, 7, 2), (-1, 0, 0, 2, 2, -1))]
"""Prompts with continuations, some of them several times as long as windows and chunks, or continued in turn."""
KINDS = {
    "full": AttentionKind(),
    "a token alone": AttentionKind(window=1),
    "a window within prompts": AttentionKind(window=3),
    "a window that reaches from responses into prompts": AttentionKind(window=6),
    "a window wider than all": AttentionKind(window=64),
    "chunks": AttentionKind(chunk=4),
    "chunks that end where a prompt ends": AttentionKind(chunk=5),
    "a chunk longer than all": AttentionKind(chunk=64),
    "bounded scores": AttentionKind(softcap=0.7),
    "bounded scores in a window": AttentionKind(window=5, softcap=0.7),
}


def families_apart() -> list[Family]:
    return [Family(family.num_tokens, ()) for family in FAMILIES]


WAYS: dict[str, tuple[Callable[[], Attention], Callable[[], list[Family]]]] = {
    "joined": (lambda: JoinedAttention([*blocks_of(FAMILIES)], CPU), lambda: FAMILIES),
    "expanded": (lambda: ExpandedAttention(FAMILIES, CPU), lambda: FAMILIES),
    "varlen": (lambda: VarlenAttention(FAMILIES, CPU), lambda: FAMILIES),
    "packed": (lambda: PackedAttention([one.num_tokens for one in FAMILIES], CPU), families_apart),
}


def positions_of(families: Sequence[Family]) -> Tensor:
    """Places of tokens in their own sequences: each sees all that are before it."""
    return mask_of([*families]).sum(1) - 1


def seen_by(kind: AttentionKind, families: list[Family]) -> Tensor:
    """[T, T] bool, as `mask_of`, with windows and chunks by their definitions."""
    is_seen, positions = mask_of(families).clone(), positions_of(families).tolist()
    for query, at in enumerate(positions):
        for key, before in enumerate(positions):
            if kind.window is not None and at - before >= kind.window:
                is_seen[query, key] = False
            if kind.chunk is not None and at // kind.chunk != before // kind.chunk:
                is_seen[query, key] = False
    return is_seen


def naively(inputs: Sequence[Tensor], sinks: Tensor | None, kind: AttentionKind, is_seen: Tensor) -> Tensor:
    """Attention with all scores at once; a sink is one more column, which has no value."""
    query, key, value = inputs
    times = query.shape[1] // key.shape[1]
    scores = 0.3 * torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(times, 1))
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], 2)
    weights = scores.softmax(dim=-1)[:, :, : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(times, 1))


def made(kv_heads: int, *, has_sinks: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    count = sum(family.num_tokens for family in FAMILIES)
    inputs = [torch.randn(count, heads, 8, generator=generator).double() for heads in (4, kv_heads, kv_heads)]
    inputs += [torch.randn(4, generator=generator).double()] * has_sinks
    return [tensor.requires_grad_() for tensor in inputs]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("way", [*WAYS, "products"])
def test_attention_and_its_gradients_are_those_of_a_mask(
    way: str, name: str, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prompts, "varlen_attn", varlen_of_torch_2_13)
    if way == "products":  # as on devices without kernels, in blocks of few queries
        monkeypatch.setattr(some_keys, "BLOCK_SCORES", 100)
        monkeypatch.setattr(some_keys, "flash_on_cpu", None)
        for kernels, products in (
            ("attend_some", "attend_by_products"),
            ("gradients_of_some", "gradients_by_products"),
        ):
            monkeypatch.setattr(some_keys, kernels, getattr(some_keys, products))
    make, families = WAYS["joined" if way == "products" else way]
    kind, inputs = KINDS[name], made(2, has_sinks=has_sinks)
    sinks = inputs[3] if has_sinks else None
    expected = naively(inputs[:3], sinks, kind, seen_by(kind, families()))
    result = make().attend(0, *inputs[:3], AttentionForm(0.3, kind, sinks))
    torch.testing.assert_close(result, expected)
    slope = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
    grads, expected_grads = (torch.autograd.grad((slope * out).sum(), inputs) for out in (result, expected))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad)


def num_scores(attention: JoinedAttention, kind: AttentionKind) -> int:
    """Scores that are computed for one head."""
    calls = attention._calls_of(kind)
    zeros = torch.zeros(sum(family.num_tokens for family in FAMILIES))
    of_cells = sum(bucket.count * bucket.longest**2 for bucket in calls.buckets.all)
    return of_cells + sum(zeros[queries].numel() * zeros[keys].shape[-1] for keys, queries, _ in calls.crossings)


def test_tokens_behind_a_window_cost_nothing() -> None:
    """Next to the tokens of its window, a token has scores for those behind it in its cell and before it, at most."""
    attention, count = JoinedAttention([*blocks_of(FAMILIES)], CPU), sum(one.num_tokens for one in FAMILIES)
    for size in (1, 3, 4, 8):
        assert num_scores(attention, AttentionKind(window=size)) <= 2 * size * count, size
        assert num_scores(attention, AttentionKind(chunk=size)) <= 2 * size * count, size
    assert num_scores(attention, AttentionKind()) > 20 * count


NUM_CHOSEN = 3


def index(hidden: Tensor, mask: Tensor) -> Tensor:
    """The keys whose sums are nearest to that of a token, as an indexer of `transformers` returns them."""
    assert hidden.shape[:2] == mask.shape[:2] == (1, mask.shape[2])
    sums = hidden[0].sum(1)
    distances = (sums[:, None] - sums).abs().masked_fill(~mask[0], torch.inf)
    return distances.topk(min(NUM_CHOSEN, len(sums)), largest=False).indices.int()[None]


def index_of(hidden: Tensor) -> KeyChoice:
    return KeyChoice(index, (hidden[None], SequenceMask()[:, 0, :, :]), {})


def chosen_by(hidden: Tensor, families: list[Family]) -> Tensor:
    """[T, T] bool: the chosen keys of each token, one by one."""
    sums, is_seen = hidden.sum(1), mask_of(families).clone()
    for query, row in enumerate(is_seen):
        keys = row.nonzero()[:, 0].tolist()
        nearest = sorted(keys, key=lambda key: float((sums[query] - sums[key]).abs()))[:NUM_CHOSEN]
        row.zero_()[nearest] = True
    return is_seen


INDEXED = AttentionKind(is_indexed=True)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_token_attends_to_the_best_keys_of_its_own_sequence(way: str, has_sinks: bool) -> None:
    """Results and gradients are those of a mask, whose keys are chosen sequence by sequence."""
    make, families = WAYS[way]
    inputs, generator = made(2, has_sinks=has_sinks), torch.Generator().manual_seed(2)
    hidden, sinks = torch.randn(len(inputs[0]), 5, generator=generator), inputs[3] if has_sinks else None
    expected = naively(inputs[:3], sinks, INDEXED, chosen_by(hidden, families()))
    attention, choice = make(), index_of(hidden)
    result = attention.attend(0, *inputs[:3], AttentionForm(0.3, INDEXED, sinks, choice))
    torch.testing.assert_close(result, expected)
    slope = torch.randn(expected.shape, generator=generator).double()
    grads, expected_grads = (torch.autograd.grad((slope * out).sum(), inputs) for out in (result, expected))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad)
    again = attention.attend(1, *inputs[:3], AttentionForm(0.3, INDEXED, sinks, choice))  # a layer that shares it
    assert torch.equal(again, result)


def test_neither_choice_nor_attention_leaks_into_another_sequence() -> None:
    """Other sequences before it, with keys that fit better, do not change a result or a gradient by a bit."""
    attention, first = JoinedAttention([*blocks_of(FAMILIES)], CPU), -FAMILIES[-1].num_tokens
    found = []
    for shift in (0.0, 3.0):
        inputs = [tensor.detach().float() for tensor in made(2, has_sinks=False)]
        for tensor in inputs:
            tensor[:first] += shift
            tensor.requires_grad_()
        form = AttentionForm(0.3, INDEXED, chosen=index_of(inputs[1].detach().flatten(1)))
        result = attention.attend(0, *inputs, form)[first:]
        grads = torch.autograd.grad(result.sum(), inputs)
        assert all(float(one[:first].abs().max()) == 0 for one in grads)
        found.append([result, *(one[first:] for one in grads)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_nothing_leaks_from_one_packed_sequence_into_another(name: str) -> None:
    """Another neighbor does not change a result or a gradient by a bit."""
    form = AttentionForm(0.3, KINDS[name], torch.tensor([0.1, -0.2, 0.3, 0.5]))
    attention, first = JoinedAttention([*blocks_of(FAMILIES)], CPU), FAMILIES[0].num_tokens
    found = []
    for shift in (0.0, 3.0):
        inputs = [tensor.detach().float() for tensor in made(2, has_sinks=False)]
        for tensor in inputs:
            tensor[first:] += shift
            tensor.requires_grad_()
        result = attention.attend(0, *inputs, form)
        found.append([result[:first], *(one[:first] for one in torch.autograd.grad(result[:first].sum(), inputs))])
        assert all(
            float(one[first:].abs().max()) == 0
            for one in torch.autograd.grad(attention.attend(0, *inputs, form)[:first].sum(), inputs)
        )
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_kinds_are_read_from_the_description_of_a_model() -> None:
    described = {"num_hidden_layers": 3, "sliding_window": 8, "attn_logit_softcapping": 50.0, "attention_chunk_size": 4}
    assert attention_kinds(described) == (AttentionKind(8, None, 50.0),) * 3
    types = {"layer_types": ["sliding_attention", "full_attention", "chunked_attention"]}
    window, full, chunk = attention_kinds(described | types)
    assert (window.window, window.chunk, full.sees_all, chunk.window, chunk.chunk) == (8, None, True, None, 4)
    assert attention_kinds({"num_hidden_layers": 2, "sliding_window": None}) == (AttentionKind(),) * 2
    unused = {"num_hidden_layers": 2, "sliding_window": 8, "use_sliding_window": False}
    assert attention_kinds(unused) == (AttentionKind(),) * 2
    linear, both, alone, indexed = attention_kinds(
        {"layer_types": ["linear_attention", "hybrid", "moe", "indexed_attention"]}
    )
    assert indexed == AttentionKind(is_indexed=True)
    assert not indexed.sees_all
    assert [(one.is_recurrent, one.has_attention) for one in (linear, both, alone)] == [
        (True, False),
        (True, True),
        (False, False),
    ]
    with pytest.raises(ValueError, match="layers of type compressed_attention are not supported"):
        attention_kinds({"layer_types": ["compressed_attention"]})
    with pytest.raises(ValueError, match="layers of type sliding_attention have no size"):
        attention_kinds({"layer_types": ["sliding_attention"]})


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("nemotron_h", {"hybrid_override_pattern": "M-M-M-MM*-ME"}),
        ("bamba", {"attn_layer_indices": [9, 18]}),
        ("gemma3_text", {}),
        ("qwen3_next", {}),
    ],
)
def test_a_small_model_for_a_trial_has_layers_of_all_kinds(family: str, settings: dict[str, object]) -> None:
    described = CONFIG_MAPPING[family](**settings)
    kinds = kinds_of(shrunk(described))
    assert {*kinds} == {*kinds_of(described)}
    assert len(kinds) == NUM_LAYERS < len(kinds_of(described))


@pytest.mark.parametrize(
    "settings",
    [
        {"sliding_window": 32768},
        {"sliding_window": 32768, "use_sliding_window": True, "max_window_layers": 2},
        {"sliding_window": 32768, "use_sliding_window": True, "max_window_layers": 4},
    ],
)
def test_the_planner_reads_windows_as_the_model_has_them(tmp_path: Path, settings: dict[str, object]) -> None:
    described = CONFIG_MAPPING["qwen2"](num_hidden_layers=4, **settings)
    written = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    written |= {"num_attention_heads": 4, "num_hidden_layers": 4, "max_position_embeddings": 64, **settings}
    (tmp_path / "config.json").write_text(json.dumps(written))
    size = read_model_size(ModelConfig(path=str(tmp_path)))
    assert size is not None
    assert size.is_plain == all(kind == AttentionKind() for kind in kinds_of(described))
