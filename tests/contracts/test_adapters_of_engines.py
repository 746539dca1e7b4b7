"""Engines that add adapters of low rank to weights that they read themselves; `sglang` talks to a fake server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import cast
from unittest.mock import patch

import pytest
import torch
from tests.engines import ALONE, MAX_TOKENS, fake_sglang_python, sampled_together
from tests.tiny import tiny_model

from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.config.rollout import ExternalConfig, RolloutConfig, SamplingConfig
from leaderless.distributed.weights.blocks import Pool, everything
from leaderless.distributed.weights.stream import WeightStream
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.models.lora.linear import adapted_layers
from leaderless.planner import Layout
from leaderless.planner.engines import engine_for
from leaderless.rollout.engine import Completion, Request, RolloutEngine, SamplingParams, generate, make_probe
from leaderless.rollout.external.engine import ExternalEngine
from leaderless.rollout.external.lora_slots import Host, LoraSlot
from leaderless.rollout.external.sglang_engine import SglangServer
from leaderless.rollout.external.vllm_process.adapters import AdapterFolder
from leaderless.rollout.make_engine import RolloutSetup, make_engine
from leaderless.rollout.weight_sources import Colocated, probe_of
from leaderless.training.fsdp import FsdpEngine

VLLM_PYTHON = os.environ.get("LEADERLESS_VLLM_PYTHON")
"""Python of an environment with vLLM."""
LAYOUT = Layout((0,), 1)
REQUESTS = [Request([5, 6, 7], [1, 2]), Request([9, 8, 7, 6], [3])]
PARAMS = SamplingParams(SamplingConfig(), 6)


def config_of(rank: int = 3, targets: object = "all-linear") -> ModelConfig:
    lora = LoraConfig(rank=rank, alpha=7.0, targets=targets)  # type: ignore[arg-type]
    return ModelConfig(path=tiny_model(head_dim=32), lora=lora)


CONFIGS = {"planner": config_of, "solver": lambda: config_of(2, ["q_proj", "up_proj"])}
"""Two roles whose adapters differ in rank and in layers."""


def trainer_of(config: ModelConfig) -> FsdpEngine:
    return FsdpEngine(load_causal_lm(config, "policy"), config, ALONE, torch.device("cpu"), 512)


def train(trainer: FsdpEngine) -> None:
    """Change the adapters, as an update does."""
    for number, (_, layer) in enumerate(adapted_layers(trainer.model)):
        generator = torch.Generator().manual_seed(100 * trainer.policy_version + number + 7 * layer.lora_A.shape[0])
        torch.nn.init.normal_(layer.lora_B, std=0.3, generator=generator)
    trainer.policy_version += 1


def setup_of(
    config: ModelConfig,
    python: str | None,
    folder: Path,
    *,
    merges: bool = False,
    role: str = "policy",
    host: Host | None = None,
) -> RolloutSetup:
    return RolloutSetup(
        role=role,
        host=host,
        rollout=RolloutConfig(max_sequences=4, external=ExternalConfig(python=python, merge_adapters=merges)),
        model=config,
        max_tokens=MAX_TOKENS,
        tokenizer=load_tokenizer(config, "policy"),
        layout=LAYOUT,
        shard=ALONE,
        world_size=1,
        device=torch.device("cpu"),
        logs=folder,
        report=print,
    )


Served = Mapping[str, tuple[Colocated, FsdpEngine]]


@pytest.fixture(
    params=["sglang", pytest.param("sglang of one role", marks=pytest.mark.thorough), "vllm", "vllm-in-process"]
)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    """An engine that is made for a recipe with adapters of two roles, each next to their trainer."""
    name, folder = request.param, tmp_path
    if name == "vllm" and VLLM_PYTHON is None:
        pytest.skip("`make test-vllm` runs this with vLLM")
    if name == "vllm-in-process" and find_spec("vllm") is None:
        pytest.skip("`make test-vllm` runs this with vLLM")
    is_alone, name = "one role" in name, name.partition(" ")[0]
    python = {"sglang": fake_sglang_python(folder), "vllm": VLLM_PYTHON}.get(name)
    configs = {role: make() for role, make in CONFIGS.items() if not is_alone or role == "planner"}
    host, made = None if is_alone else Host(configs), dict[str, tuple[Colocated, FsdpEngine]]()
    for role, config in configs.items():
        trainer = trainer_of(config)
        trainer.policy_version = 10 * len(made)  # each role has its own
        engine = make_engine(name.partition("-")[0], setup_of(config, python, folder, role=role, host=host))
        pool, probe = Pool(LAYOUT, everything), make_probe(trainer.vocab_size, 64)
        made[role] = Colocated(engine, trainer, pool, torch.float32, probe=probe, may_restart=True), trainer
    yield made
    for serving, _ in made.values():
        serving.close()


@pytest.mark.timeout(900)
def test_each_version_is_sampled_with_its_adapters(served: Served) -> None:
    check_samples(served)
    check_faults(served)


def test_adapters_may_be_merged_for_an_engine(tmp_path: Path) -> None:
    settings = []
    for merges in (False, True):
        setup = setup_of(config_of(), fake_sglang_python(tmp_path), tmp_path, merges=merges)
        assert engine_for(setup.rollout, "sglang").takes_adapters != merges
        assert engine_for(setup.rollout, "native").takes_adapters
        settings.append(driver_of(make_engine("sglang", setup))._settings)
    said = settings[0].adapters["policy"]
    assert (said["r"], said["lora_alpha"]) == (3, 7.0)
    assert "model.layers.0.mlp.up_proj.lora_A" in settings[0].matrices["policy"]
    assert replace(settings[0], adapters={}, matrices={}) == settings[1]


def driver_of(engine: RolloutEngine) -> SglangServer:
    """The server of an engine, which may be shared."""
    driver = cast("ExternalEngine", engine)._driver
    return cast("SglangServer", driver._host.driver if isinstance(driver, LoraSlot) else driver)


def check_samples(served: Served) -> None:
    """Each role samples with its trainer's adapters, of which the engine is sent each version once."""
    seen = []
    for num_phases in (1, 2, 1):
        for _ in range(num_phases):
            results = sampled_together({role: one for role, (one, _) in served.items()}, REQUESTS, PARAMS)
            for role, (_, trainer) in served.items():
                check(trainer, results[role])
            seen.append([[one.tokens for group in groups for one in group] for groups in results.values()])
        for _, trainer in served.values():
            train(trainer)
    assert seen[0] != seen[1] == seen[2] != seen[3]
    assert all(seen[-1].count(tokens) == 1 for tokens in seen[-1]), "each role has its own adapters"


