"""Adapters and optimizers on disk, in a folder that outlives the server.

    FOLDER/
      RUN/run.json                        what the adapters of a client are
      RUN/KIND/NAME.json                  a saved state: where it is, and the checksums of its files
      RUN/KIND/NAME.1a2b3c4d/             adapters as `peft` reads them, and the optimizer

A state is there as soon as its description is, which replaces an earlier one of the same name at once. Its path is
`tinker://RUN/KIND/NAME`. A killed server leaves folders without a description, which the next one removes.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal
from uuid import uuid4

from safetensors.torch import load_file, save_file
from torch import Tensor

from leaderless.base.values import Json
from leaderless.config.models import ModelConfig
from leaderless.models.lora.linear import write_adapters
from leaderless.planner.graph.adapters import PREFIX, SUFFIX, WEIGHTS_FILE
from leaderless.serving.training.adapters import AdapterShape, Weights
from leaderless.worker.checkpoint.shards import sync_to_disk

Kind = Literal["weights", "sampler_weights"]
KINDS: Mapping[Kind, str] = {"weights": "training", "sampler_weights": "sampler"}
"""Parts of paths, and the types of checkpoints that clients call them."""
SCHEME = "tinker://"
OPTIMIZER_FILE = "optimizer.safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names of states, which become names of files."""


class NoStateError(ValueError):
    """A saved state that is not there, or cannot be read."""


@dataclass(frozen=True)
class TrainedRun:
    """Adapters of a client, as they are described on disk.

    Attributes:
        run_id: Name, which the server has chosen.
        base_model: Name of the model for clients.
        shape: Layers with adapters, and their rank.
        user_metadata: Texts of the client.
        created: Time at which they began, in seconds since 1970.
    """

    run_id: str
    base_model: str
    shape: AdapterShape
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    created: float = 0.0


