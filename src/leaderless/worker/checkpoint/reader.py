"""Reads checkpoints: everything a run needs to continue, in open formats.

A checkpoint is a folder `step-000120` with `state.json` and, for each trained role, sharded safetensors of weights and
optimizer in the form of `torch.distributed.checkpoint`, next to the model's `config.json` and tokenizer. It also holds
the state of nodes, the surplus of repeated nodes, the resolved recipe and the plan, but no random state: each step
draws from the recipe's seed. `manifest.json` lists all files with their checksums.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.observability.run_directory import list_checkpoints
from leaderless.planner.graph.adapters import CONFIG_FILE
from leaderless.training.engine import Trainable
from leaderless.worker.checkpoint.shards import DamagedCheckpointError, Manifest, read_tensors

STATE_FILE, ROLE_FILE, NODE_FILE, LOOP_FILE = "state.json", "role.json", "node-{}.json", "loop-{}.json"
"""Names of the files with the state of the run, of a role (in its folder), of a node and of a loop that is ahead."""


@dataclass(frozen=True)
class RunState:
    """Progress of a run: finished steps, prompts taken from the data, and seconds so far."""

    step: int
    data_position: int
    time_s: float


@dataclass(frozen=True)
class RoleState:
    """State of a trained role, without its tensors.

    Attributes:
        policy_version: Number of optimizer steps behind the weights.
        model: Digest of the names and shapes of the weights.
        is_value_model: Whether the model has a scalar head.
        kept: Kinds of numbers that the optimizer keeps, sorted; None in a checkpoint of an earlier version.
    """

    policy_version: int
    model: str
    is_value_model: bool = False
    kept: Sequence[str] | None = None

    @classmethod
    def of(cls, engine: Trainable) -> RoleState:
        """State of the role of an engine."""
        return cls(engine.policy_version, fingerprint(engine), engine.is_value_model, kinds_kept(engine))


@dataclass(frozen=True)
class LoopState:
    """State of a loop that is ahead of the training loop.

    Attributes:
        iteration: Number of finished iterations.
        data_position: Prompts taken from the data.
        lag: Iterations that it was ahead, except at the end of the run; 0 if an earlier version did not record it.
    """

    iteration: int
    data_position: int
    lag: int


def newest_good(
    folder: Path, world: ProcessGroup, say: Callable[[str], None], why_not: Callable[[Path], str] = lambda _: ""
) -> Path | None:
    """Find the newest checkpoint that a run can continue from, and rename damaged ones. All ranks call it together.

    Only the first rank calls `why_not`, which explains why this run cannot continue from an undamaged checkpoint, if
    so.

    Returns:
        The checkpoint, None when the folder holds none.

    Raises:
        RecipeError: There are checkpoints, but the run cannot continue from any.
    """
    is_first = world.rank == world.ranks[0]
    # Shared storage may show the newest folder to some ranks later than to others.
    known = [(path.name, why_not(path)) for path in list_checkpoints(folder)] if is_first else []
    found: list[tuple[str, str]] = json.loads(
        world.broadcast_text(json.dumps(known), 0, "the names of all checkpoints")
    )
    for name, reason in reversed(found):
        if reason:
            say(f"{name} is passed over: {escape(reason)}")
            continue
        damage = find_damage(folder / name, world)
        if not damage:
            return folder / name
        say(f"[bold red]a checkpoint is damaged[/] and set aside as damaged-{name}: {escape(damage)}")
        if is_first:
            shutil.rmtree(folder / f"damaged-{name}", ignore_errors=True)
            (folder / name).rename(folder / f"damaged-{name}")
    reasons = [f"{name}: {reason}" for name, reason in found if reason]
    if found:
        why = f"the run can continue from ({reasons[-1]})" if reasons else "is what was written"
        raise RecipeError.at("", f"no checkpoint in {folder} {why}; pass --fresh to set the run aside and begin anew")
    return None


def find_damage(path: Path, world: ProcessGroup) -> str:
    """Describe the damage of a checkpoint with the same text on all ranks; empty if there is none.

    All ranks call it together, and each reads some of the files.
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


def load_checkpoint(path: Path, engines: Mapping[str, Trainable]) -> RunState:
    """Read a checkpoint into the models, by role; each rank reads its own parts, whichever rank wrote them.

    Raises:
        RecipeError: It is the checkpoint of another model, or not a checkpoint.
        DamagedCheckpointError: Its tensors cannot be read.
    """
    state = read_state(path)
    for role, engine in engines.items():
        role_state = read_role_state(path, role)
        if role_state is None or role_state.model != fingerprint(engine):
            _check_adapted_layers(path, role, engine)
            raise RecipeError.at(
                f"models.{role}",
                f"checkpoint {path} does not fit: its weights have other names or shapes; "
                "use the model that the run was started with, or another run name",
            )
        _check_adapters(path, role, engine)
        kept = kinds_kept(engine)  # nothing in an engine that only answers
        if kept and role_state.kept not in (None, kept):
            raise RecipeError.at(
                f"roles.{role}.optimizer.type",
                f"is of an optimizer that keeps {', '.join(kept)}, but in checkpoint {path} are "
                f"{', '.join(role_state.kept or ()) or 'no such numbers'}: leave it as it was, or give the new run "
                "another name",
            )
        group = engine.process_group
        read_tensors(path / role, engine.state(), group.ranks.index(group.rank))
        engine.state_loaded(role_state.policy_version)
    return state


