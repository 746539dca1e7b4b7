"""Every optimizer changes weights alike on any ranks, and continues from a checkpoint on any others."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from math import prod
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_experts import experts_model, loss_of
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_training import LENGTHS, Numbers, largest_difference
from tests.tiny import add_gradients, random_samples, tiny_model
from transformers import AutoModelForCausalLM, Qwen3Config

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.config.run import CheckpointConfig
from leaderless.distributed.transport import Transport
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.planner import Layout
from leaderless.planner.memory.model_size import read_model_size
from leaderless.planner.memory.optimizer_states import kept_by
from leaderless.training.fsdp import FsdpEngine, make_engine
from leaderless.worker.checkpoint.reader import RunState, load_checkpoint
from leaderless.worker.checkpoint.writer import CheckpointWriter, Content

Sizes = dict[str, int]
RATE = 1e-3
MUON = OptimizerConfig(type="muon", learning_rate=RATE, weight_decay=0.1)
ROUNDED = OptimizerConfig(learning_rate=RATE, weight_decay=0.1, state_dtype="bfloat16")
SGD = OptimizerConfig(type="sgd", learning_rate=0.1, weight_decay=0.1)
QUANTIZED = OptimizerConfig(type="adamw_8bit", learning_rate=RATE, weight_decay=0.1)
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao, of the extra adamw-8bit, is missing")


def wide_model(folder: Path) -> str:
    """A model whose rows are whole blocks, also where two ranks along `tp` divide them, but for one projection."""
    shutil.copytree(tiny_model("qwen3"), folder / "wide")
    config = Qwen3Config(
        vocab_size=83,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "wide")
    return str(folder / "wide")


def made(transport: Transport, model: str, sizes: Sizes, optimizer: OptimizerConfig) -> FsdpEngine:
    setup = setup_of(transport, Layout(transport.world.ranks, **sizes), model)
    engine = make_engine(replace(setup, optimizer=optimizer))
    assert isinstance(engine, FsdpEngine)
    return engine


def learn(folder: str, model: str, sizes: Sizes, optimizer: OptimizerConfig, way: str) -> Numbers:
    """Weights after two updates of a run that begins and is saved, or one that continues from it."""
    transport = Transport(torch.device("cpu"), timeout_s=300)
    engine = made(transport, model, sizes, optimizer)
    if way == "continue":
        load_checkpoint(Path(folder) / "step-000001", {"policy": engine})
    samples, layout = random_samples(LENGTHS, siblings=3), Layout(transport.world.ranks, **sizes)
    mine = torch.arange(len(samples)) % layout.dp == layout.shard_of(transport.rank)
    for _ in range(2):
        add_gradients(engine, samples.select(mine), loss_of)
        engine.optimizer_step()
    if way == "begin":
        tokenizer = load_tokenizer(setup_of(transport, layout, model).model, "policy")
        engines, files = {"policy": engine}, {"recipe.yaml": ""}
        writer = CheckpointWriter(Path(folder), engines, transport.world, tokenizer, CheckpointConfig(), 30.0, files)
        writer.begin(Content(RunState(1, 0, 0.0)))
        writer.finish()
    return {name: value.clone() for name, value in engine.full_weights()}


CASES = [
    pytest.param("qwen2", MUON, {"dp": 2}, [{"dp": 1, "tp": 2}], 1e-5, id="muon"),
    pytest.param("qwen3", MUON, {"dp": 1, "pp": 2}, [{"dp": 2, "tp": 2}], 1e-5, id="muon-stages"),
    pytest.param("qwen3_moe", MUON, {"dp": 4, "ep": 2}, [{"dp": 2, "ep": 2}, {"dp": 1}], 1e-5, id="muon-experts"),
    pytest.param("qwen3_moe", MUON, {"dp": 2}, [{"dp": 1, "tp": 2, "ep": 2}], 1e-5, id="muon-shards"),
    pytest.param(
        "qwen2", MUON.model_copy(update={"state_dtype": "bfloat16"}), {"dp": 2}, [{"dp": 4}], 1e-4, id="muon-bfloat16"
    ),
    pytest.param("qwen2", ROUNDED, {"dp": 2}, [{"dp": 1, "tp": 2}], 1e-4, id="adamw-bfloat16"),
    pytest.param("qwen3", ROUNDED, {"dp": 1, "pp": 2}, [{"dp": 1}], 1e-4, id="adamw-bfloat16-stages"),
    pytest.param("qwen3_moe", SGD, {"dp": 4, "ep": 2}, [{"dp": 1}], 1e-5, id="sgd"),
    pytest.param("wide", QUANTIZED, {"dp": 2}, [{"dp": 4}, {"dp": 1}], 1e-4, marks=needs_torchao, id="adamw-8bit"),
    pytest.param("wide", QUANTIZED, {"dp": 2, "pp": 2}, [{"dp": 1}], 1e-4, marks=needs_torchao, id="adamw-8bit-stages"),
]
"""Models, optimizers, layouts of runs that begin and that continue, and by how much weights may differ.

