"""A checkpoint contains all of a role, on any number of ranks, and is complete or absent."""

from __future__ import annotations

import errno
import json
import math
import pickle
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors import SafetensorError
from tests.distributed.ranks import RankPool
from tests.tiny import add_gradients, random_samples, tiny_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.config.run import CheckpointConfig
from leaderless.distributed.transport import Transport
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.observability.run_directory import list_checkpoints
from leaderless.training.fsdp import FsdpEngine
from leaderless.worker.checkpoint import writer as writing
from leaderless.worker.checkpoint.channel_rows import load_rows
from leaderless.worker.checkpoint.reader import RunState, load_checkpoint, newest_good, read_state
from leaderless.worker.checkpoint.shards import DamagedCheckpointError, FileEntry, Manifest
from leaderless.worker.checkpoint.writer import CheckpointError, CheckpointWriter, Content, superseded

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
        optimizer=OptimizerConfig(learning_rate=1e-2, epsilon=1e-3, warmup_updates=3, schedule="linear"),
        num_updates=9,
    )


def train(engine: FsdpEngine, num_updates: int) -> None:
    """Updates that depend on the number of earlier updates."""
    world = engine.process_group
    place = world.ranks.index(world.rank)
    for _ in range(num_updates):
        rows = [row for row in range(len(LENGTHS)) if row % world.size == place]
        batch = random_samples(LENGTHS, seed=engine.policy_version).select(torch.tensor(rows))
        add_gradients(engine, batch, lambda outputs, _: -outputs.log_probs.sum() / 16)
        engine.optimizer_step()


def whole(engine: FsdpEngine) -> Whole:
    """Weights and moments, combined over ranks."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in engine.state().items()
    }


def writer_of(
    folder: str,
    engine: FsdpEngine,
    transport: Transport,
    model: str,
    config: CheckpointConfig | None = None,
    timeout_s: float = 5.0,
) -> CheckpointWriter:
    tokenizer = load_tokenizer(ModelConfig(path=model), "policy")
    config = config or CheckpointConfig(keep=2)
    texts = {"recipe.yaml": "name: x"}
    return CheckpointWriter(Path(folder), {"policy": engine}, transport.world, tokenizer, config, timeout_s, texts)


def save(writer: CheckpointWriter, step: int, data_position: int = 0, **metrics: float) -> None:
    writer.begin(Content(RunState(step, data_position, 7.5), metrics))
    writer.finish()


def save_and_go_on(folder: str, model: str) -> tuple[Whole, Whole]:
    """The state after two updates, and the state after two more."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    engine = make_engine(model, transport)
    train(engine, 2)
    saved = whole(engine)
    writer = writer_of(folder, engine, transport, model)
    writer.begin(Content(RunState(2, 12, 7.5)))
    train(engine, 2)  # during writing
    writer.finish()
    return saved, whole(engine)


def load_and_go_on(folder: str, model: str) -> tuple[Whole, Whole, int]:
    transport = Transport(torch.device("cpu"), timeout_s=60)
    engine = make_engine(model, transport)
    state = load_checkpoint(Path(folder) / "step-000002", {"policy": engine})
    assert state == RunState(step=2, data_position=12, time_s=7.5)
    loaded = whole(engine)
    train(engine, 2)
    return loaded, whole(engine), engine.policy_version


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 2), (1, 4), (4, 2), *(pytest.param(*one, marks=pytest.mark.thorough) for one in ((1, 1), (2, 1)))],
)
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
        save(writer, step)


def test_only_the_newest_are_kept_and_none_that_is_half_written_is_found(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / ".step-000002.0.1/policy").mkdir(parents=True)
    (tmp_path / ".step-000002.0.1/rank-00001.json").write_text("by a run that was killed")
    (tmp_path / "step-000098").mkdir()
    (tmp_path / ".step-000099.partial").mkdir()
    ranks.run(2, save_several, str(tmp_path), tiny_model())
    (tmp_path / "step-000098").rmdir()
    found = list_checkpoints(tmp_path)
    assert [path.name for path in found] == ["step-000002", "step-000011"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000011"]
    assert {"state.json", "recipe.yaml", "manifest.json", "policy"} == {path.name for path in found[1].iterdir()}
    written = {path.relative_to(found[1]).as_posix() for path in found[1].rglob("*") if path.is_file()}
    assert Manifest.read(found[1]).files.keys() == written - {"manifest.json"}
    role = json.loads((found[1] / "policy/role.json").read_text())
    assert role["policy_version"] == 0
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (found[1] / "policy").iterdir()}
    assert not list(tmp_path.rglob("*.pt")), "nothing is pickled"


