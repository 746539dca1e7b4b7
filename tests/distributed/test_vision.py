"""Models that see images: ranks that divide weights and samples compute what one does, also without any image."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from tests.distributed.continued import check_continued
from tests.distributed.ranks import RankPool
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_training import Numbers, largest_difference
from tests.pictures import Family, samples_with, vision_critic, vision_model
from tests.tiny import add_gradients, at_temperature, scatter_vectors
from tests.unit.recipes import plan_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.data.batch import Batch
from leaderless.distributed.transport import Transport
from leaderless.models.causal_lm import TokenOutputs
from leaderless.planner import Layout
from leaderless.training.fsdp import FsdpValueEngine, make_engine
from leaderless.training.micro_batches import MicroBatch

SHARES = {1: [18], 2: [15, 3], 4: [3, 0, 9, 6]}
"""Samples of each rank, three of a prompt: one rank has none, and one has a prompt without images."""


def train(model: str, samples: Batch, layout: dict[str, int], changes: dict[str, object]) -> Numbers:
    """Scores, the gradient's norm and weights of two updates."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    setup = setup_of(transport, Layout(transport.world.ranks, **layout), model)
    shard, is_critic = setup.layout.shard_of(transport.rank), model.endswith("_critic")
    setup = replace(setup, model=ModelConfig(path=model, **changes), micro_batch_tokens=80, is_critic=is_critic)  # type: ignore[arg-type]
    engine = make_engine(setup)
    shares, numbers = SHARES[setup.layout.dp], Numbers()
    first = sum(shares[:shard])
    batch = samples.select(torch.arange(first, first + shares[shard]))
    batch = at_temperature(batch, 0.7)
    for update in range(2):
        scores = engine.values(batch) if isinstance(engine, FsdpValueEngine) else engine.log_probs(batch)
        for row, values in zip(batch.ids.tolist(), scores.rows(), strict=True):
            numbers[f"scores.{update}.{row}"] = values
        add_gradients(engine, batch, value_loss if is_critic else loss_of)
        numbers[f"norm.{update}"] = torch.tensor(engine.optimizer_step().grad_norm)
    return numbers | {f"weights.{name}": value.clone() for name, value in engine.full_weights()}


def loss_of(outputs: TokenOutputs, micro_batch: MicroBatch) -> Tensor:
    gain = (micro_batch.targets % 7 - 3) * 0.1
    return (gain[: len(outputs.log_probs)] * (outputs.log_probs + 0.3 * outputs.entropies)).sum()


