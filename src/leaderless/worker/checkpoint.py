"""Checkpoints: everything that a run needs to go on, in open formats.

A checkpoint is a folder `step-000120` with `state.json` and, for each trained role, sharded safetensors of weights and
optimiser, written by all ranks at once with `torch.distributed.checkpoint`, beside the model's `config.json` and
tokenizer. What nodes remember and what a loop has left over for the next step is there too. It has its final name only
when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from leaderless.config import RecipeError
from leaderless.data.encode import Tokenizer
from leaderless.data.transport import Group
from leaderless.models.decoder import Decoder
from leaderless.models.value_model import ValueModel
from leaderless.observability.run_directory import list_checkpoints, write_atomically
from leaderless.training.sharded import ShardedModel


@dataclass(frozen=True)
class RunState:
    """What a checkpoint holds besides tensors.

    Attributes:
        step: Steps that are done.
        data_position: Prompts that have been taken from the data.
        time_s: Seconds that the run has taken so far.
    """

    step: int
    data_position: int
    time_s: float


@dataclass(frozen=True)
class RoleState:
    """What a checkpoint holds of a trained role besides tensors.

    Attributes:
        policy_version: Optimiser steps behind the weights.
        model: Identifies the names and shapes of the weights.
        is_value_model: It has a scalar head.
    """

    policy_version: int
    model: str
    is_value_model: bool = False


@dataclass(frozen=True)
class CheckpointWriter:
    """Writes the checkpoints of a run.

    Attributes:
        folder: Of the run's checkpoints.
        engines: The trained instances that this rank holds a part of, by role.
        world: All ranks.
        tokenizer: Written beside the weights.
        keep: Newest checkpoints that stay.
    """

    folder: Path
    engines: Mapping[str, ShardedModel[Decoder]]
    world: Group
    tokenizer: Tokenizer
    keep: int

    def save(
        self,
        nodes: Mapping[str, Mapping[str, float]],
        state: RunState,
        save_surplus: Callable[[Path], None] = lambda folder: None,  # noqa: ARG005
    ) -> Path:
        """Write a checkpoint, then remove old ones. All ranks call it together.

        Args:
            nodes: What nodes remember from step to step, of those whose first rank this is.
            state: All else but the tensors.
            save_surplus: Writes this rank's share of what a loop has left over into the folder.

        Returns:
            The checkpoint's folder.
        """
        final = self.folder / f"step-{state.step:06d}"
        partial = self.folder / f".step-{state.step:06d}.partial"
        is_first = self.world.rank == self.world.ranks[0]
        try:
            self._save_parts(partial, nodes, save_surplus, state, is_first=is_first)
        except BaseException:
            if is_first:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if is_first:
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for old in list_checkpoints(self.folder)[: -self.keep]:
                shutil.rmtree(old)
        return final

    def _save_parts(
        self,
        partial: Path,
        nodes: Mapping[str, Mapping[str, float]],
        save_surplus: Callable[[Path], None],
        state: RunState,
        *,
        is_first: bool,
    ) -> None:
        if is_first:
            for left_over in self.folder.glob(".step-*.partial"):
                shutil.rmtree(left_over)
            partial.mkdir(parents=True)
            write_atomically(partial / "state.json", json.dumps(asdict(state), indent=2))
        self.world.sum(torch.zeros(1), f"the folder of checkpoint {partial.name}")
        for name, remembered in nodes.items():
            if remembered:
                write_atomically(_node_file(partial, name), json.dumps(dict(remembered)))
        save_surplus(partial)
        for role, engine in self.engines.items():
            self._save_role(partial / role, engine)
        self.world.sum(torch.zeros(1), f"all parts of checkpoint {partial.name}")

    def _save_role(self, folder: Path, engine: ShardedModel[Decoder]) -> None:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        with cause_raised(f"while writing checkpoint {folder}"):
            save(dict(engine.state()), storage_writer=writer, process_group=engine.group.handle)
        if self.world.rank != engine.group.ranks[0]:
            return
        model = engine.model.model
        model.config.save_pretrained(str(folder))
        if getattr(model, "generation_config", None) is not None:  # classifiers do not generate
            model.generation_config.save_pretrained(str(folder))
        self.tokenizer.save_pretrained(str(folder))
        role_state = RoleState(engine.policy_version, fingerprint(engine), isinstance(engine.model, ValueModel))
        write_atomically(folder / "role.json", json.dumps(asdict(role_state), indent=2))


@contextmanager
def cause_raised(note: str) -> Iterator[None]:
    """Raise what went wrong on some rank, in place of an exception that `except Exception` does not catch.

    Args:
        note: What was being done.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        cause.add_note(f"{note}, on rank {rank}")
        raise cause from None


def load_checkpoint(path: Path, engines: Mapping[str, ShardedModel[Decoder]]) -> RunState:
    """Read a checkpoint into the models. All ranks call it together, as many as there are now.

    Args:
        path: The checkpoint's folder.
        engines: The trained instances that this rank holds a part of, by role.

    Raises:
        RecipeError: It is the checkpoint of another model, or none at all.
    """
    state = read_state(path)
    for role, engine in engines.items():
        role_state = read_role_state(path, role)
        if role_state is None or role_state.model != fingerprint(engine):
            raise RecipeError.at(
                f"models.{role}",
                f"checkpoint {path} does not fit: its weights have other names or shapes; "
                "use the model that the run was started with, or another run name",
            )
        reader = HuggingFaceStorageReader(str(path / role))
        with cause_raised(f"while reading checkpoint {path}: remove it to go on from the one before"):
            load(dict(engine.state()), storage_reader=reader, process_group=engine.group.handle)
        engine.state_loaded(role_state.policy_version)
    return state


def read_state(path: Path) -> RunState:
    """What a checkpoint says of itself.

    Args:
        path: The checkpoint's folder.

    Raises:
        RecipeError: It is not a checkpoint.
    """
    try:
        return RunState(**json.loads((path / "state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RecipeError.at("", f"{path} is not a checkpoint: {error}") from error


def read_role_state(path: Path, role: str) -> RoleState | None:
    """What a checkpoint says of a role; None when it does not hold it.

    Args:
        path: The checkpoint's folder.
        role: That was trained.
    """
    file = path / role / "role.json"
    return RoleState(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


def read_node_state(path: Path, name: str) -> dict[str, float]:
    """What a node remembered when a checkpoint was written.

    Args:
        path: The checkpoint's folder.
        name: Of the node.
    """
    file = _node_file(path, name)
    remembered: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return remembered


def _node_file(path: Path, name: str) -> Path:
    return path / f"node-{name}.json"


def fingerprint(engine: ShardedModel[Decoder]) -> str:
    """Identifies the names and shapes of a model's weights.

    Args:
        engine: Holds the model.
    """
    shapes = [[name, list(parameter.shape)] for name, parameter in engine.named_weights()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
