"""`run.transport`: by NIXL or its stand-in a run has the same numbers, and a missing package is refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import Outcome, command
from tests.tiny import tiny_model, write_recipe
from tests.transports import HAS_NIXL, stand_in_path

from leaderless.distributed.one_sided.endpoint import NixlEndpoint

POOLS = ["layout.rollout.ranks=0", "layout.policy.ranks=1", "steps=2", "run.max_restarts=0"]


def train(folder: str, library: str, arguments: list[str]) -> tuple[Outcome, int, list[int]]:
    """A run; how many rounds NIXL has moved; and the bytes that stay registered."""
    made, begin = list[NixlEndpoint](), NixlEndpoint.begin
    rounds = 0

    def count(self: NixlEndpoint, *args: object) -> object:
        nonlocal rounds
        rounds += 1
        if self not in made:
            made.append(self)
        return begin(self, *args)  # type: ignore[arg-type]

    package = stand_in_path() if library == "stand-in" else nullcontext()
    transport = "torch" if library == "torch" else "nixl"
    with package, patch.object(NixlEndpoint, "begin", count):
        outcome = command(folder, ["train", *arguments, f"run.transport={transport}", f"name={library}"])
    return outcome, rounds, [endpoint.registered_bytes for endpoint in made]


def numbers(folder: Path, library: str) -> list[dict[str, float]]:
    """What a run has logged about learning."""
    lines = (folder / f"runs/{library}/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    wanted = ("policy/loss", "policy/grad_norm", "reward/mean", "rollout/tokens")
    return [{name: value for name, value in json.loads(line).items() if name in wanted} for line in lines]


def test_rows_and_weights_by_nixl_give_the_same_numbers(ranks: RankPool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), {"batch.updates_per_step": 1})
    found, libraries = {}, ["torch", "stand-in", *["nixl"] * HAS_NIXL]
    for library in libraries:
        found[library] = ranks.run(2, train, str(tmp_path), library, [str(recipe), *POOLS], init_group=False)
        assert all(outcome.code == 0 for outcome, _, _ in found[library]), found[library]
    first = numbers(tmp_path, "torch")
    assert len(first) == 2
    assert first[0].keys() >= {"policy/loss", "policy/grad_norm"}
    assert all(rounds == 0 for _, rounds, _ in found["torch"])
    for library in libraries[1:]:
        assert numbers(tmp_path, library) == first
        assert all(rounds > 2 for _, rounds, _ in found[library])
        assert all(registered == [0] for _, _, registered in found[library])


def test_a_missing_package_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), {"run.transport": "nixl"})
    monkeypatch.setattr("leaderless.distributed.one_sided.library.find_spec", lambda _: None)
    begun = command(str(tmp_path), ["train", str(recipe)])
    assert begun.code == 2
    assert "run.transport: 'nixl' needs the package nixl" in begun.errors.replace("\n", " ")
