"""Checks of the files of a run against its proof: recipe, plan, metrics and checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from leaderless.base.values import Json
from leaderless.base.versions import VERSION, source_hash
from leaderless.distributed.weights.digests import WeightPart, is_weight, weights_digest
from leaderless.observability.line_file import parse_line
from leaderless.observability.proof_log import hash_of
from leaderless.observability.run_directory import MANIFEST, RunDirectory, list_checkpoints, step_of
from leaderless.run.verify.findings import ProofFinding
from leaderless.run.verify.proof_lines import ProofLine
from leaderless.worker.checkpoint.shards import DamagedCheckpointError, Manifest, read_tensors, stored_shapes

READ_BYTES = 1 << 30
"""Bytes of weights that are read at a time, and one weight more."""
RECIPE, PLAN, METRICS, END, CHECKPOINT, SOURCE = "recipe", "plan", "metrics", "end", "checkpoint", "source"


def check_texts(directory: RunDirectory, lines: Sequence[ProofLine]) -> Iterator[ProofFinding]:
    """Check that the recipe and the plan in the folder are those of the last step."""
    steps = [line for line in lines if not line.is_end]
    for name, path in ((RECIPE, directory.config), (PLAN, directory.plan)):
        changed = [line.step for before, line in pairwise(steps) if line.text(name) != before.text(name)]
        if not steps:
            yield ProofFinding(name, "not checked", "no line is about a step")
        elif not path.exists():
            yield ProofFinding(name, "fails", f"{path.name} is missing", steps[-1].number, steps[-1].step)
        elif _file_hash(path) != steps[-1].text(name):
            why = f"{path.name} is not the one of the last step: it was changed since, or no step has ended with it"
            yield ProofFinding(name, "fails", why, steps[-1].number, steps[-1].step)
        else:
            changes = f"; it changed at step {', '.join(map(str, changed))}" if changed else ""
            yield ProofFinding(name, "holds", f"{path.name} is the one of the last step{changes}")


def check_source(lines: Sequence[ProofLine]) -> ProofFinding:
    """Compare the source that made the run with the source that checks it."""
    code = next((line.record.get("code") for line in reversed(lines) if not line.is_end), None)
    made = code if isinstance(code, Mapping) else {}
    said = f"made by leaderless {made.get('version')}, source {str(made.get('source'))[:12]}"
    if made.get("source") == source_hash():
        return ProofFinding(SOURCE, "holds", f"{said}; the same here")
    here = f"checked by {VERSION}, source {source_hash()[:12]}, which may compute rewards differently"
    return ProofFinding(SOURCE, "not checked", f"{said}; {here}")


def check_metrics(directory: RunDirectory, lines: Sequence[ProofLine], step: int | None) -> Iterator[ProofFinding]:
    """Check the lines of `metrics.jsonl`, and that the proof goes as far as they do and as the checkpoints do."""
    logged: dict[int, dict[str, Json]] = {}
    for text in directory.metrics.read_bytes().splitlines() if directory.metrics.exists() else ():
        record = parse_line(text)
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            logged[record["step"]] = record
    last = max((line.step for line in lines), default=0)
    saved = [step_of(path) for path in list_checkpoints(directory.checkpoints)]
    beyond = [("metrics.jsonl", max(logged, default=0)), ("a checkpoint", max(saved, default=0))]
    for what, end in beyond:
        if end > last:
            remedy = "lines were cut off, or the run was killed between two files: continue it"
            yield ProofFinding(
                END, "fails", f"the proof ends at step {last}, but {what} is of step {end}: {remedy}", step=last + 1
            )
            break
    else:
        yield ProofFinding(END, "holds", f"the proof goes as far as metrics.jsonl and the checkpoints, to step {last}")
    checked = [line for line in lines if not line.is_end and step in {None, line.step}]
    for line in checked:
        fails = partial(ProofFinding, METRICS, "fails", line=line.number, step=line.step)
        if line.step not in logged:
            yield fails("metrics.jsonl has no line of the step")
            return
        found = logged[line.step]
        numbers = line.record.get("numbers")
        for name, value in (numbers if isinstance(numbers, Mapping) else {}).items():
            if found.get(name) != value:
                yield fails(f"{name} is {found.get(name)} in metrics.jsonl, {value} in the proof")
                return
        if hash_of(found) != line.text("metrics"):
            yield fails("the numbers of the step in metrics.jsonl are not those that were written")
            return
    yield ProofFinding(METRICS, "holds", f"all numbers of {len(checked)} steps")


def check_checkpoints(directory: RunDirectory, lines: Sequence[ProofLine], step: int | None) -> Iterator[ProofFinding]:
    """Check the checkpoints that are there: all of their files, and their weights."""
    by_step = {line.step: line for line in lines if not line.is_end}
    named: dict[str, tuple[str, int]] = {}
    for line in lines:
        named |= {name: (value, line.number) for name, value in line.checkpoints.items()}
    left = {(name, value) for line in lines for name, value in line.left.items()}
    found = [path for path in list_checkpoints(directory.checkpoints) if step in {None, step_of(path)}]
    if not found:
        yield ProofFinding(
            CHECKPOINT, "not checked", "there is no checkpoint" + ("" if step is None else f" of step {step}")
        )
    for path in found:
        if (path.name, _file_hash(path / MANIFEST)) in left:
            why = f"{path.name} is of an attempt that the run did not continue: its steps were done again"
            yield ProofFinding(CHECKPOINT, "not checked", why, step=step_of(path))
            continue
        yield _check_checkpoint(path, by_step.get(step_of(path)), named.get(path.name))


def _check_checkpoint(path: Path, line: ProofLine | None, named: tuple[str, int] | None) -> ProofFinding:
    step = step_of(path)
    fails = partial(ProofFinding, CHECKPOINT, "fails", step=step, line=line.number if line else None)
    if line is None:
        return fails(f"{path.name} is of a step that the proof does not have")
    if named is not None and _file_hash(path / MANIFEST) != named[0]:
        return fails(f"the list of files of {path.name} is not the one that line {named[1]} names")
    try:
        manifest = Manifest.read(path)
        manifest.check(path, sorted(manifest.files))
        if manifest.step != step:
            return fails(f"{path.name} was written after step {manifest.step}")
        for name, file in ((RECIPE, "recipe.yaml"), (PLAN, "plan.json")):
            if _file_hash(path / file) != line.text(name):
                return fails(f"{file} of {path.name} is not the one of the step")
        for role, (_, after) in line.weights.items():
            if not (path / role).is_dir():
                return fails(f"{path.name} has no weights of '{role}'")
            if (digest := checkpoint_digest(path / role)) != after:
                return fails(f"the weights of '{role}' in {path.name} are {digest}, those after the step {after}")
    except (DamagedCheckpointError, OSError) as error:
        return fails(str(error))
    rest = sorted(
        one.name
        for one in path.iterdir()
        if one.is_dir() and (one / "role.json").exists() and one.name not in line.weights
    )
    detail = f"{path.name}: {len(manifest.files)} files, weights of {', '.join(line.weights) or 'no role'}"
    detail += f"; the engine of {', '.join(rest)} does not hash weights" if rest else ""
    return ProofFinding(
        CHECKPOINT, "holds", detail + ("" if named else "; no line names it, as it was written after the last one")
    )


def checkpoint_digest(folder: Path) -> str:
    """Digest of a role's weights in a checkpoint, of which some are in memory at a time."""
    total = 0
    shapes = {name: one for name, one in stored_shapes(folder).items() if is_weight(name)}
    while shapes:
        weights: dict[str, torch.Tensor] = {}
        while shapes and sum(one.nbytes for one in weights.values()) < READ_BYTES:
            name, (dtype, shape) = shapes.popitem()
            weights[name] = torch.empty(shape, dtype=dtype)
        read_tensors(folder, weights)
        total += weights_digest(WeightPart(name, one, (0,) * one.ndim, one.shape) for name, one in weights.items())
    return f"{total % (1 << 64):016x}"


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