def fail_in_the_middle(folder: str, model: str, culprit: int) -> tuple[str, str, list[str]]:
    """The errors of all ranks when the disk of one is full, in this and in the next checkpoint."""
    transport = Transport(torch.device("cpu"), timeout_s=30)
    engine = make_engine(model, transport)
    writer = writer_of(folder, engine, transport, model)
    save(writer, 1)

    full = OSError(errno.ENOSPC, "No space left on device")
    message = ""
    with patch.object(writing, "write_shards", side_effect=full) if transport.rank == culprit else nullcontext():
        try:
            save(writer, 3)
        except (OSError, CheckpointError) as error:
            message = f"{error} {' '.join(getattr(error, '__notes__', ()))}"
    left = sorted(path.name for path in Path(folder).iterdir())
    transport.world.sum(torch.zeros(1), "that all have looked")
    save(writer, 4)
    return message, str(writer.take_error()), left


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_checkpoint_that_one_rank_could_not_write_never_gets_its_name(
    ranks: RankPool, tmp_path: Path, culprit: int
) -> None:
    answers = ranks.run(2, fail_in_the_middle, str(tmp_path), tiny_model(), culprit)
    assert "No space left on device while writing checkpoint" in answers[culprit][0].replace("'", "")
    assert f"rank {culprit} could not write its part" in answers[1 - culprit][0]
    assert [error for _, error, _ in answers] == ["None", "None"]
    assert answers[0][2] == ["step-000001"], "nothing half-written stays, and the one before does"
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000001", "step-000004"]


def die_before_the_parts_are_there(folder: str, model: str) -> str:
    """A rank that is gone writes nothing, and nobody waits for it forever."""
    transport = Transport(torch.device("cpu"), timeout_s=30)
    engine = make_engine(model, transport)
    writer = writer_of(folder, engine, transport, model)
    writer._timeout_s = 0.5
    if transport.rank == 0:
        writer.begin(Content(RunState(1, 0, 0.0)))
        writer.close()
    return str(writer.take_error()) if transport.rank == 0 else ""


def test_parts_that_do_not_come_are_named(ranks: RankPool, tmp_path: Path) -> None:
    error, _ = ranks.run(2, die_before_the_parts_are_there, str(tmp_path), tiny_model())
    assert "no files of rank 1 after 0.5 s" in error
    assert list(tmp_path.iterdir()) == []


def save_with_scores(folder: str, model: str) -> None:
    transport = Transport(torch.device("cpu"), timeout_s=60)
    config = CheckpointConfig(keep=1, keep_every_steps=4, best_metric="score")
    writer = writer_of(folder, make_engine(model, transport), transport, model, config)
    for step, score in enumerate([0.1, 0.9, 0.9, 0.2, math.nan, 0.3], 1):
        save(writer, step, score=score)


def test_the_best_and_every_fourth_are_kept(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, save_with_scores, str(tmp_path), tiny_model())
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000003", "step-000004", "step-000006"]
    found, lowest = list_checkpoints(tmp_path), CheckpointConfig(keep=1, best_metric="score", best_is="lowest")
    assert superseded(found, lowest) == [tmp_path / "step-000003"]
    assert superseded(found, CheckpointConfig(keep=1, best_metric="other")) == found[:2]


def go_back_past(folder: str) -> tuple[str, list[str]]:
    said: list[str] = []
    path = newest_good(Path(folder), Transport(torch.device("cpu"), timeout_s=60).world, said.append)
    return path.name if path else "", said


