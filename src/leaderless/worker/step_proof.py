"""Facts of a step for the proof of a run: hashes of its rows and weights, added up with the metrics of the loop.

Each rank hashes the rows and the weights that it holds. Sums of hashes do not depend on their order, so they ride along
with the metrics that the ranks of the loop add up at the end of a step: a few numbers, however many rows and ranks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from leaderless.base.values import Json
from leaderless.base.versions import VERSION, source_hash
from leaderless.config import Recipe, dump_recipe
from leaderless.data.batch import Batch
from leaderless.data.row_hashes import HashedRows
from leaderless.distributed.weights.digests import WeightPart, WeightsDigest, is_weight
from leaderless.observability.metrics import Metrics
from leaderless.observability.proof_log import LINES, RECORDED, RowSum, hash_of
from leaderless.observability.run_directory import finite_or_none
from leaderless.planner import Loop, Plan, PlannedNode
from leaderless.stages.recorded_samples import recorded_columns
from leaderless.training.engine import Trainable
from leaderless.worker.checkpoint.writer import own_shards

PREFIX = "proof/"
"""Beginning of the names of numbers that are added up for the proof, and are no metrics."""
LIBRARIES = ("torch", "transformers", "numpy", "safetensors", "tokenizers")


class StepProof:
    """Collects the facts of a step on one rank of the loop that trains.

    Attributes:
        recorded: Sums of the rows that the rank has written into the folder of the run in this step.
    """

    def __init__(self, plan: Plan, loop: Loop, engines: Mapping[str, Trainable]) -> None:
        """Hash the rows of the nodes of a loop of the plan, and the weights of some of its engines, by role."""
        self._nodes = proven_nodes([one for one in plan.nodes if one.name in loop.nodes])
        self._roles = sorted({one.role for one in plan.instances if one.is_trained})
        self._engines = {role: one for role, one in engines.items() if getattr(one, "has_live_state", False)}
        self._digests: dict[str, WeightsDigest] = {}
        self._rows: dict[str, RowSum] = {}
        self._versions: tuple[float, float] = (torch.inf, -torch.inf)
        self._weights: dict[str, int] | None = None
        self.recorded: dict[str, RowSum] = {}

    def forget(self) -> None:
        """Forget what the weights were: others may have been loaded."""
        self._weights = None

    def begin(self) -> None:
        """Begin a step."""
        self._rows.clear()
        self.recorded.clear()
        self._versions = (torch.inf, -torch.inf)
        if self._weights is None:
            self._weights = self._digest()

    def add(self, name: str, given: Batch, made: Batch, rank: int) -> None:
        """Add the rows of a node, of which one of the ranks with the same rows has each."""
        node = self._nodes.get(name)
        if node is None or not node.layout.represents(rank):
            return
        rows, names = (made, node.reads.keys() | {*node.writes}) if "advantages" in node.writes else (given, node.reads)
        hashed = HashedRows(rows, recorded_columns(names) if is_recording(node) else names)
        self._rows[name] = self._rows.get(name, RowSum()) + RowSum.of(hashed.hashes)
        if "policy_versions" in given and "train" in node.spec.roles.values():
            found = given.jagged("policy_versions").values
            if len(found):
                oldest, newest = self._versions
                self._versions = min(oldest, float(found.min())), max(newest, float(found.max()))

    def add_to(self, metrics: Metrics) -> None:
        """Add the facts to the metrics of the loop; every rank reports the same names."""
        sums = {f"rows/{name}": self._rows.get(name, RowSum()) for name in self._nodes}
        sums |= {kind: self.recorded.get(kind, RowSum()) for kind in (RECORDED, LINES)}
        for name, found in sums.items():
            metrics.digest(f"{PREFIX}{name}", found.total)
            metrics.total(f"{PREFIX}{name}/count", found.count)
        before, self._weights = self._weights or {}, self._digest()
        for role in self._roles:
            metrics.total(f"{PREFIX}weights/{role}/ranks", int(role in self._digests))
            for when, weights in (("before", before), ("after", self._weights)):
                metrics.digest(f"{PREFIX}weights/{role}/{when}", weights.get(role, 0))
        oldest, newest = self._versions
        metrics.max(f"{PREFIX}versions/oldest", -oldest)
        metrics.max(f"{PREFIX}versions/newest", newest)

    def take(self, numbers: dict[str, float]) -> dict[str, Json]:
        """The facts of all ranks, which leave the numbers of the step."""
        own = {name: numbers.pop(name) for name in [*numbers] if name.startswith(PREFIX)}

        def rows(name: str) -> Json:
            return RowSum(int(own[f"{PREFIX}{name}/count"]), int(own[f"{PREFIX}{name}"])).to_json()

        def weights(role: str) -> Json:
            values = (int(own[f"{PREFIX}weights/{role}/{when}"]) % (1 << 64) for when in ("before", "after"))
            before, after = (f"{value:016x}" for value in values)
            return {"before": before, "after": after}

        recording: list[Json] = [one.layout.ranks[0] for one in self._nodes.values() if is_recording(one)]
        oldest, newest = -own[f"{PREFIX}versions/oldest"], own[f"{PREFIX}versions/newest"]
        return {
            "rows": {name: rows(f"rows/{name}") for name in self._nodes},
            **{kind: rows(kind) if recording else None for kind in (RECORDED, LINES)},
            "recording_ranks": recording,
            "weights": {role: weights(role) for role in self._roles if own[f"{PREFIX}weights/{role}/ranks"]},
            "versions": [int(oldest), int(newest)] if newest >= 0 else None,
        }

    def _digest(self) -> dict[str, int]:
        """The digests of the weights as they are now, by role."""
        if not self._digests:
            self._digests = {role: WeightsDigest(_parts_of(engine)) for role, engine in self._engines.items()}
        return {role: one.value() for role, one in self._digests.items()}


def proven_nodes(nodes: Sequence[PlannedNode]) -> dict[str, PlannedNode]:
    """The nodes whose rows are hashed, by name: those that train, and those that know rewards and advantages.

    These are the nodes that record samples, or else those that compute advantages.
    """
    knowing = [one for one in nodes if is_recording(one)] or [one for one in nodes if "advantages" in one.writes]
    return {one.name: one for one in nodes if "train" in one.spec.roles.values() or one in knowing}


def is_recording(node: PlannedNode) -> bool:
    """Whether a node writes samples into the folder of the run."""
    return node.node.run == "record"


def _parts_of(engine: Trainable) -> Iterator[WeightPart]:
    """The parts of weights that this rank stands for, in the memory that training changes."""
    whole = engine.state()
    for name, shard in own_shards(engine).items():
        if is_weight(name):
            yield WeightPart(name, shard.local, shard.offsets, whole[name].shape)


def run_facts(recipe: Recipe, plan: Plan) -> dict[str, Json]:
    """Hashes of the recipe and the plan as they are in the folder of the run, of the source, and versions."""
    texts = {"recipe": dump_recipe(recipe), "plan": json.dumps(plan.to_json(), indent=1)}
    hashes: dict[str, Json] = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    return {"world_size": plan.world_size, **hashes, **_environment_facts()}


@functools.cache
def _environment_facts() -> dict[str, Json]:
    libraries: dict[str, Json] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            libraries[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"code": {"version": VERSION, "source": source_hash()}, "libraries": libraries}


def metrics_facts(step: int, numbers: Mapping[str, float]) -> dict[str, Json]:
    """Hash of the line of a step in `metrics.jsonl`, with its losses and norms of gradients."""
    logged: dict[str, Json] = {**finite_or_none({"step": step, **numbers})}
    shown = {name: value for name, value in logged.items() if name.rpartition("/")[2] in {"loss", "grad_norm"}}
    return {"metrics": hash_of(logged), "numbers": shown}
