"""Writes checkpoints while training continues, and removes old ones.

Every rank copies its part, and a thread writes the copy into a folder that readers ignore. When a rank's files
are on the disk, it lists them there with their checksums. The first rank's thread waits for all lists, writes the
manifest and gives the folder its name. Training does not wait for any of this, and a killed rank leaves only an unnamed
folder.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from leaderless.base.devices import trim_host_memory
from leaderless.config.run import CheckpointConfig
from leaderless.data.prompts.encode import Tokenizer
from leaderless.distributed.transport import ProcessGroup
from leaderless.observability.run_directory import list_checkpoints, step_of, write_atomically
from leaderless.training.engine import Trainable
from leaderless.worker.checkpoint.reader import NODE_FILE, ROLE_FILE, STATE_FILE, RoleState, RunState
from leaderless.worker.checkpoint.shards import (
    DamagedCheckpointError,
    FileEntry,
    Manifest,
    Shard,
    copy_to_host,
    shard_file,
    sync_to_disk,
    write_shards,
)

LEAVE_S = 10.0
"""Longest wait for an unfinished checkpoint when a run ends with an error."""
_LOOK_S = (0.02, 1.0)
"""Time between two checks for the lists of other ranks, at first and in the end."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written."""


@dataclass(frozen=True)
class Content:
    """Content of a checkpoint without the tensors of models.

    Attributes:
        state: Progress of the run.
        metrics: This rank's metrics of the step; the first rank's take precedence.
        nodes: States of the nodes whose first rank this is.
        texts: Further texts for this rank to write, by file name.
        rows: Functions that write rows of this rank, such as channels' rows, into a folder. A thread calls them
            later, so they must keep the current rows.
        keeps_old: Whether older checkpoints stay, as the weights of this one may be bad.
    """

    state: RunState
    metrics: Mapping[str, float] = field(default_factory=dict)
    nodes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    rows: Sequence[Callable[[Path], None]] = ()
    keeps_old: bool = False


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time.

    Attributes:
        folder: Folder of the checkpoints.
        is_first: Whether this rank names a checkpoint when all parts of it are there.
        preempted: End of the names of folders with parts that ranks write when they are preempted.
    """

    def __init__(
        self,
        folder: Path,
        engines: Mapping[str, Trainable],
        world: ProcessGroup,
        tokenizer: Tokenizer,
        config: CheckpointConfig,
        timeout_s: float,
        descriptions: Mapping[str, str],
        first_rank: int = 0,
    ) -> None:
        """Agree on where in `folder` to write. All ranks call it together.

        The first rank waits at most `timeout_s` for the files of other ranks, and writes the state of the run.
        `descriptions` are further files that belong to each checkpoint, by name.
        """
        self.folder, self._engines, self._world, self._config = folder, engines, world, config
        self._timeout_s, self._descriptions = timeout_s, descriptions
        self.is_first = world.rank == first_rank
        # Files left behind by a killed start must not be mistaken for this start's.
        self._token = world.broadcast_text(
            uuid4().hex[:8] if self.is_first else "", first_rank, "the name of this start"
        )
        self.preempted = f".{self._token}.preempted"
        self._committing = threading.Lock()
        self._buffers: dict[str, dict[str, Tensor]] = {role: {} for role in engines}
        first_here = {role: engine for role, engine in engines.items() if _place(engine.process_group) == 0}
        self._models = {role: _describe(engine, tokenizer) for role, engine in first_here.items()}
        self._job: threading.Thread | None = None
        self._error: BaseException | None = None  # of the last checkpoint
        self._num_begun = 0
        self._last_s = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due on this rank after a step; all ranks write if it is due on any."""
        every_steps, every_s = self._config.every_steps, self._config.every_minutes * 60
        is_late = self.is_first and every_s > 0 and time.monotonic() - self._last_s >= every_s
        return is_late or (every_steps > 0 and step % every_steps == 0)

    def begin(self, content: Content, *, from_copy: bool = True) -> None:
        """Begin to write the state, after waiting for an earlier checkpoint. Take its error first, or it is lost.

        With `from_copy`, which takes memory, training can continue; else tensors must not change until `finish`
        returns.
        """
        self.wait()
        self._error, self._last_s = None, time.monotonic()
        trim_host_memory()  # gradients of the last update must not lie next to the copy
        roles = {}
        for role, engine in self._engines.items():
            state = RoleState.of(engine)
            shards = own_shards(engine)
            roles[role] = state, copy_to_host(shards, self._buffers[role]) if from_copy else shards
        self._num_begun += 1
        partial = self.folder / f".step-{content.state.step:06d}.{self._token}.{self._num_begun}"
        self._job = threading.Thread(target=self._write, args=(partial, content, roles), name="checkpoint", daemon=True)
        self._job.start()

    def finish(self) -> None:
        """Wait until the current checkpoint is complete. All ranks call it together.

        Raises:
            CheckpointError: Some rank could not write its part.
            OSError: This rank could not write.
        """
        self.wait()
        error = self.take_error()
        failed = torch.cat(self._world.gather(torch.tensor([int(error is not None)]), "whether all have written"))
        if error is not None:
            raise error
        if int(failed.max()):
            culprit = self._world.ranks[int(failed.argmax())]
            raise CheckpointError(f"rank {culprit} could not write its part of the checkpoint")
        if self.is_first:
            with self._committing:  # no rank writes there any more, and this checkpoint takes their place
                for path in self.folder.glob(f".step-*{self.preempted}"):
                    shutil.rmtree(path, ignore_errors=True)

    def take_error(self) -> BaseException | None:
        """The error of the last checkpoint, if new since the last call."""
        if self._job is None or self._job.is_alive():
            return None
        error, self._error = self._error, None
        return error

    def wait(self) -> None:
        """Wait until this rank has written its part of a checkpoint, if one is in progress."""
        if self._job is not None:
            self._job.join()

    def close(self) -> None:
        """Wait a limited time for an unfinished checkpoint."""
        if self._job is not None:
            self._job.join(LEAVE_S)

    def _write(self, partial: Path, content: Content, roles: Mapping[str, Role]) -> None:
        """Write this rank's part, in the thread; the main thread reports an error."""
        own = partial / f"rank-{self._world.rank:05d}"
        try:
            if self.is_first:
                for path in self.folder.glob(".step-*"):  # other ranks may already be writing to these
                    if path != partial and not path.name.endswith(self.preempted):
                        shutil.rmtree(path, ignore_errors=True)
            self.write_part(partial, content, roles)
            if self.is_first:
                self.commit(partial, content)
        except BaseException as error:  # noqa: BLE001
            self._error = error  # before what may fail itself
            error.add_note(f"while writing checkpoint {self.folder / f'step-{content.state.step:06d}'}")
            shutil.rmtree(own.with_suffix(".parts"), ignore_errors=True)
            with suppress(OSError):  # a full disk may have no room for a reason, but a name mostly fits
                own.with_suffix(".failed").touch()
            if self.is_first:
                with suppress(OSError, CheckpointError):
                    self._await_lists(partial)  # after this no rank writes there
                shutil.rmtree(partial, ignore_errors=True)

    def write_part(self, partial: Path, content: Content, roles: Mapping[str, Role]) -> None:
        """Write this rank's part of a checkpoint into a folder, and a list of its files."""
        # Not its parents: if a mount has vanished, nothing may be written to the folder beneath it.
        self.folder.mkdir(exist_ok=True)
        partial.mkdir(exist_ok=True)
        own = partial / f"rank-{self._world.rank:05d}"
        files = self._write_files(partial, own.with_suffix(".parts"), content, roles)
        metrics = {name: value for name, value in content.metrics.items() if math.isfinite(value)}
        listed = json.dumps({"metrics": metrics, "files": {name: asdict(entry) for name, entry in files.items()}})
        write_atomically(own.with_suffix(".json"), listed)

    def _write_files(
        self, folder: Path, scratch: Path, content: Content, roles: Mapping[str, Role]
    ) -> dict[str, FileEntry]:
        """Write this rank's files into a folder of its own, then move them to their places."""
        scratch.mkdir()
        states = {NODE_FILE.format(name): json.dumps(dict(state)) for name, state in content.nodes.items() if state}
        texts = {**states, **content.texts}
        if self.is_first:
            texts |= {STATE_FILE: json.dumps(asdict(content.state), indent=2), **self._descriptions}
        files: dict[str, FileEntry] = {}
        for role, (state, shards) in roles.items():
            (scratch / role).mkdir()
            if shards:
                name = f"{role}/{shard_file(_place(self._engines[role].process_group))}"
                files[name] = write_shards(scratch / name, shards)
            for name, data in self._models.get(role, {}).items():
                (scratch / role / name).parent.mkdir(exist_ok=True)
                (scratch / role / name).write_bytes(data)
            if role in self._models:
                texts[f"{role}/{ROLE_FILE}"] = json.dumps(asdict(state), indent=2)
        for name, text in texts.items():
            (scratch / name).write_text(text, encoding="utf-8")
        for save in content.rows:
            save(scratch)
        for file in sorted(path for path in scratch.rglob("*") if path.is_file()):
            name = file.relative_to(scratch).as_posix()
            if name not in files:
                sync_to_disk(file)
                files[name] = FileEntry.of(file)
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            file.rename(folder / name)
        shutil.rmtree(scratch)
        return files

    def commit(self, partial: Path, content: Content) -> None:
        """Name the checkpoint when the files of all ranks are there, and remove old ones."""
        lists = self._await_lists(partial)
        with self._committing:
            self._commit(partial, content, lists)

    def _commit(self, partial: Path, content: Content, lists: Sequence[Path]) -> None:
        step = content.state.step
        files: dict[str, FileEntry] = {}
        metrics: dict[str, float] = {}
        for one in lists:
            listed = json.loads(one.read_text())
            files |= {name: FileEntry(**entry) for name, entry in listed["files"].items()}
            metrics = listed["metrics"] | metrics
        metrics |= {name: value for name, value in content.metrics.items() if math.isfinite(value)}
        Manifest(step, self._world.size, metrics, files).write(partial)
        for one in lists:
            one.unlink()
        for folder in {partial, *((partial / name).parent for name in files)}:
            sync_to_disk(folder)
        final = self.folder / f"step-{step:06d}"
        if final.exists():
            final.rename(self.folder / f".{final.name}.replaced")
        partial.rename(final)
        sync_to_disk(self.folder)
        for old in superseded(list_checkpoints(self.folder), self._config) if not content.keeps_old else ():
            # It loses its name first, so that a half-removed checkpoint is not taken for one.
            shutil.rmtree(old.rename(self.folder / f".{old.name}.removed"))
        shutil.rmtree(self.folder / f".{final.name}.replaced", ignore_errors=True)

    def _await_lists(self, partial: Path) -> list[Path]:
        """Wait for each rank's list of files; a CheckpointError if a rank could not write or is too late."""
        end, pause = time.monotonic() + self._timeout_s, _LOOK_S[0]
        wanted = [f"rank-{rank:05d}" for rank in self._world.ranks]
        while True:
            names = {path.name for path in partial.iterdir()}
            late = [name for name in wanted if not {f"{name}.json", f"{name}.failed"} & names]
            if not late:
                break
            if time.monotonic() > end:
                ranks = ", ".join(str(int(name[5:])) for name in late[:8])
                raise CheckpointError(f"checkpoint {partial}: no files of rank {ranks} after {self._timeout_s:g} s")
            time.sleep(pause)
            pause = min(_LOOK_S[1], pause * 1.5)
        failed = ", ".join(str(int(name[5:])) for name in wanted if f"{name}.failed" in names)
        if failed:
            raise CheckpointError(f"checkpoint {partial}: rank {failed} could not write its part")
        return [partial / f"{name}.json" for name in wanted]


