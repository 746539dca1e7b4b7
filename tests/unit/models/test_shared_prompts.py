"""A prompt that is computed once for all of its responses gives the same numbers as one copy for each response."""

from __future__ import annotations

from inspect import signature

import pytest
import torch
from tests.tiny import add_gradients, at_temperature, random_samples, tiny_model
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, PreTrainedModel

from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.attention import packed as attention_module
from leaderless.models.attention import shared_prompts
from leaderless.models.attention.form import AttentionForm
from leaderless.models.attention.packed import Attention, attend_padded
from leaderless.models.attention.shared_prompts import ExpandedAttention, Family, VarlenAttention, attention_over
from leaderless.models.causal_lm import TokenOutputs, load_causal_lm
from leaderless.models.value_model import load_value_model
from leaderless.rollout.native.segment_attention import attend_in_float32
from leaderless.training.fsdp import FsdpEngine, FsdpValueEngine
from leaderless.training.micro_batches import MicroBatch

CPU = torch.device("cpu")
FAMILIES = [Family(5, (3, 4, 1)), Family(4, ()), Family(3, (6,)), Family(1, (2, 2)), Family(7, (1, 9))]
FAMILIES += [Family(4, (3, 2, 6, 1, 2), (-1, 0, 0, 2, -1)), Family(2, (3, 2, 5, 2), (-1, 0, 1, 1))]
TEMPERATURE = 0.7
LENGTHS = [(3, 9), (3, 1), (3, 14), (12, 2), (12, 4), (12, 21), (2, 5), (2, 0), (2, 17)]
SIBLINGS = 3


def mask_of(families: list[Family]) -> Tensor:
    """[T, T] bool: which token attends to which."""
    blocks = []
    for family in families:
        parents = family.parents or (-1,) * len(family.continuations)
        lengths = torch.tensor([family.prompt, *family.continuations])
        seen = torch.eye(len(lengths)).bool()  # which part sees which
        for part, parent in enumerate(parents, start=1):
            seen[part] |= seen[parent + 1]
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        blocks.append(torch.ones(len(owner), len(owner)).tril() * seen[owner][:, owner])
    return torch.block_diag(*blocks).bool()


Positions = Tensor | None


