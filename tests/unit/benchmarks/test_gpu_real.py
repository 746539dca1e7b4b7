"""The benchmark with a real model: a model that comes in pieces, and a run of a tiny one on the CPU."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.distributed.ranks import RankPool
from tests.tiny import tiny_model, write_additions

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))  # as when it is run
import gpu_real
import gpu_real_run
from gpu_real_pieces import add, split

LARGEST = 3000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of files, one of which is empty and one in a folder, that begin and end within pieces."""
    folder = tmp_path / "model"
    (folder / "more").mkdir(parents=True)
    for name, size in (("config.json", 700), ("empty", 0), ("model.safetensors", 6000), ("more/tokenizer.json", 1)):
        (folder / name).write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1]])
def test_pieces_that_come_in_any_order_become_the_model(model: Path, tmp_path: Path, order: list[int]) -> None:
    pieces, there = split(model, tmp_path / "pieces", LARGEST), tmp_path / "there"
    assert len(pieces) == len(order)
    assert all(piece.stat().st_size <= LARGEST for piece in pieces)
    for number, place in enumerate(order, 1):
        ((arrival,), problems) = add(pieces[place], there)
        assert not problems
        assert arrival.total == len(pieces)
        assert arrival.missing == sorted(place + 1 for place in order[number:])
        assert arrival.model.exists() == (not arrival.missing)
    assert contents(there / "model") == contents(model)
    assert not list(there.rglob("*.piece")), "they are not needed any more"
    ((again,), problems) = add(tmp_path / "pieces", there)
    assert (again.missing, problems) == ([], []), "it is there already"


def test_a_file_comes_in_pieces_and_some_of_them_twice(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + b"ab" * 2000)
    pieces = split(file, tmp_path / "pieces", LARGEST)
    for piece in (pieces[1], pieces[1], *pieces):
        ((arrival,), problems) = add(piece, tmp_path / "there")
        assert not problems
    assert arrival.model.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("place", [10, -1])
def test_a_damaged_piece_is_refused_and_can_be_brought_again(model: Path, tmp_path: Path, place: int) -> None:
    pieces, there = split(model, tmp_path / "pieces", LARGEST), tmp_path / "there"
    whole = pieces[1].read_bytes()
    damaged = bytearray(whole)
    damaged[place] ^= 1
    pieces[1].write_bytes(damaged)
    ((arrival,), (problem,)) = add(tmp_path / "pieces", there)
    assert arrival.missing == [2]
    assert pieces[1].name in problem
    if place == -1:
        assert "piece 2 of 5 is damaged: bring it again" in problem
    for cut in (whole[:-7], b"", b"not a piece\n"):
        pieces[1].write_bytes(cut)
        assert add(pieces[1], there)[1]
    pieces[1].write_bytes(whole)
    ((arrival,), problems) = add(pieces[1], there)
    assert (arrival.missing, problems) == ([], [])
    assert contents(there / "model") == contents(model)


def test_pieces_of_another_model_of_that_name_are_refused(model: Path, tmp_path: Path) -> None:
    pieces = split(model, tmp_path / "pieces", LARGEST)
    add(pieces[0], tmp_path / "there")
    (model / "config.json").write_text("{}")
    others = split(model, tmp_path / "others", LARGEST)
    arrivals, (problem,) = add(others[1], tmp_path / "there")
    assert not arrivals
    assert "another model of that name: remove that folder" in problem


def test_a_piece_writes_no_file_elsewhere(model: Path, tmp_path: Path) -> None:
    piece = split(model, tmp_path / "pieces", LARGEST)[0]
    piece.write_bytes(piece.read_bytes().replace(b"more/tokenizer.json", b"../../keepers.json"))
    assert "outside of the folder" in add(piece, tmp_path / "there")[1][0]
    assert not (tmp_path / "there").exists()


def test_what_is_no_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command, reason in (
        (["split", "nothing", "pieces"], "holds no file"),
        (["add", "nothing"], "holds no piece"),
        (["run", "nothing", "--train", "x", "--held-out", "y"], "neither a folder with a config.json nor a GGUF file"),
    ):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["gpu_real.py", *command])
        with pytest.raises(SystemExit, match=reason):
            gpu_real.main()