Role = tuple[RoleState, Mapping[str, Shard]]
"""The state of a trained role, and the shards that this rank writes."""


def superseded(checkpoints: list[Path], config: CheckpointConfig) -> list[Path]:
    """The checkpoints of a run that need not be kept; the input has all, oldest first."""
    kept = {*checkpoints[-config.keep :], _best(checkpoints, config)}
    every = config.keep_every_steps
    return [path for path in checkpoints if path not in kept and not (every and step_of(path) % every == 0)]


def _best(checkpoints: list[Path], config: CheckpointConfig) -> Path | None:
    """The checkpoint of the step with the best value of a metric, the newest of equals; None if no step had it."""
    name, sign = config.best_metric, 1.0 if config.best_is == "highest" else -1.0
    values: dict[Path, float] = {}
    if name is None:
        return None
    for path in checkpoints:
        try:
            metrics = Manifest.read(path).metrics
        except DamagedCheckpointError:
            continue  # it is reported when a run tries to resume from it
        if name in metrics:
            values[path] = sign * metrics[name]
    return max(reversed(values), key=lambda path: values[path], default=None)


def _place(process_group: ProcessGroup) -> int:
    return process_group.ranks.index(process_group.rank)


def own_shards(engine: Trainable) -> dict[str, Shard]:
    """The shards that this rank writes; of ranks with the same part, the first one writes it."""
    if engine.is_replica:
        return {}
    is_first = _place(engine.process_group) == 0

    def is_own(value: Tensor) -> bool:
        if not isinstance(value, DTensor):
            return is_first
        places = value.device_mesh.get_coordinate() or ()
        return not any(place for place, along in zip(places, value.placements, strict=True) if along.is_replicate())

    return {name: Shard.of(value) for name, value in engine.state().items() if is_own(value)}


def _describe(engine: Trainable, tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files next to the weights, equal in all checkpoints."""
    with tempfile.TemporaryDirectory(prefix="leaderless-") as folder:
        engine.write_description(Path(folder))
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