def varlen_of_torch_2_11(  # its signature, and its documented behavior
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Causal, aligned at the last query and key."""
    assert return_aux is None
    window = window_size[0] + 1 if window_size[0] >= 0 else None
    assert window_size[1] == 0
    assert (cu_seq_q.dtype, cu_seq_k.dtype) == (torch.int32, torch.int32)
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    query_ends, key_ends = cu_seq_q, cu_seq_k
    outputs = []
    for place in range(len(query_ends) - 1):
        mine, theirs = slice(*query_ends[place : place + 2].tolist()), slice(*key_ends[place : place + 2].tolist())
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query[mine], key[theirs], value[theirs]))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        if window is not None:
            mask = mask.triu(k.shape[2] - q.shape[2] - window + 1)
        output = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def varlen_of_torch_2_13(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Positions,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Positions = None,
    block_table: Positions = None,
    num_splits: int | None = None,
) -> Tensor:
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert seqused_k is block_table is num_splits is None
    assert cu_seq_k is not None
    return varlen_of_torch_2_11(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=return_aux, scale=scale, window_size=window_size
    )


def test_the_signatures_are_those_of_torch() -> None:
    oldest, installed, newest = (
        {(parameter.name, parameter.kind) for parameter in signature(function).parameters.values()}
        for function in (varlen_of_torch_2_11, varlen_attn, varlen_of_torch_2_13)
    )
    assert oldest <= installed <= newest


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("way", ["cpu", "expanded", "varlen 2.11", "varlen 2.13"])
def test_attention_and_its_gradients_are_those_of_a_mask(
    way: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    varlen = varlen_of_torch_2_11 if way == "varlen 2.11" else varlen_of_torch_2_13
    monkeypatch.setattr(shared_prompts, "varlen_attn", varlen)
    mask = mask_of(FAMILIES)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(len(mask), n, 8, generator=generator).double() for n in (4, kv_heads, kv_heads)]
    query, key, value = (tensor.requires_grad_() for tensor in inputs)
    key_of, value_of = (tensor.repeat_interleave(4 // kv_heads, dim=1) for tensor in (key, value))
    scores = 0.3 * torch.einsum("qhd,khd->hqk", query, key_of)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    expected = torch.einsum("hqk,khd->qhd", weights, value_of)
    result = attention_of(way).attend(0, query, key, value, AttentionForm(0.3))
    torch.testing.assert_close(result, expected)
    slope = torch.randn(expected.shape, generator=generator).double()
    grads, expected_grads = (torch.autograd.grad((slope * out).sum(), inputs) for out in (result, expected))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad)


def attention_of(way: str) -> Attention:
    if way == "cpu":
        return attention_over(FAMILIES, CPU, torch.float32)
    return ExpandedAttention(FAMILIES, CPU) if way == "expanded" else VarlenAttention(FAMILIES, CPU)


def test_gradients_of_a_prompt_keep_their_digits_whatever_the_number_of_siblings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In bfloat16, 1 + 1/256 is 1: added one by one, the gradients of all siblings but the first are lost."""
    monkeypatch.setattr(shared_prompts, "varlen_attn", lambda _, key, *__, **___: key)
    attention = VarlenAttention([Family(1, (1,) * 128)], CPU)
    key = torch.zeros(129, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    laid_out = attention.attend(0, key.detach(), key, key, AttentionForm(1.0))
    grad = torch.full_like(laid_out, 1 / 256)
    grad[0] = 1.0
    (result,) = torch.autograd.grad(laid_out, key, grad)
    assert result.flatten().tolist() == [1.5] + [1 / 256] * 128
    lost, one_by_one = torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1 / 256, dtype=torch.bfloat16)
    assert lost + one_by_one == lost


def test_no_kernel_that_holds_all_scores_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of CUDA's fused kernels, only flash attention knows groups of heads, in half precision and without a mask."""
    chosen: list[tuple[bool, int]] = []

    def watched(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **settings: bool) -> Tensor:
        assert settings["is_causal"] == (mask is None)
        chosen.append((settings["enable_gqa"], key.shape[1]))
        return query

    monkeypatch.setattr(attention_module, "scaled_dot_product_attention", watched)
    for device, dtype, has_mask in (
        ("meta", torch.bfloat16, False),
        ("meta", torch.float32, False),
        ("meta", torch.bfloat16, True),
        ("cpu", torch.float32, True),
    ):
        query, key = (torch.empty(1, heads, 3, 8, dtype=dtype, device=device) for heads in (4, 2))
        attend_padded(query, key, key, torch.ones(3, 3, dtype=torch.bool) if has_mask else None, 1.0)
    assert chosen == [(True, 2), (False, 4), (False, 4), (True, 2)]


@pytest.mark.parametrize("bias", [0, 60, 150])
def test_large_keys_cost_no_digits_in_bfloat16(bias: float) -> None:
    """Qwen2 has keys whose bias makes all scores of a query large, and of these the softmax takes the differences.

    The rollout's attention to prompts and the trainer's have to differ by less than bfloat16 rounds their results.
    """
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(n, heads, 128, generator=generator) for n, heads in ((16, 4), (64, 2), (64, 2)))
    key = key + bias * torch.randn(1, 2, 128, generator=generator).sign() / 4
    query, key, value = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
    form = AttentionForm(scale := 128**-0.5)
    exact = attended(query.double(), key.double(), value.double(), scale)
    # The last tokens of a sequence are the trainer's queries; it attends with them to all of its keys.
    family, zeros = Family(64, (1,) * 16), torch.zeros(16, 2, 128, dtype=torch.bfloat16)
    own = torch.full_like(zeros, 0.0)
    everything = [torch.cat(t) for t in ((query.new_zeros(64, 4, 128), query), (key, own), (value, zeros))]
    with_own = attended(query.double(), *(torch.cat([t, torch.zeros(1, 2, 128)]).double() for t in (key, value)), scale)
    results = {"trainer": (attention_over([family], CPU, torch.float32).attend(0, *everything, form)[64:], with_own)}
    heads_first = [tensor.transpose(0, 1) for tensor in (query, key, value)]
    grouped = heads_first[0].reshape(2, 1, 32, 128), heads_first[1][:, None], heads_first[2][:, None]
    output, _ = attend_in_float32(*grouped, None, form)
    results["rollout"] = output.reshape(4, 16, 128).transpose(0, 1), exact
    for name, (result, expected) in results.items():
        error = float((result.double() - expected).norm() / expected.norm())
        print(f"bias {bias}, {name}: {error:.2%}")
        assert error < 0.006, name
    scores = (grouped[0] @ grouped[1].transpose(2, 3)).float() * scale
    rounded = (scores.softmax(dim=-1).to(torch.bfloat16) @ grouped[2]).reshape(4, 16, 128).transpose(0, 1)
    error = float((rounded.double() - exact).norm() / exact.norm())
    assert error > 0.006 or bias == 0, "what scores in bfloat16 would cost"


