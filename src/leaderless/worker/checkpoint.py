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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from leaderless.data.encode import Tokenizer
from leaderless.data.transport import Group
from leaderless.observability.run_directory import list_checkpoints, write_atomically
from leaderless.training.fsdp import FsdpEngine


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
    """

    policy_version: int
    model: str


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
    engines: Mapping[str, FsdpEngine]
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
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write_atomically(partial / "state.json", json.dumps(asdict(state), indent=2))
        self.world.sum(torch.zeros(1), f"the folder of checkpoint {final.name}")
        for name, remembered in nodes.items():
            if remembered:
                write_atomically(_node_file(partial, name), json.dumps(dict(remembered)))
        save_surplus(partial)
        for role, engine in self.engines.items():
            self._save_role(partial / role, engine)
        self.world.sum(torch.zeros(1), f"all parts of checkpoint {final.name}")
        if is_first:
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for old in list_checkpoints(self.folder)[: -self.keep]:
                shutil.rmtree(old)
        return final

    def _save_role(self, folder: Path, engine: FsdpEngine) -> None:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(dict(engine.state()), storage_writer=writer, process_group=engine.group.handle)
        if self.world.rank != engine.group.ranks[0]:
            return
        model = engine.model.model
        model.config.save_pretrained(str(folder))
        if model.generation_config is not None:
            model.generation_config.save_pretrained(str(folder))
        self.tokenizer.save_pretrained(str(folder))
        role_state = RoleState(engine.policy_version, fingerprint(engine))
        write_atomically(folder / "role.json", json.dumps(asdict(role_state), indent=2))


def load_checkpoint(path: Path, engines: Mapping[str, FsdpEngine]) -> RunState:
    """Read a checkpoint into the models. All ranks call it together, as many as there are now.

    Args:
        path: The checkpoint's folder.
        engines: The trained instances that this rank holds a part of, by role.

    Raises:
        ValueError: It is the checkpoint of another model.
    """
    state = read_state(path)
    for role, engine in engines.items():
        file = path / role / "role.json"
        role_state = RoleState(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None
        if role_state is None or role_state.model != fingerprint(engine):
            raise ValueError(
                f"checkpoint {path} does not fit models.{role}: its weights have other names or shapes; "
                "use the model that the run was started with, or another run name"
            )
        reader = HuggingFaceStorageReader(str(path / role))
        load(dict(engine.state()), storage_reader=reader, process_group=engine.group.handle)
        engine.state_loaded(role_state.policy_version)
    return state


def read_state(path: Path) -> RunState:
    """What a checkpoint says of itself.

    Args:
        path: The checkpoint's folder.

    Raises:
        ValueError: It is not a checkpoint.
    """
    try:
        return RunState(**json.loads((path / "state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a checkpoint: {error}") from error


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


def fingerprint(engine: FsdpEngine) -> str:
    """Identifies the names and shapes of a model's weights.

    Args:
        engine: Holds the model.
    """
    shapes = [[name, list(parameter.shape)] for name, parameter in engine.named_weights()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