@dataclass(frozen=True)
class SavedState:
    """A saved state.

    Attributes:
        run_id: Run that it is of.
        kind: Whether it has an optimizer (`weights`), or is for sampling.
        name: Name that the client gave.
        folder: Name of its folder.
        num_steps: Optimizer steps so far.
        checksums: Checksum of each file, by name.
        size_bytes: Size of all files.
        saved: Time, in seconds since 1970.
        expires: Time at which it is removed; None for never.
        user_metadata: Texts of the client.
    """

    run_id: str
    kind: Kind
    name: str
    folder: str
    num_steps: int
    checksums: Mapping[str, str]
    size_bytes: int
    saved: float
    expires: float | None = None
    user_metadata: Mapping[str, str] | None = None

    @property
    def path(self) -> str:
        """Path for clients."""
        return f"{SCHEME}{self.run_id}/{self.kind}/{self.name}"

    def to_json(self) -> dict[str, Json]:
        """Description as clients read it."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": written_time(self.saved),
            "tinker_path": self.path,
            "size_bytes": self.size_bytes,
            "public": False,
            "user_metadata": None if self.user_metadata is None else dict(self.user_metadata),
            "expires_at": None if self.expires is None else written_time(self.expires),
        }


def written_time(seconds: float) -> str:
    """A time as clients read it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class StateFolder:
    """The folder of all saved states."""

    def __init__(self, path: Path) -> None:
        """Make the folder, and remove what a killed server has left."""
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        for kind in path.glob("*/*/"):
            named = {self._read(file).folder for file in kind.glob("*.json")}
            for folder in kind.iterdir():
                if folder.is_dir() and folder.name not in named:
                    shutil.rmtree(folder)

    def add_run(self, run: TrainedRun) -> None:
        """Describe the adapters of a client on disk."""
        folder = self.path / _file_name(run.run_id)
        folder.mkdir(exist_ok=True)
        _write(folder / "run.json", asdict(run))
        sync_to_disk(self.path)

    def runs(self) -> list[TrainedRun]:
        """All adapters that any client has had, the newest first."""
        found = [self._read_run(file) for file in self.path.glob("*/run.json")]
        return sorted(found, key=lambda run: run.created, reverse=True)

    def run(self, run_id: str) -> TrainedRun | None:
        """Adapters with a name, if there are any."""
        file = self.path / _file_name(run_id) / "run.json"
        return self._read_run(file) if file.exists() else None

    def _read_run(self, file: Path) -> TrainedRun:
        said = json.loads(file.read_text(encoding="utf-8"))
        return TrainedRun(**{**said, "shape": AdapterShape(**said["shape"])})

    def states(self, run_id: str) -> list[SavedState]:
        """Saved states of a run, the newest first; those whose time has come are removed."""
        return sorted(self._states(run_id), key=lambda state: state.saved, reverse=True)

    def _states(self, run_id: str) -> Iterator[SavedState]:
        for kind in KINDS:
            for file in (self.path / _file_name(run_id) / kind).glob("*.json"):
                state = self._read(file)
                if state.expires is not None and state.expires <= time.time():
                    self.remove(state)
                else:
                    yield state

    def _read(self, file: Path) -> SavedState:
        return SavedState(**json.loads(file.read_text(encoding="utf-8")))

    def find(self, path: str) -> SavedState:
        """The state with a path, `tinker://RUN/KIND/NAME`.

        Raises:
            NoStateError: There is none.
        """
        run_id, _, rest = path.removeprefix(SCHEME).partition("/")
        kind, _, name = rest.partition("/")
        if not path.startswith(SCHEME) or kind not in KINDS or not name:
            raise NoStateError(f"path='{path}' must be {SCHEME}RUN/weights/NAME or {SCHEME}RUN/sampler_weights/NAME")
        states = self.states(run_id)
        found = next((one for one in states if (one.kind, one.name) == (kind, name)), None)
        if found is None:
            there = ", ".join(one.path for one in states) or "none"
            raise NoStateError(f"path='{path}' is not saved here; of this run there are: {there}")
        return found

    def check_name(self, run_id: str, kind: Kind, name: str, *, overwrite: bool) -> None:
        """Refuse a name that cannot be one, or that is taken.

        Raises:
            ValueError: It is so.
        """
        if not NAME.fullmatch(name):
            raise ValueError(
                f"name='{name}' must be 1 to 128 letters, digits, '.', '_' and '-', and begin with a letter or digit"
            )
        if not overwrite and self._description(run_id, kind, name).exists():
            raise ValueError(f"name='{name}' is taken by an earlier state: choose another name, or set overwrite")

    def _description(self, run_id: str, kind: Kind, name: str) -> Path:
        return self.path / _file_name(run_id) / kind / f"{name}.json"

    def save(
        self, wanted: SavedState, model: ModelConfig, weights: Weights, optimizer: Mapping[str, Tensor]
    ) -> SavedState:
        """Write a state to disk, and replace an earlier one of the same name; returns it with its files.

        Args:
            wanted: The state, without files.
            model: Model with the adapters.
            weights: The adapters.
            optimizer: State of the optimizer; empty for a state that is sampled from.
        """
        description = self._description(wanted.run_id, wanted.kind, wanted.name)
        folder = description.parent / f"{wanted.name}.{uuid4().hex[:8]}"
        folder.mkdir(parents=True)
        write_adapters(folder, weights, model)
        if optimizer:
            save_file({name: one.contiguous() for name, one in optimizer.items()}, folder / OPTIMIZER_FILE)
        files = sorted(folder.iterdir())
        for file in files:
            sync_to_disk(file)
        sync_to_disk(folder)
        state = replace(
            wanted,
            folder=folder.name,
            checksums={file.name: _checksum(file) for file in files},
            size_bytes=sum(file.stat().st_size for file in files),
        )
        before = self._read(description) if description.exists() else None
        _write(description, asdict(state))
        if before is not None:
            shutil.rmtree(description.parent / before.folder, ignore_errors=True)
        return state

    def load(self, state: SavedState) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Adapters and optimizer of a state, by name; the latter is empty if there is none.

        Raises:
            NoStateError: Its files are damaged.
        """
        folder = self._description(state.run_id, state.kind, state.name).parent / state.folder
        for name, checksum in state.checksums.items():
            if not (folder / name).exists() or _checksum(folder / name) != checksum:
                raise NoStateError(f"path='{state.path}' is damaged: {folder / name} is not as it was saved")
        saved = load_file(folder / WEIGHTS_FILE)
        optimizer = load_file(folder / OPTIMIZER_FILE) if OPTIMIZER_FILE in state.checksums else {}
        return {name.removeprefix(PREFIX).removesuffix(SUFFIX): one for name, one in saved.items()}, optimizer

    def remove(self, state: SavedState) -> None:
        """Remove a state."""
        description = self._description(state.run_id, state.kind, state.name)
        description.unlink(missing_ok=True)
        shutil.rmtree(description.parent / state.folder, ignore_errors=True)


def _file_name(run_id: str) -> str:
    """The name of the folder of a run, which cannot lead elsewhere."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", run_id)


def _write(file: Path, content: dict[str, Json]) -> None:
    """Write JSON to disk, so that it is complete or as before."""
    temporary = file.with_name(f".{file.name}.new")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    sync_to_disk(temporary)
    temporary.replace(file)
    sync_to_disk(file.parent)


def _checksum(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
