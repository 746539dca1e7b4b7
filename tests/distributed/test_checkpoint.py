"""A checkpoint holds all of a role, on any number of ranks, and is whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.tiny import random_samples, tiny_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.data.transport import Transport
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.tokenizer import load_tokenizer
from leaderless.observability.run_directory import list_checkpoints
from leaderless.training.fsdp import FsdpEngine
from leaderless.worker.checkpoint import CheckpointWriter, RunState, load_checkpoint, read_state

Whole = dict[str, Tensor]
LENGTHS = [(3, 5), (2, 7), (4, 1), (1, 3)]


def make_engine(model: str, transport: Transport, compute_dtype: str = "float32") -> FsdpEngine:
    config = ModelConfig(path=model, compute_dtype=compute_dtype)  # type: ignore[arg-type]
    return FsdpEngine(
        load_causal_lm(config, "policy"),
        config,
        transport.world,
        torch.device("cpu"),
        64,
        optimizer=OptimizerConfig(learning_rate=1e-2, epsilon=1e-3, warmup_steps=3, schedule="linear"),
        num_updates=9,
    )


def train(engine: FsdpEngine, num_updates: int) -> None:
    """Updates that depend on how many there were before."""
    world = engine.group
    place = world.ranks.index(world.rank)
    for _ in range(num_updates):
        rows = [row for row in range(len(LENGTHS)) if row % world.size == place]
        batch = random_samples(LENGTHS, seed=engine.policy_version).select(torch.tensor(rows))
        pieces = engine.micro_batches(batch)
        engine.forward_backward(pieces, lambda outputs, _: -outputs.log_probs.sum() / 16, 1.0)
        engine.optimizer_step()


def whole(engine: FsdpEngine) -> Whole:
    """Weights and moments, put together."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in engine.state().items()
    }


def writer_of(folder: str, engine: FsdpEngine, transport: Transport, model: str) -> CheckpointWriter:
    tokenizer = load_tokenizer(ModelConfig(path=model), "policy")
    return CheckpointWriter(Path(folder), {"policy": engine}, transport.world, tokenizer, keep=2)


def save_and_go_on(folder: str, model: str) -> tuple[Whole, Whole]:
    """What is saved after two updates, and what comes of two more."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    engine = make_engine(model, transport)
    train(engine, 2)
    saved = whole(engine)
    path = writer_of(folder, engine, transport, model).save({}, RunState(2, 12, 7.5))
    assert path == Path(folder) / "step-000002"
    train(engine, 2)
    return saved, whole(engine)


def load_and_go_on(folder: str, model: str) -> tuple[Whole, Whole, int]:
    transport = Transport(torch.device("cpu"), timeout_s=60)
    engine = make_engine(model, transport)
    state = load_checkpoint(Path(folder) / "step-000002", {"policy": engine})
    assert state == RunState(step=2, data_position=12, time_s=7.5)
    loaded = whole(engine)
    train(engine, 2)
    return loaded, whole(engine), engine.policy_version


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 4), (4, 2)])
def test_training_goes_on_as_if_nothing_had_happened_on_any_number_of_ranks(
    ranks: RankPool, tmp_path: Path, before: int, after: int
) -> None:
    saved, expected = ranks.run(before, save_and_go_on, str(tmp_path), tiny_model())[0]
    for loaded, result, version in ranks.run(after, load_and_go_on, str(tmp_path), tiny_model()):
        assert version == 4
        assert loaded.keys() == saved.keys()
        assert any(name.startswith("optimizer.exp_avg_sq.") and value.any() for name, value in loaded.items())
        assert all(torch.equal(loaded[name], value) for name, value in saved.items()), "exactly what was saved"
        for name, value in expected.items():
            if before == after:
                assert torch.equal(result[name], value), name
            else:
                torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-6, msg=name)


def save_several(folder: str, model: str) -> None:
    transport = Transport(torch.device("cpu"), timeout_s=60)
    writer = writer_of(folder, make_engine(model, transport), transport, model)
    for step in (1, 2, 2, 11):
        writer.save({}, RunState(step, step, 0.0))


def test_only_the_newest_are_kept_and_none_that_is_half_written_is_found(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / ".step-000002.partial/policy").mkdir(parents=True)
    (tmp_path / ".step-000002.partial/left.behind").write_text("by a run that was killed")
    (tmp_path / ".step-000099.partial").mkdir()
    ranks.run(2, save_several, str(tmp_path), tiny_model())
    found = list_checkpoints(tmp_path)
    assert [path.name for path in found] == ["step-000002", "step-000011"]
    assert not (found[0] / "left.behind").exists()
    assert {"state.json", "policy"} == {path.name for path in found[1].iterdir()}
    role = json.loads((found[1] / "policy/role.json").read_text())
    assert role["policy_version"] == 0
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (found[1] / "policy").iterdir()}
    assert not list(tmp_path.rglob("*.pt")), "nothing is pickled"


def fail_in_the_middle(folder: str, model: str) -> str:
    """The error of a disk that is full while one rank writes its part."""
    transport = Transport(torch.device("cpu"), timeout_s=3)
    engine = make_engine(model, transport)

    def fail(self: CheckpointWriter, path: Path, engine: FsdpEngine) -> None:
        if transport.rank == transport.world.size - 1:
            raise OSError("no space left on device")

    original = CheckpointWriter._save_role
    CheckpointWriter._save_role = fail  # type: ignore[method-assign]
    try:
        writer_of(folder, engine, transport, model).save({}, RunState(3, 3, 0.0))
    except (OSError, RuntimeError) as error:
        return str(error)
    finally:
        CheckpointWriter._save_role = original  # type: ignore[method-assign]
    return ""


def test_a_checkpoint_that_one_rank_could_not_write_never_gets_its_name(ranks: RankPool, tmp_path: Path) -> None:
    (error,) = ranks.run(1, fail_in_the_middle, str(tmp_path), tiny_model())
    assert "no space left" in error
    assert list_checkpoints(tmp_path) == []


def load_into(path: str, model: str) -> str:
    transport = Transport(torch.device("cpu"), timeout_s=60)
    engine = make_engine(model, transport)
    before = whole(engine)
    try:
        load_checkpoint(Path(path), {"policy": engine})
    except RecipeError as error:
        assert all(torch.equal(value, before[name]) for name, value in whole(engine).items())
        return str(error)
    return ""


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, save_and_go_on, str(tmp_path), tiny_model("qwen2"))
    path = tmp_path / "step-000002"
    for message in ranks.run(2, load_into, str(path), tiny_model("qwen3")):
        assert message.startswith(f"models.policy: checkpoint {path} does not fit")
        assert "use the model that the run was started with, or another run name" in message
    (path / "policy").rename(path / "critic")
    assert "does not fit" in ranks.run(1, load_into, str(path), tiny_model("qwen2"))[0]


@pytest.mark.parametrize("content", [None, "{", "[]", '{"step": 1}', '{"stepp": 1}'])
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "state.json").write_text(content)
    with pytest.raises(RecipeError, match="is not a checkpoint"):
        read_state(tmp_path)
