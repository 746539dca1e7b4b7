"""What is refused of the back end `megatron` before it starts."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from tests.tiny import tiny_model
from tests.unit.recipes import make_recipe, plan_of, write_model
from transformers import GraniteConfig, NanoChatConfig, PretrainedConfig

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.buckets import PackedWeight, checksum
from leaderless.planner import Layout
from leaderless.training.engine import ApartSetup, EngineSetup
from leaderless.training.megatron import model, processes
from leaderless.training.megatron.engine import make_engine
from leaderless.training.megatron.server import MegatronCalls
from leaderless.worker.build.instances import apart_setup

PYTHON = {"python": "/opt/megatron/bin/python"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"backend": "megatron"}}, "backend=megatron needs megatron.python: name the Python interpreter"),
        ({"layout": {"policy": {"cp": 2}}}, "divides the ranks of a model by dp and pp and tp only; leave out cp"),
        ({"algorithm": {"advantage": {"type": "gae"}}}, "cannot hold value models, as role 'critic' needs"),
        ({"models": {"policy": {"lora": {}}}}, "cannot train adapters, as role 'policy' needs"),
    ],
)
def test_what_megatron_cannot_do_is_refused_by_the_plan(
    tmp_path: Path, sections: dict[str, object], message: str
) -> None:
    folder = write_model(tmp_path / "model")
    models = {"policy": {"path": folder, **sections.get("models", {}).get("policy", {})}}  # type: ignore[attr-defined]
    workflow = "ppo" if "algorithm" in sections else "grpo"
    recipe = {"training": {"backend": "megatron", "megatron": PYTHON}, **sections, "models": models}
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_of(workflow, 2, **recipe)


def test_a_plan_may_divide_a_model_along_tp_and_pp(tmp_path: Path) -> None:
    sections = {"models": {"policy": write_model(tmp_path / "model")}, "layout": {"policy": {"tp": 2, "pp": 2}}}
    plan = plan_of("grpo", 4, **sections, training={"backend": "megatron", "megatron": PYTHON})
    assert "tp=2 pp=2" in {str(one.layout)[-9:] for one in plan.instances}


def test_memory_is_that_of_a_part_whatever_dp_is(tmp_path: Path) -> None:
    models = {"policy": write_model(tmp_path / "model")}
    training = {"backend": "megatron", "megatron": PYTHON}

    def optimizer_bytes(world_size: int, **sizes: int) -> float:
        memory = plan_of("grpo", world_size, models=models, training=training, layout={"policy": sizes}).memory
        assert memory is not None
        return memory.cpu.resident["policy optimizer"]

    whole = optimizer_bytes(1)
    assert optimizer_bytes(2) == whole
    assert whole / 2 <= optimizer_bytes(2, tp=2) < 0.6 * whole
    assert optimizer_bytes(4, tp=2) == optimizer_bytes(2, tp=2)
    assert optimizer_bytes(2, pp=2) < whole


def test_other_releases_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"megatron-core": "0.18.2", "megatron-bridge": "0.5.1"}
    monkeypatch.setattr(metadata, "version", found.__getitem__)
    model.check_versions()
    found["megatron-bridge"] = "0.50.1"
    with pytest.raises(RuntimeError, match=r"has megatron-bridge 0.50.1, and 0.5 is needed: install"):
        model.check_versions()


def test_a_rank_starts_megatron_as_the_recipe_says(tmp_path: Path) -> None:
    config = {"python": "/opt/megatron/bin/python", "start_timeout_s": 5.0, "answer_timeout_s": 6.0}
    recipe = make_recipe(training={"backend": "megatron", "megatron": config})
    assert apart_setup(recipe, tmp_path) == ApartSetup("/opt/megatron/bin/python", 5.0, 6.0, tmp_path)
    assert apart_setup(make_recipe(), tmp_path) is None


def setup_of(folder: Path, python: str, model: str) -> EngineSetup:
    return EngineSetup(
        role="policy",
        model=ModelConfig(path=model),
        is_critic=False,
        layout=Layout((0,), 1),
        process_group=ProcessGroup((0,), 0),
        axis_groups={},
        device=torch.device("cpu"),
        optimizer=None,
        num_updates=0,
        micro_batch_tokens=1,
        apart=ApartSetup(python, 1.0, 1.0, folder),
    )


def test_a_rank_refuses_what_cannot_start(tmp_path: Path) -> None:
    setup = setup_of(tmp_path, "/nowhere/python", tiny_model())
    with pytest.raises(RecipeError, match=re.escape("training.megatron.python: '/nowhere/python' is not a program")):
        make_engine(setup)


@pytest.mark.parametrize(
    "config",
    [GraniteConfig(logits_scaling=8.0), NanoChatConfig(final_logit_softcapping=15.0)],
    ids=["divided", "capped"],
)
def test_a_model_that_changes_its_logits_is_refused(tmp_path: Path, config: PretrainedConfig) -> None:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config.update({**small, "vocab_size": 64, "num_hidden_layers": 1})
    config.save_pretrained(tmp_path)
    message = f"models.policy: a model of type {config.model_type} scales or caps its logits, and cannot be in Megatron"
    with pytest.raises(RecipeError, match=re.escape(message)):
        make_engine(setup_of(tmp_path, sys.executable, str(tmp_path)))


def test_weights_are_written_in_files_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FILE_BYTES", 100)
    weights = {f"layers.{number}": torch.randn(10) for number in range(5)}
    processes._write(weights.items(), tmp_path)
    places = json.loads((tmp_path / processes.INDEX).read_text())["weight_map"]
    assert [len(load_file(path)) for path in sorted(tmp_path.glob("*.safetensors"))] == [3, 2]
    assert places.keys() == weights.keys()
    assert all(torch.equal(load_file(tmp_path / places[name])[name], weight) for name, weight in weights.items())


def test_weights_that_do_not_fit_into_a_bucket_come_in_the_next_one() -> None:
    weights = {"a": torch.randn(6), "b": torch.randn(2, 3), "c": torch.randn(2).bfloat16(), "d": torch.randn(7)}
    calls, data, found = (
        MegatronCalls(Mock(export=lambda _: iter(weights.items()))),
        torch.zeros(64, dtype=torch.uint8),
        [],
    )
    calls.answer("export", {"kind": "weights"})
    while (bucket := calls._bucket(data))["weights"]:
        assert bucket["checksum"] == checksum(data[: bucket["bytes"]])  # type: ignore[misc]
        packed = [PackedWeight(**one) for one in bucket["weights"]]  # type: ignore[attr-defined]
        found.append({one.name: one.view(data).clone() for one in packed})
    assert [[*one] for one in found] == [["a", "b"], ["c", "d"]]
    for one in found:
        for name, value in one.items():
            assert torch.equal(value, weights[name].float())
    calls.answer("export", {"kind": "weights"})
    with pytest.raises(ValueError, match="'a' of 32 bytes does not fit into a bucket of 16"):
        calls._bucket(data[:16])