def _check_adapted_layers(path: Path, role: str, engine: Trainable) -> None:
    """Refuse adapters on other layers than here; an earlier version also adapted the vision encoder."""
    saved, here = _adapters_of(path, role, engine)
    wanted, found = (one.get("target_modules", []) for one in (saved, here))
    own = {name.rpartition(".")[2] for name in found}
    if saved.get("r") == here.get("r") and own != {name.rpartition(".")[2] for name in wanted}:
        raise RecipeError.at(
            f"models.{role}.lora.targets",
            f"means other layers than the adapters in checkpoint {path} are on: set [{', '.join(wanted)}], or give the "
            "new run another name",
        )
    ranks, own_ranks = ({*(one.get("rank_pattern") or {}).values()} for one in (saved, here))  # of experts alone
    if ranks != own_ranks:
        remedy = f"set {max(ranks)}" if ranks else "leave it out"
        raise RecipeError.at(
            f"models.{role}.lora.expert_rank",
            f"gives experts other adapters than they have in checkpoint {path}: {remedy}, or give the new run another "
            "name",
        )


def _adapters_of(path: Path, role: str, engine: Trainable) -> tuple[dict[str, Any], dict[str, Any]]:
    """Adapter settings of a checkpoint and of an engine; empty if one of them has no adapters."""
    file = path / role / CONFIG_FILE
    if not file.exists():
        return {}, {}
    with tempfile.TemporaryDirectory(prefix="leaderless-") as folder:
        engine.write_description(Path(folder))
        if not (Path(folder) / CONFIG_FILE).exists():
            return {}, {}
        here = json.loads((Path(folder) / CONFIG_FILE).read_text(encoding="utf-8"))
    return json.loads(file.read_text(encoding="utf-8")), here


def _check_adapters(path: Path, role: str, engine: Trainable) -> None:
    """Refuse adapters that compute differently here, though their matrices match the engine's in names and shapes."""
    saved, here = _adapters_of(path, role, engine)
    if not saved:
        return
    base = "base_model_name_or_path"
    is_moved = Path(saved[base]).name == Path(here[base]).name  # a folder may be in another place
    defaults = LoraConfig()
    for settings in (saved, here):  # they are named where weights have 4 bits
        settings.setdefault("base_dtype", defaults.base_dtype)
        settings.setdefault("base_block", here.get("base_block", defaults.base_block))
    for name, setting in (
        (base, "path"),
        ("revision", "revision"),
        ("lora_alpha", "lora.alpha"),
        ("use_rslora", "lora.rslora"),
        ("base_dtype", "lora.base_dtype"),
        ("base_block", "lora.base_block"),
    ):
        if saved[name] != here[name] and not (name == base and is_moved):
            raise RecipeError.at(
                f"models.{role}.{setting}",
                f"is {here[name]}, but the adapters in checkpoint {path} were trained with {saved[name]}: leave it as "
                "it was, or give the new run another name",
            )


def read_state(path: Path) -> RunState:
    """Read the progress of the run from a checkpoint.

    Raises:
        RecipeError: It is not a checkpoint.
    """
    try:
        return RunState(**json.loads((path / STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RecipeError.at("", f"{path} is not a checkpoint: {error}") from error


def read_role_state(path: Path, role: str) -> RoleState | None:
    """Read the state of a role from a checkpoint; None when it does not hold the role."""
    file = path / role / ROLE_FILE
    return RoleState(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


def read_loop_state(path: Path, name: str) -> LoopState:
    """Read the state of a loop that is ahead of the training loop.

    Raises:
        RecipeError: The run had no such loop.
    """
    try:
        state = json.loads((path / LOOP_FILE.format(name)).read_text(encoding="utf-8"))
        return LoopState(int(state["iteration"]), int(state["data_position"]), int(state.get("lag", 0)))
    except (OSError, ValueError, KeyError) as error:
        reason = f"checkpoint {path} holds no loop '{name}': give the new run another name"
        raise RecipeError.at("channels", reason) from error


def read_node_state(path: Path, name: str) -> dict[str, float]:
    """Read the state of a node from a checkpoint; empty when it had none."""
    file = path / NODE_FILE.format(name)
    remembered: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return remembered


def kinds_kept(engine: Trainable) -> list[str]:
    """Kinds of numbers that the optimizer of an engine keeps of weights, such as `exp_avg`, sorted."""
    names = (name.split(".") for name in engine.state() if name.startswith("optimizer."))
    return sorted({kind for _, kind, *_ in names})


def fingerprint(engine: Trainable) -> str:
    """Digest of the names and shapes of a model's weights."""
    shapes = [[name, list(shape)] for name, shape in engine.weight_shapes().items()]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
