"""Checkpoints: everything that a run needs to continue, in open formats.

A checkpoint is a folder `step-000120` with `state.json` and, for each trained role, sharded safetensors of weights and
optimizer in the form of `torch.distributed.checkpoint`, next to the model's `config.json` and tokenizer. What nodes
remember and the surplus of a loop for the next step are there too, and the resolved recipe and the plan. Random
numbers are not: each step draws its own from the recipe's seed. `manifest.json` lists all files with their checksums.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.markup import escape

from leaderless.checkpoint.manifest import DamagedCheckpointError, Manifest
from leaderless.checkpoint.shards import read_tensors
from leaderless.config import RecipeError
from leaderless.data.transport import ProcessGroup
from leaderless.models.decoder import Decoder
from leaderless.observability.run_directory import list_checkpoints
from leaderless.training.sharded import ShardedModel

STATE_FILE, ROLE_FILE, NODE_FILE = "state.json", "role.json", "node-{}.json"
"""Of a checkpoint, of each role's folder in it, and of a node by its name."""


@dataclass(frozen=True)
class RunState:
    """What a checkpoint holds besides tensors.

    Attributes:
        step: Number of finished steps.
        data_position: Number of prompts that have been taken from the data.
        time_s: Seconds that the run has taken so far.
    """

    step: int
    data_position: int
    time_s: float


@dataclass(frozen=True)
class RoleState:
    """What a checkpoint holds of a trained role besides tensors.

    Attributes:
        policy_version: Optimizer steps behind the weights.
        model: Digest of the names and shapes of the weights.
        is_value_model: Whether the model has a scalar head.
    """

    policy_version: int
    model: str
    is_value_model: bool = False


def newest_good(folder: Path, world: ProcessGroup, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is what was written; damaged ones lose their name. All ranks call it together.

    Args:
        folder: Folder of the run's checkpoints.
        world: Process group of all ranks.
        say: Function that shows a line to the user.

    Returns:
        Its folder; None when the run has no checkpoint.

    Raises:
        RecipeError: There are checkpoints, and all are damaged.
    """
    is_first = world.rank == world.ranks[0]
    # Shared storage may show the newest folder to some ranks later than to others.
    names = "\n".join(path.name for path in list_checkpoints(folder)) if is_first else ""
    names = world.broadcast_text(names, 0, "the names of all checkpoints")
    for name in reversed(names.split()):
        damage = find_damage(folder / name, world)
        if not damage:
            return folder / name
        say(f"[bold red]a checkpoint is damaged[/] and set aside as damaged-{name}: {escape(damage)}")
        if is_first:
            shutil.rmtree(folder / f"damaged-{name}", ignore_errors=True)
            (folder / name).rename(folder / f"damaged-{name}")
    if names:
        reason = f"no checkpoint in {folder} is what was written; pass --fresh to set the run aside and begin anew"
        raise RecipeError.at("", reason)
    return None


def find_damage(path: Path, world: ProcessGroup) -> str:
    """What is wrong with a checkpoint, if anything. All ranks call it together, and each reads some of the files.

    Args:
        path: The checkpoint's folder.
        world: Process group of all ranks.

    Returns:
        The same on all ranks.
    """
    place, damage = world.ranks.index(world.rank), ""
    try:
        manifest = Manifest.read(path)
        manifest.check(path, sorted(manifest.files)[place :: world.size])
    except DamagedCheckpointError as error:
        damage = str(error)
    found = torch.cat(world.gather(torch.tensor([int(bool(damage))]), "whether files of the checkpoint are damaged"))
    if not int(found.max()):
        return ""
    return world.broadcast_text(damage, world.ranks[int(found.argmax())], "what is wrong with the checkpoint")


def load_checkpoint(path: Path, engines: Mapping[str, ShardedModel[Decoder]]) -> RunState:
    """Read a checkpoint into the models; each rank reads what it holds, whoever wrote it.

    Args:
        path: The checkpoint's folder.
        engines: The trained instances that this rank holds a part of, by role.

    Raises:
        RecipeError: It is the checkpoint of another model, or none at all.
        DamagedCheckpointError: Its tensors cannot be read.
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
        read_tensors(path / role, engine.state())
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
        return RunState(**json.loads((path / STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RecipeError.at("", f"{path} is not a checkpoint: {error}") from error


def read_role_state(path: Path, role: str) -> RoleState | None:
    """What a checkpoint says of a role; None when it does not hold it.

    Args:
        path: The checkpoint's folder.
        role: Role that was trained.
    """
    file = path / role / ROLE_FILE
    return RoleState(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


def read_node_state(path: Path, name: str) -> dict[str, float]:
    """What a node remembered when a checkpoint was written.

    Args:
        path: The checkpoint's folder.
        name: Name of the node.
    """
    file = path / NODE_FILE.format(name)
    remembered: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return remembered


def fingerprint(engine: ShardedModel[Decoder]) -> str:
    """Identifies the names and shapes of a model's weights.

    Args:
        engine: Engine that holds the model.
    """
    shapes = [[name, list(parameter.shape)] for name, parameter in engine.named_weights()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
