"""Layers that read by recurrence compute in a packed pass what they compute for each sequence alone."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from tests.tiny import add_gradients, random_samples
from tests.tiny_families import Alone, tiny_config, write_family
from tests.unit.models.test_attention_forms import positions_of
from tests.unit.models.test_shared_prompts import FAMILIES, mask_of
from torch import Tensor

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.attention import recurrence
from leaderless.models.attention.joined import JoinedAttention
from leaderless.models.attention.recurrence import LayerStates, SteppedMixer
from leaderless.models.attention.shared_prompts import Family, blocks_of
from leaderless.models.causal_lm import load_causal_lm
from leaderless.training.fsdp import FsdpEngine

CPU = torch.device("cpu")
READ = ["qwen3_5_text", "lfm2", "bamba", "mamba"]
"""Families whose layers give each token the same, bit for bit, whatever is next to it: no mixtures of experts."""


def decayed(rows: Tensor, states: LayerStates | None = None) -> Tensor:
    """A layer whose state is 0.9 times the last one, and the token: s_t = 0.9 s_(t-1) + x_t^3, without padding."""
    state = rows.new_zeros(len(rows), rows.shape[2])
    if states is not None and states.recurrences:
        state = states.recurrences[0]
    found = []
    for token in rows.unbind(1):
        state = 0.9 * state + token**3
        found.append(state)
    if states is not None:
        states.update_recurrent_state(state, 0)
    return torch.stack(found, 1)


def test_each_token_is_read_after_those_that_it_sees() -> None:
    """With gradients, in float64: the weight of an earlier token is 0.9 to the power of its distance."""
    positions, generator = positions_of(FAMILIES), torch.Generator().manual_seed(0)
    weights = mask_of(FAMILIES) * 0.9 ** (positions[:, None] - positions).double()
    hidden = torch.randn(len(weights), 3, generator=generator).double().requires_grad_()
    found = JoinedAttention([*blocks_of(FAMILIES)], CPU).recur(0, decayed, hidden)
    expected = weights @ hidden**3
    torch.testing.assert_close(found, expected)
    slope = torch.randn(found.shape, generator=generator).double()
    grads = [torch.autograd.grad((slope * one).sum(), hidden)[0] for one in (found, expected)]
    torch.testing.assert_close(*grads)


def test_a_prompt_that_sequences_share_is_read_once() -> None:
    counts: list[int] = []

    def counting(rows: Tensor, states: LayerStates | None = None) -> Tensor:
        counts.append(rows[:, :, 0].numel())
        return decayed(rows, states)

    families = [Family(5, (3, 4, 1))] * 4
    JoinedAttention([*blocks_of(families)], CPU).recur(0, counting, torch.zeros(4 * families[0].num_tokens, 3))
    # Prompts, then responses of similar length, padded; those of one token take the room of two.
    assert counts == [4 * 5, 4 * (4 + 4), 4 * 2]


def test_a_layer_that_continues_token_by_token_reads_whole_sequences() -> None:
    """Results and gradients are the same, and a prompt is read again with each of its responses."""
    hidden = torch.randn(sum(family.num_tokens for family in FAMILIES), 3).double().requires_grad_()
    attention, begun = JoinedAttention([*blocks_of(FAMILIES)], CPU), list[bool]()

    def counting(rows: Tensor, states: LayerStates | None = None) -> Tensor:
        begun.append(states is None or not states.has_previous_state())
        return decayed(rows, states)

    found, expected = (attention.recur(0, mixer, hidden) for mixer in (SteppedMixer(counting), decayed))
    torch.testing.assert_close(found, expected)
    slope = torch.randn(found.shape).double()
    torch.testing.assert_close(*(torch.autograd.grad((slope * one).sum(), hidden)[0] for one in (found, expected)))
    assert all(begun)


def test_such_a_layer_steps_from_its_states() -> None:
    rows, states, lengths = torch.randn(2, 7, 3), LayerStates(), list[int]()

    def counting(rows: Tensor, states: LayerStates | None = None) -> Tensor:
        lengths.append(rows.shape[1])
        return decayed(rows, states)

    mixer = SteppedMixer(counting)
    found = torch.cat([mixer(part, states) for part in rows.split([3, 3, 1], dim=1)], dim=1)
    torch.testing.assert_close(found, decayed(rows))
    assert lengths == [3, 1, 1, 1, 1]


@pytest.mark.parametrize("family", READ)
def test_nothing_leaks_from_one_packed_sequence_into_another(tmp_path: Path, family: str) -> None:
    write_family(tiny_config(family), tmp_path)
    model = load_causal_lm(ModelConfig(path=str(tmp_path)), "policy")
    first, positions = FAMILIES[0].num_tokens, positions_of(FAMILIES)
    found = []
    for shift in (0, 7):
        tokens = torch.arange(len(positions)) * 5 % 50
        tokens[first:] += shift
        attention = JoinedAttention([*blocks_of(FAMILIES)], CPU)
        logits = model(tokens, positions, attention, torch.arange(first))
        gradients = torch.autograd.grad(logits.square().sum(), [p for p in model.parameters() if p.requires_grad])
        found.append([logits, *gradients])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("family", READ)
def test_layers_that_are_recomputed_have_the_same_gradients(tmp_path: Path, family: str) -> None:
    write_family(tiny_config(family), tmp_path)
    batch, gradients = random_samples([(5, 4), (5, 1), (4, 3), (6, 7)], siblings=2), []
    for is_recomputed in (False, True):
        config = ModelConfig(path=str(tmp_path), gradient_checkpointing=is_recomputed)
        group = cast("ProcessGroup", Alone())
        engine = FsdpEngine(
            load_causal_lm(config, "policy"), config, group, CPU, 256, optimizer=OptimizerConfig(), num_updates=1
        )
        add_gradients(engine, batch, lambda outputs, _: outputs.log_probs.sum())
        gradients.append([parameter.grad for parameter in engine.model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert one is other or torch.equal(one, other)


def test_adapters_of_such_layers_have_no_dropout(tmp_path: Path) -> None:
    write_family(tiny_config("qwen3_next"), tmp_path)
    lora = {"rank": 2, "dropout": 0.1}
    with pytest.raises(RecipeError, match=r"models.policy.lora.dropout: is 0.1, but .*linear_attn.* set it to 0"):
        load_causal_lm(ModelConfig(path=str(tmp_path), lora=lora), "policy")
    own = lora | {"targets": ["q_proj", "v_proj"]}
    load_causal_lm(ModelConfig(path=str(tmp_path), lora=own), "policy")


def test_layers_that_do_not_continue_from_their_states_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixers of Mamba 1 would be such layers, if they were given several tokens at a time."""
    write_family(tiny_config("mamba"), tmp_path)
    load_causal_lm(ModelConfig(path=str(tmp_path)), "policy")
    monkeypatch.setattr(recurrence, "_OF_MAMBA_1", "no such part")
    with pytest.raises(RecipeError, match="MambaMixer do not continue from their states"):
        load_causal_lm(ModelConfig(path=str(tmp_path)), "policy")