def damage(path: Path, how: str) -> None:
    shard = next((path / "policy").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    match how:
        case "bit":
            content[len(content) // 2] ^= 1
            shard.write_bytes(content)
        case "cut":
            shard.write_bytes(content[:-10])
        case "gone":
            shard.unlink()
        case "state":
            (path / "state.json").write_text((path / "state.json").read_text().replace("7.5", "7.6"))
        case "manifest":
            text = (path / "manifest.json").read_text()
            (path / "manifest.json").write_text(text.replace("num_bytes", "num_bites", 1))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("bit", "its checksum differs"),
        ("cut", "bytes, where"),
        ("gone", "cannot be read: No such file"),
        ("state", "state.json is not what was written"),
        ("manifest", "manifest.json is not what was written"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_told(ranks: RankPool, tmp_path: Path, how: str, why: str) -> None:
    ranks.run(2, save_several, str(tmp_path), tiny_model())
    damage(tmp_path / "step-000011", how)
    for name, said in ranks.run(2, go_back_past, str(tmp_path)):
        assert name == "step-000002"
        assert len(said) == 1
        assert why in said[0]
        assert "set aside as damaged-step-000011" in said[0]
    assert (tmp_path / "damaged-step-000011/state.json").exists(), "nothing is thrown away"


def none_is_good(folder: str, unusable: tuple[str, ...] = ()) -> str:
    world = Transport(torch.device("cpu"), timeout_s=60).world

    def why_not(path: Path) -> str:
        assert world.rank == 0, "the first rank decides"
        return f"it has no {path.name[-2:]}" if path.name in unusable else ""

    try:
        newest_good(Path(folder), world, lambda _: None, why_not)
    except RecipeError as error:
        return str(error)
    return ""


def test_a_run_does_not_begin_anew_when_all_checkpoints_are_damaged(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, save_several, str(tmp_path), tiny_model())
    first, *others = list_checkpoints(tmp_path)
    unusable = tuple(path.name for path in others)
    assert ranks.run(2, none_is_good, str(tmp_path), unusable) == ["", ""]
    damage(first, "bit")
    for message in ranks.run(2, none_is_good, str(tmp_path), unusable):
        assert "the run can continue from (step-000011: it has no 11); pass --fresh to set the run aside" in message
    for path in others:
        damage(path, "bit")
    assert "is what was written; pass --fresh to set the run aside" in ranks.run(1, none_is_good, str(tmp_path))[0]


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


class Pwned:
    """Code that a pickle may run when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.mark,)


def load_made_up(folder: str, model: str) -> str:
    """A checkpoint whose maker knows the checksums, with pickles wherever something might unpickle."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    path, evil = Path(folder) / "step-000002", pickle.dumps(Pwned(Path(folder) / "pwned"))
    for file in [
        *(path / "policy").glob("*.safetensors"),
        path / "policy/.metadata",
        path / "surplus-00000-of-00001.safetensors",
    ]:
        file.write_bytes(evil)
    files = {name.relative_to(path).as_posix(): FileEntry.of(name) for name in path.rglob("*") if name.is_file()}
    del files["manifest.json"]
    Manifest(2, 1, {}, files).write(path)
    assert newest_good(Path(folder), transport.world, lambda _: None) == path, "its checksums are right"
    errors = []
    for load in (
        lambda: load_checkpoint(path, {"policy": make_engine(model, transport)}),
        lambda: load_rows(path, "surplus", 0, 1),
    ):
        try:
            load()
        except (DamagedCheckpointError, SafetensorError) as error:
            errors.append(str(error))
    return "\n".join(errors)


def test_a_pickle_in_a_checkpoint_is_never_loaded(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, save_and_go_on, str(tmp_path), tiny_model())
    (error,) = ranks.run(1, load_made_up, str(tmp_path), tiny_model())
    assert error.count("deserializing header") == 2, error
    assert "step-000002/policy cannot be read" in error
    assert not (tmp_path / "pwned").exists()
    pickle.loads((tmp_path / "step-000002/policy/.metadata").read_bytes())
    assert (tmp_path / "pwned").exists(), "it would have done so"