def value_loss(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    return ((values[: len(micro_batch.targets)] - micro_batch.targets % 7) ** 2).sum()


_ALONE: dict[str, Numbers] = {}


def alone(ranks: RankPool, changes: dict[str, object]) -> Numbers:
    """Numbers of one rank, which are computed once for all layouts."""
    if str(changes) not in _ALONE:
        (_ALONE[str(changes)],) = ranks.run(1, train, vision_model(), samples_with(), {"dp": 1}, changes)
    return _ALONE[str(changes)]


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (4, {}),
        (2, {"freeze_vision": True}),
        pytest.param(2, {}, marks=pytest.mark.thorough),
        pytest.param(4, {"freeze_vision": True}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_ranks_learn_like_one(ranks: RankPool, size: int, changes: dict[str, object]) -> None:
    found = ranks.run(size, train, vision_model(), samples_with(), {"dp": size}, changes)
    assert largest_difference(found, alone(ranks, changes)) < 1e-5


@pytest.mark.parametrize(
    "sizes",
    [pytest.param({"dp": 1, "cp": 2}, marks=pytest.mark.thorough), {"dp": 1, "cp": 3}, {"dp": 2, "cp": 2}],
    ids=str,
)
def test_ranks_that_divide_the_tokens_of_images_learn_like_one(ranks: RankPool, sizes: dict[str, int]) -> None:
    found = ranks.run(prod(sizes.values()), train, vision_model(), samples_with(), sizes, {})
    assert largest_difference(found, alone(ranks, {})) < 1e-5


def with_even_words(folder: Path, family: Family) -> str:
    """A model whose words two ranks can divide."""
    shutil.copytree(vision_model(family), folder / family)
    model = AutoModelForImageTextToText.from_pretrained(folder / family)
    count = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(count + count % 2)
    model.save_pretrained(folder / family)
    return str(folder / family)


@pytest.mark.parametrize(
    ("family", "sizes", "changes"),
    [
        pytest.param("qwen3_vl", {"dp": 1, "tp": 2}, {}, marks=pytest.mark.thorough),
        ("qwen3_vl", {"dp": 2, "tp": 2}, {"gradient_checkpointing": True}),  # one rank has a prompt without images
        ("qwen3_vl", {"dp": 1, "cp": 2, "tp": 2}, {"freeze_vision": True}),
        # The layers that see have the names of those for text.
        pytest.param("qwen2_5_vl", {"dp": 1, "tp": 2}, {}, marks=pytest.mark.thorough),
        ("qwen2_5_vl", {"dp": 1, "tp": 2}, {"lora": {"rank": 4}}),
        ("qwen3_vl", {"dp": 1, "tp": 2}, {"lora": {"rank": 4, "targets": ["attn.qkv"]}}),  # all on each rank
        ("llava", {"dp": 1, "tp": 2}, {}),
    ],
    ids=str,
)
def test_ranks_that_divide_the_layers_for_text_learn_like_one(
    ranks: RankPool, tmp_path: Path, family: Family, sizes: dict[str, int], changes: dict[str, object]
) -> None:
    model, samples = with_even_words(tmp_path, family), samples_with(family)
    (expected,) = ranks.once(1, train, model, samples, {"dp": 1}, changes)
    assert largest_difference(ranks.run(prod(sizes.values()), train, model, samples, sizes, changes), expected) < 1e-5


@pytest.mark.parametrize(
    "sizes",
    [{"dp": 2, "ep": 2}, pytest.param({"dp": 4, "ep": 4}, marks=pytest.mark.thorough), {"dp": 1, "cp": 2, "ep": 2}],
    ids=str,
)
def test_ranks_that_send_tokens_of_images_to_experts_learn_like_one(ranks: RankPool, sizes: dict[str, int]) -> None:
    model, samples = vision_model("qwen3_vl_moe"), samples_with("qwen3_vl_moe")
    (expected,) = ranks.once(1, train, model, samples, {"dp": 1}, {})
    found = ranks.run(sizes["dp"] * sizes.get("cp", 1), train, model, samples, sizes, {})
    assert largest_difference(found, expected) < 1e-5


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_vl", {"dp": 1, "tp": 2}),
        # tests/distributed/test_experts.py continues with another ep.
        pytest.param("qwen3_vl_moe", {"dp": 2, "ep": 2}, marks=pytest.mark.thorough),
        ("qwen3_vl", {"dp": 1, "pp": 2}),
    ],
    ids=str,
)
def test_a_run_with_images_continues_with_another_layout(
    ranks: RankPool, tmp_path: Path, family: Family, sizes: dict[str, int]
) -> None:
    model = with_own_head(tmp_path, family) if "pp" in sizes else with_even_words(tmp_path, family)
    check_continued(ranks, tmp_path, model, samples_with(family), loss_of, [(sizes, [{"dp": 2}, sizes])])