def attended(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    key, value = (tensor.repeat_interleave(2, dim=1) for tensor in (key, value))
    weights = (scale * torch.einsum("qhd,khd->hqk", query, key)).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def with_tools(batch: Batch) -> Batch:
    """The same tokens, of which some came from tools: a third, and the first or the last of some responses."""
    lengths = batch.jagged("tokens").lengths
    mask = torch.cat([(torch.arange(n) + row) % 3 != 0 for row, n in enumerate(lengths.tolist())])
    return batch.with_columns(response_mask=Jagged(mask, lengths, "tokens"))


def samples(*, is_shared: bool) -> Batch:
    return with_tools(random_samples(LENGTHS, siblings=SIBLINGS, is_shared=is_shared))


def gain_of(batch: Batch) -> Tensor:
    """A different weight for each response token."""
    return torch.linspace(-1, 2, int(batch.jagged("response_mask").values.sum()))


def naive(batch: Batch) -> tuple[Tensor, PreTrainedModel]:
    """Log-probs of one sample after the other, in float64, and the model with the gradient of their weighted sum."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float64, attn_implementation="eager")
    rows = [batch.jagged(name).rows() for name in ("prompt_tokens", "tokens", "response_mask")]
    log_probs = []
    for prompt, tokens, mask in zip(*rows, strict=True):
        logits = model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        if len(tokens):
            log_probs.append(logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)[mask])
    joined = torch.cat(log_probs)
    (joined * gain_of(batch)).sum().backward()
    return joined.detach(), model


def trained(batch: Batch, micro_batch_tokens: int, **settings: object) -> tuple[Tensor, FsdpEngine]:
    """Log-probs, and the engine with the gradient of their weighted sum."""
    config = ModelConfig(path=tiny_model(), **settings)  # type: ignore[arg-type]
    model, group = load_causal_lm(config, "policy"), ProcessGroup((0,), 0)
    engine = FsdpEngine(model, config, group, CPU, micro_batch_tokens, optimizer=OptimizerConfig(), num_updates=1)
    batch = at_temperature(batch, TEMPERATURE)
    scores = engine.log_probs(batch).values
    gain = gain_of(batch)

    def loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> Tensor:
        return (outputs.log_probs * gain[micro_batch.response_index]).sum()

    add_gradients(engine, batch, loss)
    return scores, engine


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize(
    ("micro_batch_tokens", "settings"), [(33, {}), (40, {}), (4096, {}), (60, {"gradient_checkpointing": True})]
)
def test_log_probs_and_gradients_are_those_of_one_sample_after_the_other(
    is_shared: bool, micro_batch_tokens: int, settings: dict[str, object]
) -> None:
    batch = samples(is_shared=is_shared)
    expected, model = naive(batch)
    scores, engine = trained(batch, micro_batch_tokens, **settings)
    torch.testing.assert_close(scores.double(), expected, atol=1e-5, rtol=1e-5)
    for (name, parameter), weight in zip(engine.named_weights(), model.parameters(), strict=True):
        assert parameter.grad is not None
        assert weight.grad is not None
        difference = (parameter.grad - weight.grad).norm() / weight.grad.norm().clamp(min=1e-6)
        assert difference < 1e-5, name


def test_samples_without_a_common_prompt_are_scored_like_others() -> None:
    batch = random_samples([(3, 5), (4, 6), (2, 7)])
    expected, _ = trained(batch, 4096)
    prompts, tokens = (batch.jagged(name).to_lists() for name in ("prompt_tokens", "tokens"))
    rows = [*zip(prompts, tokens, strict=True), ([], [])]
    everything = Jagged.from_lists([p + t for p, t in rows], torch.int64, "tokens")
    mask = Jagged.from_lists([[False] * len(p) + [True] * len(t) for p, t in rows], torch.bool, "tokens")
    table = Batch(torch.tensor([0]), {"prompt_tokens": Jagged.from_lists([[]], torch.int64, "prompt_tokens")})
    index = torch.zeros(len(rows), dtype=torch.int64)
    columns = {"tokens": everything, "response_mask": mask}
    scores, _ = trained(Batch(torch.arange(len(rows)), columns, table, index), 4096)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


def test_a_shared_prompt_is_computed_once() -> None:
    shared, alone = (sum(len(m.tokens) for m in pieces(samples(is_shared=flag))) for flag in (True, False))
    assert alone - shared == 2 * (3 + 12 + 2)


def pieces(batch: Batch) -> list[MicroBatch]:
    config = ModelConfig(path=tiny_model())
    return FsdpEngine(load_causal_lm(config, "policy"), config, ProcessGroup((0,), 0), CPU, 4096).micro_batches(batch)


def test_values_and_their_gradients_do_not_depend_on_sharing() -> None:
    results = []
    for is_shared in (True, False):
        batch, config = samples(is_shared=is_shared), ModelConfig(path=tiny_model())
        model = load_value_model(config, "critic")
        with torch.no_grad():
            model.model.score.weight.copy_(torch.linspace(-1, 1, 32))
        engine = FsdpValueEngine(
            model, config, ProcessGroup((0,), 0), CPU, 64, optimizer=OptimizerConfig(), num_updates=1
        )
        gain = gain_of(batch)
        values = engine.values(batch).values
        add_gradients(engine, batch, lambda out, m, gain=gain: (out * gain[m.response_index]).sum())
        grads = [parameter.grad for _, parameter in engine.named_weights() if parameter.grad is not None]
        results.append([values, *grads])
    assert len(results[0]) > 10
    for shared, alone in zip(*results, strict=True):
        assert (shared - alone).norm() / alone.norm().clamp(min=1e-6) < 1e-5
