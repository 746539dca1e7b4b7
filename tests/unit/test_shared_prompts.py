"""A prompt that is computed once for all of its responses gives the numbers of one that each response brings along."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.tiny import random_samples, tiny_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, PreTrainedModel

from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.data.transport import ProcessGroup
from leaderless.models import shared_prompts
from leaderless.models.causal_lm import TokenOutputs, load_causal_lm
from leaderless.models.shared_prompts import CpuAttention, ExpandedAttention, Family, VarlenAttention
from leaderless.models.value_model import load_value_model
from leaderless.training.fsdp import FsdpEngine, FsdpValueEngine
from leaderless.training.micro_batches import MicroBatch

CPU = torch.device("cpu")
FAMILIES = [Family(5, (3, 4, 1)), Family(4, ()), Family(3, (6,)), Family(1, (2, 2)), Family(7, (1, 9))]
TEMPERATURE = 0.7
LENGTHS = [(3, 9), (3, 1), (3, 14), (12, 2), (12, 4), (12, 21), (2, 5), (2, 0), (2, 17)]
SIBLINGS = 3


def mask_of(families: list[Family]) -> Tensor:
    """[T, T] bool: which token attends to which."""
    blocks = []
    for family in families:
        block = torch.ones(family.num_tokens, family.num_tokens, dtype=torch.bool).tril()
        lengths = torch.tensor(family.continuations, dtype=torch.int64)
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        block[family.prompt :, family.prompt :] &= owner[:, None] == owner[None, :]
        blocks.append(block)
    return torch.block_diag(*blocks).bool()


def plain_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What FlashAttention is documented to do: causal from the last query and key backwards."""
    assert window_size == (-1, 0)
    assert (query_ends.dtype, key_ends.dtype) == (torch.int32, torch.int32)
    assert (longest_query, longest_key) == (int(query_ends.diff().max()), int(key_ends.diff().max()))
    outputs = []
    for place in range(len(query_ends) - 1):
        mine, theirs = slice(*query_ends[place : place + 2].tolist()), slice(*key_ends[place : place + 2].tolist())
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query[mine], key[theirs], value[theirs]))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        output = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "of",
    [
        CpuAttention,
        lambda families: ExpandedAttention(families, CPU),
        lambda families: VarlenAttention(families, CPU),
    ],
    ids=["cpu", "expanded", "varlen"],
)
def test_attention_and_its_gradients_are_those_of_a_mask(
    of: Callable[..., CpuAttention], kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prompts, "varlen_attn", plain_varlen)
    mask = mask_of(FAMILIES)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(len(mask), n, 8, generator=generator).double() for n in (4, kv_heads, kv_heads)]
    query, key, value = (tensor.requires_grad_() for tensor in inputs)
    key_of, value_of = (tensor.repeat_interleave(4 // kv_heads, dim=1) for tensor in (key, value))
    scores = 0.3 * torch.einsum("qhd,khd->hqk", query, key_of)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    expected = torch.einsum("hqk,khd->qhd", weights, value_of)
    result = of(FAMILIES).attend(0, query, key, value, 0.3)
    torch.testing.assert_close(result, expected)
    slope = torch.randn(expected.shape, generator=generator).double()
    grads, expected_grads = (torch.autograd.grad((slope * out).sum(), inputs) for out in (result, expected))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad)


def with_tools(batch: Batch) -> Batch:
    """The same tokens, of which some came from tools: a third, and the first or the last of some responses."""
    lengths = batch.jagged("tokens").lengths
    mask = torch.cat([(torch.arange(n) + row) % 3 != 0 for row, n in enumerate(lengths.tolist())])
    return batch.with_columns(response_mask=Jagged(mask, lengths, "tokens"))


def samples(*, is_shared: bool) -> Batch:
    return with_tools(random_samples(LENGTHS, siblings=SIBLINGS, is_shared=is_shared))


def gain_of(batch: Batch) -> Tensor:
    """A weight for each response token that no other has."""
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
    scores = engine.log_probs(batch, TEMPERATURE).values
    gain = gain_of(batch)

    def loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> Tensor:
        return (outputs.log_probs * gain[micro_batch.response_index]).sum()

    engine.forward_backward(engine.micro_batches(batch), loss, TEMPERATURE)
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
        engine.forward_backward(
            engine.micro_batches(batch), lambda out, m, gain=gain: (out * gain[m.response_index]).sum()
        )
        grads = [parameter.grad for _, parameter in engine.named_weights() if parameter.grad is not None]
        results.append([values, *grads])
    assert len(results[0]) > 10
    for shared, alone in zip(*results, strict=True):
        assert (shared - alone).norm() / alone.norm().clamp(min=1e-6) < 1e-5