@pytest.mark.parametrize(
    ("family", "sizes", "changes"),
    [
        # One rank has no sample, one a prompt without images, as above, where policies learn.
        pytest.param("qwen3_vl", {"dp": 4}, {"freeze_vision": True}, marks=pytest.mark.thorough),
        ("qwen3_vl", {"dp": 2, "tp": 2}, {"lora": {"rank": 4}}),
        ("qwen3_vl", {"dp": 1, "cp": 2, "pp": 2}, {}),
        pytest.param("qwen3_vl_moe", {"dp": 2, "ep": 2}, {"gradient_checkpointing": True}, marks=pytest.mark.thorough),
        ("paligemma", {"dp": 2}, {}),
        pytest.param("llava", {"dp": 2, "pp": 2}, {}, marks=pytest.mark.thorough),
        pytest.param("qwen2_5_vl", {"dp": 1, "cp": 2, "tp": 2}, {}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_critics_learn_of_images_like_one_rank(
    ranks: RankPool, family: Family, sizes: dict[str, int], changes: dict[str, object]
) -> None:
    model, samples = vision_critic(family), samples_with(family)
    (expected,) = ranks.once(1, train, model, samples, {"dp": 1}, changes)
    size = prod(count for axis, count in sizes.items() if axis != "ep")
    assert largest_difference(ranks.run(size, train, model, samples, sizes, changes), expected) < 1e-5


def with_own_head(folder: Path, family: Family, num_layers: int = 3, num_added: int = 1) -> str:
    """A model whose head is not its embedding."""
    shutil.copytree(vision_model(family), folder / family)
    config = AutoConfig.from_pretrained(folder / family)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    config.text_config.num_hidden_layers = num_layers
    if family == "qwen3_vl":
        config.vision_config.depth, config.vision_config.deepstack_visual_indexes = 3, [*range(num_added)]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder / family)
    scatter_vectors(folder / family, AutoModelForImageTextToText)
    return str(folder / family)


@pytest.mark.parametrize(
    ("family", "sizes", "changes"),
    [
        pytest.param("qwen3_vl", {"dp": 1, "pp": 2}, {}, marks=pytest.mark.thorough),
        ("qwen3_vl", {"dp": 2, "pp": 2}, {"gradient_checkpointing": True}),  # one shard has no images in some passes
        ("qwen3_vl", {"dp": 1, "pp": 2, "tp": 2}, {"freeze_vision": True}),
        pytest.param("qwen3_vl", {"dp": 1, "cp": 2, "pp": 2}, {}, marks=pytest.mark.thorough),
        ("llava", {"dp": 1, "pp": 3}, {}),
    ],
    ids=str,
)
def test_stages_learn_of_images_like_one_rank(
    ranks: RankPool, tmp_path: Path, family: Family, sizes: dict[str, int], changes: dict[str, object]
) -> None:
    model, samples = with_own_head(tmp_path, family, num_added=2), samples_with(family)
    (expected,) = ranks.once(1, train, model, samples, {"dp": 1}, changes)
    assert largest_difference(ranks.run(prod(sizes.values()), train, model, samples, sizes, changes), expected) < 1e-5


def test_a_head_that_is_the_embedding_is_divided_with_images(ranks: RankPool) -> None:
    model, samples = vision_model(), samples_with("qwen3_vl")
    (expected,) = ranks.once(1, train, model, samples, {"dp": 1}, {})
    assert largest_difference(ranks.run(2, train, model, samples, {"dp": 1, "pp": 2}, {}), expected) < 1e-5


def test_what_is_seen_is_added_on_the_first_stage(ranks: RankPool, tmp_path: Path) -> None:
    model = with_own_head(tmp_path, "qwen3_vl", num_added=3)
    problem = "pp=2: what the model sees is added behind its first 3 layers, .* but it has 2: pp can be at most 1"
    (found, _) = ranks.run(2, refusal, model, "pp")
    assert re.search(problem, found)
    data = {"train": {"path": "a", "images": "images"}, "max_prompt_tokens": 64}
    with pytest.raises(RecipeError, match=f"layout.policy.pp: {problem}"):
        plan_of("grpo", 2, models={"policy": model}, data=data, layout={"policy": {"pp": 2}})


def refusal(model: str, axis: str) -> str:
    transport = Transport(torch.device("cpu"), timeout_s=60)
    with pytest.raises(RecipeError) as caught:
        make_engine(setup_of(transport, Layout(transport.world.ranks, 1, **{axis: 2}), model))
    return str(caught.value)


def test_models_that_cannot_be_divided_are_refused(ranks: RankPool) -> None:
    (problem, _) = ranks.run(2, refusal, vision_model("paligemma"), "cp")
    assert "a model that reads prompts in both directions cannot be divided along cp: use dp" in problem
