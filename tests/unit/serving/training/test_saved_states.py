"""States on disk: whole or not there, whenever the server is killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.serving.training import saved_states
from leaderless.serving.training.adapters import AdapterShape
from leaderless.serving.training.saved_states import NoStateError, SavedState, StateFolder, TrainedRun

MODEL = ModelConfig(path="tiny", lora=LoraConfig(rank=2))
RUN = "0-1:train:0"


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"model.layers.0.self_attn.q_proj.lora_A": torch.full((2, 4), value)}


def folder(path: Path) -> StateFolder:
    states = StateFolder(path)
    states.add_run(TrainedRun(RUN, "tiny", AdapterShape(2), {"a": "b"}, 1.0))
    return states


def save(states: StateFolder, value: float, name: str = "a", expires: float | None = None) -> SavedState:
    wanted = SavedState(RUN, "weights", name, "", 3, {}, 0, time.time(), expires)
    return states.save(wanted, MODEL, weights(value), {"optimizer.exp_avg.x": torch.full((3,), value)})


def value_of(states: StateFolder, path: str = f"tinker://{RUN}/weights/a") -> float:
    found, optimizer = states.load(states.find(path))
    assert optimizer["optimizer.exp_avg.x"].tolist() == [float(found.popitem()[1][0, 0])] * 3
    return float(optimizer["optimizer.exp_avg.x"][0])


def test_a_state_is_as_it_was_saved_and_a_later_one_replaces_it(tmp_path: Path) -> None:
    states = folder(tmp_path)
    first = save(states, 1.0)
    assert value_of(states) == 1.0
    save(states, 2.0)
    assert value_of(StateFolder(tmp_path)) == 2.0
    assert not (tmp_path / "0-1-train-0/weights" / first.folder).exists()
    assert [state.num_steps for state in states.states(RUN)] == [3]
    assert states.runs() == [TrainedRun(RUN, "tiny", AdapterShape(2), {"a": "b"}, 1.0)]


@pytest.mark.parametrize("killed_in", ["write_adapters", "save_file", "sync_to_disk", "_write"])
def test_a_server_that_is_killed_leaves_the_state_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_in: str
) -> None:
    states = folder(tmp_path)
    save(states, 1.0)

    class Killed(BaseException):
        pass

    def kill(*_: object) -> Callable[[], None]:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(saved_states, killed_in, kill)
        with pytest.raises(Killed):
            save(states, 2.0)
    again = StateFolder(tmp_path)
    assert value_of(again) == 1.0
    assert len([*(tmp_path / "0-1-train-0/weights").iterdir()]) == 2, "what was begun has been removed"


def test_a_damaged_state_is_not_loaded(tmp_path: Path) -> None:
    states = folder(tmp_path)
    state = save(states, 1.0)
    file = tmp_path / "0-1-train-0/weights" / state.folder / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(NoStateError, match=r"is damaged: .*adapter_model.safetensors is not as it was saved"):
        value_of(states)


def test_states_whose_time_has_come_are_removed(tmp_path: Path) -> None:
    states = folder(tmp_path)
    save(states, 1.0, expires=time.time() + 3600)
    save(states, 2.0, "b", expires=time.time() - 1)
    assert [state.name for state in states.states(RUN)] == ["a"]
    assert len([*(tmp_path / "0-1-train-0/weights").iterdir()]) == 2


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/tmp/a", "must be tinker://"),
        (f"tinker://{RUN}/other/a", "must be tinker://"),
        (f"tinker://{RUN}/weights/b", f"of this run there are: tinker://{RUN}/weights/a"),
        ("tinker://../weights/a", "there are: none"),
        ("tinker://../../x/weights/a", "must be tinker://"),
    ],
)
def test_a_path_that_is_not_there_is_refused(tmp_path: Path, path: str, message: str) -> None:
    states = folder(tmp_path)
    save(states, 1.0)
    with pytest.raises(NoStateError, match=message):
        states.find(path)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "é", ".hidden", "x" * 129])
def test_a_name_that_could_lead_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="must be 1 to 128 letters"):
        folder(tmp_path).check_name(RUN, "weights", name, overwrite=True)
