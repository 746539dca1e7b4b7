"""LIBERO's start states: read from its pickles without executing them, and converted once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leaderless.config import RecipeError
from leaderless.config.environment import BodyConfig
from leaderless.embodied.simulators.libero_tasks import axis_angle, read_states, starts_of
from leaderless.embodied.simulators.registry import open_body


def written(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


@pytest.mark.parametrize("kind", ["<f8", "<f4", "<i8"])
def test_states_are_read_from_pickles_and_converted_once(tmp_path, kind):
    states = (np.arange(12).reshape(3, 4) / 3).astype(kind)
    file = written(tmp_path / "suite/task.pruned_init", states)
    assert (read_states(file) == states).all()
    assert (read_states(written(tmp_path / "f.init", np.asfortranarray(states))) == states).all()
    assert (starts_of(tmp_path, "suite", "task") == states).all()
    file.unlink()
    assert (starts_of(tmp_path, "suite", "task") == states).all()
    with pytest.raises(FileNotFoundError, match="copy LIBERO's folder init_files"):
        starts_of(tmp_path, "suite", "other")


class Evil:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    "value",
    [Evil(), np.array([Evil()]), [1, 2], np.zeros(3), np.full((2, 2), np.nan), np.array([["a"]])],
    ids=["code", "code-inside", "list", "flat", "nan", "text"],
)
def test_what_is_no_array_of_states_is_refused_and_not_executed(tmp_path, value, capsys):
    with pytest.raises(ValueError, match="does not hold start states"):
        read_states(written(tmp_path / "bad.init", value))
    assert "executed" not in capsys.readouterr().out


def test_damaged_files_are_refused(tmp_path):
    file = written(tmp_path / "task.init", np.zeros((2, 3)))
    content = file.read_bytes()
    flipped = content.replace(np.zeros(6).tobytes(), np.ones(6).tobytes())
    flipped = flipped if flipped != content else content.replace(b"_reconstruct", b"_reconstracu")
    texts = b"version https://git-lfs.github.com/spec/v1\n", b"<!DOCTYPE html>"
    for damaged in (b"", content[:10], content[: len(content) - 30], flipped, *texts):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="does not hold start states"):
            read_states(file)


def test_turns_are_axes_times_angles():
    assert axis_angle(np.array([0.0, 0, 0, 1])).tolist() == [0, 0, 0]
    half = np.sqrt(0.5)
    assert axis_angle(np.array([0, half, 0, half])) == pytest.approx([0, np.pi / 2, 0])


def test_a_missing_folder_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.delenv("LIBERO_ROOT", raising=False)
    for options, remedy in [({}, "LIBERO_ROOT"), ({"root": str(tmp_path)}, "copy LIBERO's repository")]:
        with pytest.raises(RecipeError, match=remedy):
            open_body(BodyConfig(type="libero", options=options, max_steps=1000), 1)
