"""A run with everything offloaded has the numbers of one with nothing offloaded, and continues from its checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import metrics, run
from tests.tiny import tiny_model, write_recipe

SIGNAL = {"reward": {"format": {"pattern": r".*\d.*"}}, "algorithm.kl.coefficient": 0.1}


def recomputed(*, is_away: bool) -> dict[str, object]:
    """The model, whose layers are recomputed."""
    path = tiny_model(num_layers=2)
    return {"models.policy": {"path": path, "gradient_checkpointing": True, "offload_activations": is_away}}


NOTHING = SIGNAL | recomputed(is_away=False)
EVERYTHING = SIGNAL | recomputed(is_away=True) | {"optimizer.offload": "disk", "training.offload_frozen": "disk"}


def numbers(folder: Path) -> list[Mapping[str, float]]:
    names = ("policy/loss", "policy/grad_norm", "policy/kl", "reward/mean")
    return [{name: row[name] for name in names} for row in metrics(folder) if row["step"]]


def digest(run_folder: Path) -> str:
    """Digest of the weights and states of the last checkpoint."""
    files = sorted((run_folder / "checkpoints/step-000002/policy").glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_bit_of_a_run_depends_on_what_is_offloaded(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    found = {}
    for name, changes in (("nothing", NOTHING), ("everything", EVERYTHING)):
        recipe = write_recipe(tmp_path, tiny_model(num_layers=2), changes | {"name": name})
        outcome = run(ranks, tmp_path, "train", recipe, num_ranks=num_ranks)
        assert outcome.code == 0, outcome.errors
        folder = tmp_path / "runs" / name
        found[name] = numbers(folder), digest(folder)
        assert not (folder / "offload").exists()
    assert found["nothing"] == found["everything"]
    assert found["nothing"][0][-1]["policy/grad_norm"] > 0


def test_places_that_are_none_are_refused_before_anything_is_loaded(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "below"
    for changes, message in (
        ({"optimizer.offload": "host"}, "in host memory already: set disk, or leave it out"),
        (SIGNAL | {"training.offload_frozen": "host"}, "in host memory already: set disk, or leave it out"),
        ({"optimizer.offload": "disk", "run.offload_folder": str(below)}, "cannot be written to"),
    ):
        recipe = write_recipe(tmp_path, tiny_model(num_layers=1), changes)
        outcome = run(ranks, tmp_path, "train", recipe)
        assert outcome.code != 0
        assert message in " ".join(outcome.errors.split())
        assert "step 1/2" not in outcome.errors
