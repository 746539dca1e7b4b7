"""Adapters on weights of 4 bits: what they compute and learn, on any number of ranks."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import RankError, RankPool
from tests.distributed.test_lora import train
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_training import Numbers, largest_difference
from tests.peak import measured
from tests.tiny import CHARACTERS, tiny_model
from transformers import AutoModelForCausalLM

from leaderless.base.devices import trim_host_memory
from leaderless.config.models import LoraConfig, ModelConfig, Whole
from leaderless.distributed.transport import Transport
from leaderless.models.loading.tiny import write_tiny_model
from leaderless.models.lora.nf4 import check_library, packed, packed_weights, unpacked
from leaderless.planner import Layout
from leaderless.training.fsdp import FsdpEngine, make_engine

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes, of the extra nf4, is missing")

BLOCK = 32
PLAIN = LoraConfig(rank=3, alpha=6)
PACKED: dict[str, object] = {"lora": PLAIN.model_copy(update={"base_dtype": "nf4", "base_block": BLOCK})}
SOME: dict[str, object] = {
    "lora": LoraConfig(rank=3, alpha=6, targets=["q_proj", "up_proj"], base_dtype="nf4", base_block=BLOCK)
}
HALF: dict[str, object] = {"compute_dtype": "bfloat16"}


def model() -> str:
    return tiny_model("qwen3", head_dim=16)


def rounded_model(folder: Path) -> str:
    """A folder with the model whose linear layers have the numbers that are left of 4 bits."""
    check_library("models.policy")
    shutil.copytree(model(), folder, dirs_exist_ok=True)
    whole = AutoModelForCausalLM.from_pretrained(model(), dtype=torch.float32)
    with torch.no_grad():
        for name, one in whole.model.layers.named_parameters():
            if one.ndim == 2:
                rounded = unpacked(packed(one, BLOCK), BLOCK, torch.float32)
                assert (rounded - one).abs().max() > 1e-4, name
                one.copy_(rounded)
    whole.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> Callable[[bool], Numbers]:
    """What one rank learns, with adapters on all layers or on some."""

    @cache
    def learn(has_all: bool) -> Numbers:
        (numbers,) = ranks.run(1, train, model(), {"dp": 1}, PACKED if has_all else SOME)
        return numbers

    return learn


def test_a_rank_learns_what_it_does_over_the_rounded_weights(
    ranks: RankPool, alone: Callable[[bool], Numbers], tmp_path: Path
) -> None:
    """Scores, gradients, adapters, weights with these merged in, and scores without adapters."""
    rounded = rounded_model(tmp_path)
    for has_all, lora in ((True, PLAIN), (False, PLAIN.model_copy(update={"targets": ["q_proj", "up_proj"]}))):
        (expected,) = ranks.run(1, train, rounded, {"dp": 1}, {"lora": lora})
        found = alone(has_all)
        assert found.keys() == expected.keys()
        assert largest_difference([found], expected) < 1e-5
    (other,) = ranks.run(1, train, model(), {"dp": 1}, {"lora": PLAIN})
    assert largest_difference([alone(True)], other) > 1e-3, "rounding changes numbers"


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ({"dp": 2}, {"gradient_checkpointing": True}),
        pytest.param({"dp": 4}, {}, marks=pytest.mark.thorough),
        pytest.param({"dp": 1, "cp": 2}, {}, marks=pytest.mark.thorough),
        ({"dp": 1, "tp": 2}, SOME),
        ({"dp": 2, "tp": 2}, {}),
        pytest.param({"dp": 1, "pp": 2}, {}, marks=pytest.mark.thorough),  # also with tp
        ({"dp": 1, "pp": 2, "tp": 2}, {"gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_ranks_learn_what_one_does(
    ranks: RankPool, alone: Callable[[bool], Numbers], sizes: dict[str, int], changes: dict[str, object]
) -> None:
    found = ranks.run(math.prod(sizes.values()), train, model(), sizes, PACKED | changes)
    assert largest_difference(found, alone(changes != SOME)) < 1e-5


@pytest.mark.parametrize("keeps", ["nothing", pytest.param("all", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_in_half_precision_learn_what_they_do_over_rounded_weights(
    ranks: RankPool, tmp_path: Path, keeps: Whole, num_ranks: int
) -> None:
    found, expected = (
        ranks.run(num_ranks, train, path, {"dp": num_ranks}, changes | HALF, 2, keeps)
        for path, changes in ((model(), PACKED), (rounded_model(tmp_path), {"lora": PLAIN}))
    )
    for numbers, others in zip(found, expected, strict=True):
        assert largest_difference([numbers], others) < 1e-6, "bit for bit but for sums"


def check_bytes(path: str) -> None:
    transport = Transport(torch.device("cpu"), timeout_s=60)
    layout = Layout(transport.world.ranks, dp=2)
    config = ModelConfig(path=path, **PACKED)  # type: ignore[arg-type]
    engine = make_engine(replace(setup_of(transport, layout, path), model=config))
    assert isinstance(engine, FsdpEngine)
    names = packed_weights(engine.model.model)
    assert len(names) == 14, "seven of each layer"
    for name in names:
        weight = engine.model.model.get_parameter(name)
        assert weight.dtype is torch.uint8
        whole = weight.shape[0] * weight.shape[1]
        assert weight.to_local().numel() == whole // 2, "ranks divide packed weights"  # type: ignore[attr-defined]
        inputs = engine.model.model.get_submodule(name.rpartition(".")[0]).in_features
        assert whole == weight.shape[0] * inputs * (4 / 8 + 4 / BLOCK)
    held = {weight.name for weight in engine.local_weights()}
    assert not held & {*names}, "only adapters are saved and sent"


def test_ranks_hold_their_parts_in_4_bits(ranks: RankPool) -> None:
    ranks.run(2, check_bytes, model())


def test_blocks_that_ranks_along_tp_would_cut_are_refused(ranks: RankPool) -> None:
    reason = r"lora\.base_block: 32 does not divide the 16 inputs of .*o_proj that each rank along tp=2 has: .*tp"
    with pytest.raises(RankError, match=reason):
        ranks.run(2, train, tiny_model("qwen3"), {"dp": 1, "tp": 2}, PACKED)


def bytes_of_loading(small: str, large: str) -> tuple[int, int]:
    """Additional memory at the peak of making an engine, and of the engine itself."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    layout = Layout(transport.world.ranks, dp=1)
    setup = replace(setup_of(transport, layout, small), optimizer=None)
    make_engine(replace(setup, model=ModelConfig(path=small, **PACKED)))  # type: ignore[arg-type]
    trim_host_memory()
    with measured() as peak:
        engine = make_engine(replace(setup, model=ModelConfig(path=large, **PACKED)))  # type: ignore[arg-type]
        assert isinstance(engine, FsdpEngine)
        trim_host_memory()
    return peak.on_top, peak.after - peak.before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process's peak from now on")
def test_a_model_is_read_weight_by_weight(ranks: RankPool, tmp_path: Path) -> None:
    large = write_tiny_model(tmp_path, CHARACTERS, family="qwen3", hidden_size=512, num_layers=24, num_heads=8)
    in_float32 = sum(one.stat().st_size for one in large.glob("*.safetensors"))
    [(on_top, held)] = ranks.run(1, bytes_of_loading, model(), str(large))
    print(f"{in_float32:,} bytes in the file, {on_top:,} at the peak, {held:,} afterwards")
    assert held < in_float32 / 4
    assert on_top < in_float32 / 2