def check(trainer: FsdpEngine, results: list[list[Completion]]) -> None:
    """Compare responses with what a trainer makes of them."""
    for request, group in zip(REQUESTS, results, strict=True):
        for completion in group:
            assert set(completion.policy_versions) == {trainer.policy_version}
            text = [*request.prompt, *completion.tokens]
            known = probe_of(trainer, text)
            assert known is not None
            expected = known.log_probs[len(request.prompt) - 1 :]
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=0)


def check_faults(served: Served) -> None:
    """Adapters that stay as they were, and a matrix that is lost on its way, are errors; other roles continue."""
    serving, trainer = served["planner"]
    engine, load = cast("ExternalEngine", serving.engine), cast("ExternalEngine", serving.engine)._driver.load
    lost = "model.layers.1.mlp.up_proj.lora_B"
    for fault, message in (
        ("stale", "does not use the weights of policy version 3 that were loaded"),
        ("lost", f"1 matrices of adapters have not been sent, such as {lost}"),
    ):

        def load_other(weights: WeightStream, fault: str = fault) -> None:
            arrived = {name: value.clone() for name, value in weights}
            arrived = {name: value for name, value in arrived.items() if fault == "stale" or name != lost}
            for name, value in arrived.items():
                value.mul_(0.0 if name == lost else 1.0)
            load(WeightStream(iter(arrived.items()), weights.policy_version))

        wrong = pytest.raises(RuntimeError, match=message)
        with patch.object(engine._driver, "load", load_other), wrong, serving.phase():
            pass
    for one, trainer in list(served.values())[1:]:
        with one.phase() as other:
            check(trainer, generate(other, REQUESTS, PARAMS))


def test_a_folder_for_an_engine_is_refused_if_matrices_are_missing_or_unknown() -> None:
    folder = AdapterFolder({"r": 1}, ["q_proj.lora_A", "q_proj.lora_B"])
    folder.add("q_proj.lora_A", torch.ones(1, 2))
    with (
        pytest.raises(RuntimeError, match=r"1 matrices of adapters have not been sent, such as q_proj.lora_B"),
        folder.written(),
    ):
        pass
    for name in ("q_proj.lora_A", "q_proj.lora_B", "k_proj.lora_A"):
        folder.add(name, torch.ones(1, 2))
    with (
        pytest.raises(RuntimeError, match=r"1 matrices .* which the model does not have, such as k_proj.lora_A"),
        folder.written(),
    ):
        pass