The first gradients differ in their last digits, as ranks add them up in another order. What is kept in fewer bits may
then be rounded the other way.
"""


def model_of(folder: Path, name: str) -> str:
    if name == "wide":
        return wide_model(folder)
    return experts_model(folder, name) if name.endswith("_moe") else tiny_model(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "optimizer", "begins", "others", "most"), CASES)
def test_ranks_that_divide_weights_change_them_as_one_does_and_continue_as_others(
    ranks: RankPool,
    tmp_path: Path,
    name: str,
    optimizer: OptimizerConfig,
    begins: Sizes,
    others: Sequence[Sizes],
    most: float,
) -> None:
    model = model_of(tmp_path, name)

    def learned(folder: str, sizes: Sizes, way: str) -> list[Numbers]:
        num_ranks = prod(size for axis, size in sizes.items() if axis != "ep")
        return ranks.run(num_ranks, learn, str(tmp_path / folder), model, sizes, optimizer, way, deadline_s=600)

    (first,), (second,) = learned("alone", {"dp": 1}, "begin"), learned("alone", {"dp": 1}, "continue")
    assert largest_difference([second], first) > 1e-3
    difference = largest_difference(learned("divided", begins, "begin"), first)
    print(f"{name} {optimizer.type} on {begins}: {difference:.1e}")
    assert difference < most
    for sizes in others:
        difference = largest_difference(learned("divided", sizes, "continue"), second)
        print(f"{name} {optimizer.type} on {sizes}: {difference:.1e}")
        assert difference < most


def load_with(folder: str, model: str, optimizer: OptimizerConfig) -> str:
    engine = made(Transport(torch.device("cpu"), timeout_s=60), model, {"dp": 2}, optimizer)
    try:
        load_checkpoint(Path(folder) / "step-000001", {"policy": engine})
    except RecipeError as error:
        return str(error)
    return ""


def test_a_run_does_not_continue_with_what_another_optimizer_has_kept(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, learn, str(tmp_path), tiny_model(), {"dp": 2}, MUON, "begin")
    for message in ranks.run(2, load_with, str(tmp_path), tiny_model(), ROUNDED):
        assert "optimizer.type" in message
        assert "keeps exp_avg, exp_avg_sq, but" in message
        assert "are exp_avg, exp_avg_sq, momentum" in message
    rounded = MUON.model_copy(update={"state_dtype": "bfloat16"})
    assert ranks.run(2, load_with, str(tmp_path), tiny_model(), rounded) == ["", ""]


def bytes_kept(model: str, optimizer: OptimizerConfig) -> int:
    """Bytes of the states of an engine on one rank."""
    engine = made(Transport(torch.device("cpu"), timeout_s=60), model, {"dp": 1}, optimizer)
    states = (value for name, value in engine.state().items() if name.startswith("optimizer."))
    return sum(value.numel() * value.itemsize for value in states)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "wide"])
@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerConfig(),
        ROUNDED,
        MUON,
        MUON.model_copy(update={"state_dtype": "bfloat16"}),
        SGD,
        SGD.model_copy(update={"momentum": 0.0}),
        pytest.param(QUANTIZED, marks=needs_torchao),
    ],
    ids=lambda one: f"{one.type}-{one.state_dtype}-{one.momentum}",
)
def test_a_plan_counts_what_optimizers_keep(
    ranks: RankPool, tmp_path: Path, name: str, optimizer: OptimizerConfig
) -> None:
    model = model_of(tmp_path, name)
    (held,) = ranks.run(1, bytes_kept, model, optimizer)
    size = read_model_size(ModelConfig(path=model))
    assert size is not None
    counted = sum(one.bytes_on(1) for one in kept_by(optimizer, size, size))
    assert counted == pytest.approx(held, rel=0.01)
