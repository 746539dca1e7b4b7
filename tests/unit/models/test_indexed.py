"""Layers with an indexer choose, in a packed pass, the keys that they choose for each sequence alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.tiny import add_gradients, random_samples
from tests.tiny_families import Alone, tiny_config, write_family
from tests.unit.models.test_attention_forms import positions_of
from tests.unit.models.test_shared_prompts import FAMILIES
from tests.unit.rollout.test_make_engine import recipe_of, setup_of

from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig, ModelConfig, OptimizerConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.attention.form import current_pass
from leaderless.models.attention.indexed import Indexer, KeyChoice
from leaderless.models.attention.joined import JoinedAttention
from leaderless.models.attention.shared_prompts import blocks_of
from leaderless.models.causal_lm import load_causal_lm
from leaderless.planner import Layout
from leaderless.rollout.make_engine import make_engine as make_rollout_engine
from leaderless.training.engine import EngineSetup
from leaderless.training.fsdp import FsdpEngine, make_engine

CPU = torch.device("cpu")
INDEXED = ["deepseek_v32", "glm_moe_dsa", "qwen4_exp_text"]
"""An indexer of tokens in each layer, one that a layer shares with the next, and one of blocks of tokens."""


def write(family: str, folder: Path) -> ModelConfig:
    """Write a model without experts, where there are dense layers, which give each token the same, bit for bit."""
    dense = {} if family.startswith("qwen") else {"mlp_layer_types": ["dense"] * 2}
    write_family(tiny_config(family, **dense), folder)
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize("family", INDEXED[:2])
def test_nothing_leaks_from_one_packed_sequence_into_another(tmp_path: Path, family: str) -> None:
    model = load_causal_lm(write(family, tmp_path), "policy")
    first, positions = -FAMILIES[-1].num_tokens, positions_of(FAMILIES)
    found = []
    for shift in (0, 7):
        tokens = torch.arange(len(positions)) * 5 % 50
        tokens[:first] += shift
        places = torch.arange(len(tokens))[first:]
        logits = model(tokens, positions, JoinedAttention([*blocks_of(FAMILIES)], CPU), places)
        trained = [one for name, one in model.named_parameters() if ".indexer." not in name]
        found.append([logits, *torch.autograd.grad(logits.square().sum(), trained)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("family", INDEXED)
def test_layers_that_are_recomputed_have_the_same_gradients(tmp_path: Path, family: str) -> None:
    config, gradients = write(family, tmp_path), []
    batch = random_samples([(5, 4), (5, 1), (4, 3), (6, 7)], siblings=2)
    for is_recomputed in (False, True):
        own = config.model_copy(update={"gradient_checkpointing": is_recomputed})
        model, group = load_causal_lm(own, "policy"), cast("ProcessGroup", Alone())
        engine = FsdpEngine(model, own, group, CPU, 256, optimizer=OptimizerConfig(), num_updates=1)
        add_gradients(engine, batch, lambda outputs, _: outputs.log_probs.sum())
        gradients.append([parameter.grad for parameter in engine.model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert one is other or torch.equal(one, other)


def test_training_leaves_an_indexer_as_it_is(tmp_path: Path) -> None:
    """As in `transformers`, it has no gradient, and so no adapters."""
    config = write("deepseek_v32", tmp_path)
    group = cast("ProcessGroup", Alone())
    engine = FsdpEngine(
        load_causal_lm(config, "policy"), config, group, CPU, 256, optimizer=OptimizerConfig(), num_updates=1
    )
    add_gradients(engine, random_samples([(5, 4)], siblings=2), lambda outputs, _: outputs.log_probs.sum())
    without = {name for name, one in engine.model.named_parameters() if one.grad is None}
    assert without == {name for name, _ in engine.model.named_parameters() if ".indexer." in name}
    adapted = load_causal_lm(config.model_copy(update={"lora": LoraConfig(rank=2)}), "policy")
    names = [name for name, _ in adapted.trained_weights()]
    assert names
    assert not any(".indexer." in name for name in names)


def test_an_indexer_of_an_unknown_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write("deepseek_v32", tmp_path)

    def all_keys(self: Indexer, hidden: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        assert current_pass() is not None or isinstance(self, Indexer)
        return torch.zeros(1, hidden.shape[1], 1, dtype=torch.int32)

    monkeypatch.setattr(Indexer, "__call__", all_keys)
    with pytest.raises(RecipeError, match="layer 0 has an indexer of an unknown kind"):
        load_causal_lm(config, "policy")


def test_a_wrong_choice_is_found_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is tried with fewer keys than its sequences have, so that the choice matters."""
    config = write("deepseek_v32", tmp_path)
    monkeypatch.setattr(KeyChoice, "_seen_in", lambda _, tokens: torch.ones(2 * [len(tokens)]).tril().bool())
    with pytest.raises(RecipeError, match="packed sequences give other logits than each alone"):
        load_causal_lm(config, "policy")


@pytest.mark.parametrize("axis", ["cp", "pp"])
def test_ranks_divide_neither_tokens_nor_layers(tmp_path: Path, axis: str) -> None:
    group = cast("ProcessGroup", Alone())
    setup = EngineSetup(
        role="policy",
        model=write("deepseek_v32", tmp_path),
        is_critic=False,
        layout=Layout((0, 1), **{"dp": 1, axis: 2}),
        process_group=group,
        axis_groups={"dp": group},
        device=CPU,
        optimizer=OptimizerConfig(),
        num_updates=1,
        micro_batch_tokens=64,
    )
    message = f"models.policy: layers with an indexer, which chooses keys, cannot be divided along {axis}: leave out"
    with pytest.raises(RecipeError, match=message):
        make_engine(setup)


def test_the_native_engine_refuses_them_and_names_vllm(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    setup = setup_of(tmp_path, recipe_of(tmp_path, {}))
    with pytest.raises(RecipeError, match=r"rollout.engine: native: layers with an indexer.*models.policy.*: choose"):
        make_rollout_engine("native", replace(setup, model=write("deepseek_v32", tmp_path / "model")))