def test_commands_say_what_is_missing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*command: object) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["gpu_real.py", *map(str, command)])
        with pytest.raises(SystemExit) as end:
            gpu_real.main()
        return end.value.code, capsys.readouterr().out

    there = tmp_path / "there"
    assert call("split", model, tmp_path / "pieces", "--mib", LARGEST / 2**20)[0] == 0
    first, *_, last = sorted((tmp_path / "pieces").iterdir())
    code, text = call("add", first, "--into", there)
    assert (code, text) == (0, f"{there / 'model'}: 4 of 5 pieces are missing: 2, 3, 4, 5\n")
    last.write_bytes(last.read_bytes()[:-1])
    code, text = call("add", tmp_path / "pieces", "--into", there)
    assert (code, text) == (1, f"{there / 'model'}: 1 of 5 pieces are missing: 5\n")


@pytest.mark.skipif(find_spec("gguf") is not None, reason="this Python has the package gguf")
def test_packages_for_gguf_are_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"with gguf.* which this Python does not have: pip install gguf"):
        gpu_real.unpack(tmp_path / "model.gguf", tmp_path / "model")


def measure(folder: str, seconds: float, steps: int, enough_rows: int) -> dict[str, Any]:
    """Train the tiny model; time is over when the log has as many rows."""
    path = Path(folder)

    def reserve(watch: gpu_real_run.Watch, rows: list[gpu_real_run.Row]) -> float:
        return watch.seconds if len(rows) >= enough_rows else 0.0

    options = gpu_real_run.Options(
        model=Path(tiny_model()),
        train=write_additions(path / "train.jsonl"),
        held_out=write_additions(path / "held_out.jsonl", 8),
        columns=("question", "answer"),
        system="",
        num_held_out=5,
        sizes=(2, 3, 4),
        learning_rate=1e-3,
        evaluate_every=50,
        seconds=seconds,
        steps=steps,
        folder=path / "runs",
        overrides=("data.train.template=plain", "data.evaluation.template=plain", "data.max_prompt_tokens=32"),
    )
    alone = {name: value for name, value in os.environ.items() if name != "RANK"}  # as where no launcher starts it
    with patch.object(gpu_real_run.Watch, "reserve", reserve), patch.dict(os.environ, alone, clear=True):
        return gpu_real_run.measure(options, path / "results.json")


def test_a_run_that_has_time_is_measured_to_its_last_step(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run(1, measure, str(tmp_path), 300.0, 2, 99, init_group=False)
    assert json.loads((tmp_path / "results.json").read_text()) == found
    assert "problem" not in found
    assert found["steps"] == 2
    assert list(found["accuracy_by_step"]) == ["0", "2"]
    assert len(found["rewards"]) == 2
    assert 0 <= found["mismatch"]["abs_mean"] < 1e-4
    assert found["generation_tokens_per_s"] > found["response_tokens"]
    assert 0 < found["peak_bytes"] < 1 << 33
    assert 0 < found["planned_bytes"] < 1 << 33
    text = gpu_real.table(found)
    for line in ("2 steps of 2 prompts with 3 responses", "| accuracy on 5 held-out questions |", "after step 2 |"):
        assert line in text
    assert "of what `plan` says" in text
    assert not (tmp_path / "runs/gpu-real/checkpoints").exists(), "a large model would fill the disk"


def test_a_run_is_stopped_in_time_for_its_last_evaluation(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run(1, measure, str(tmp_path), 300.0, 10_000, 1, init_group=False)
    assert "problem" not in found
    last = found["steps"]
    assert 1 <= last < 10_000
    assert list(found["accuracy_by_step"]) == ["0", str(last)]


def test_a_run_that_is_still_busy_at_its_limit_keeps_what_is_known(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run(1, measure, str(tmp_path), 2.0, 1_000_000, 10**9, init_group=False)
    assert json.loads((tmp_path / "results.json").read_text()) == found
    assert found["planned_bytes"] > 0
    assert gpu_real.table(found)
