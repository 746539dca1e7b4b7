"""What algorithms add to the training of a body: comparison over ranks, a penalty, other advantages, imitation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import succeed
from tests.end_to_end.test_bodies import numbers
from tests.small_bodies import body_recipe
from tests.small_vla import write_small_vla


def trained(ranks: RankPool, folder: Path, num_ranks: int = 1, **changes: object) -> list[dict[str, float]]:
    """The numbers of a run in a folder."""
    folder.mkdir()
    body_recipe(folder, **changes)  # type: ignore[arg-type]
    succeed(ranks, folder, "train", "recipe.yaml", num_ranks=num_ranks)
    return numbers(folder)


def test_srpo_by_task_compares_episodes_of_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """All rows have one task: the worth of a failed episode depends on successful ones on the other rank."""
    (tmp_path / "levels.jsonl").write_text("".join(f'{{"level": 1, "task": {n}}}\n' for n in range(64)))
    by_task = {
        "workflow": "srpo",
        "steps": 3,
        "algorithm": {"advantage": {"type": "srpo", "task": "level"}},
        "data.train": {"path": str(tmp_path / "levels.jsonl")},
    }
    one = trained(ranks, tmp_path / "one", **by_task)
    two = trained(ranks, tmp_path / "two", 2, **by_task)
    for row, other in zip(two, one, strict=True):
        assert row == pytest.approx(other, abs=2e-5)
        assert 0 < row["body/success"] < 1
        assert row["body/success"] < row["srpo/reward"] < 1, "failed episodes are worth something"
    alone = trained(ranks, tmp_path / "alone", **{**by_task, "algorithm": {"advantage": {"type": "srpo"}}})
    assert alone[0]["srpo/reward"] != pytest.approx(one[0]["srpo/reward"], abs=1e-4)


def test_the_distance_to_the_reference_is_a_part_of_the_loss(ranks: RankPool, tmp_path: Path) -> None:
    """In the first step policy and reference are the same, so that runs part in the second, which plays the same."""
    given: dict[str, object] = {"steps": 2, "algorithm.aggregation": "token_mean"}
    plain = trained(ranks, tmp_path / "plain", **given)
    penalized = trained(ranks, tmp_path / "penalized", **given, **{"algorithm.kl.coefficient": 5.0})
    assert penalized[0]["policy/loss"] == pytest.approx(plain[0]["policy/loss"], abs=1e-6)
    assert penalized[0]["policy/kl"] == pytest.approx(0, abs=1e-6)
    first, second = plain[1], penalized[1]
    assert second["reward/mean"] == first["reward/mean"]
    assert second["policy/kl"] > 1e-5
    assert second["policy/loss"] == pytest.approx(first["policy/loss"] + 5.0 * second["policy/kl"], rel=1e-3, abs=1e-5)
    assert second["policy/grad_norm"] != pytest.approx(first["policy/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("workflow", ["rloo", "reinforce_pp"])
def test_other_advantages_train_a_body_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path, workflow: str) -> None:
    given = {"workflow": workflow, "steps": 2, "algorithm.kl.coefficient": 0.05}
    one = trained(ranks, tmp_path / "one", **given)
    two = trained(ranks, tmp_path / "two", 2, **given)
    for row, other in zip(two, one, strict=True):
        assert row == pytest.approx(other, abs=2e-5)
        assert row["policy/grad_norm"] > 0


def test_a_small_vla_imitates_demonstrations(ranks: RankPool, tmp_path: Path) -> None:
    folder = write_small_vla(tmp_path / "vla")
    about = json.loads((folder / "config.json").read_text())
    about["norm_stats"]["line"] = {"action": {"q01": [-1.0], "q99": [1.0]}}
    (folder / "config.json").write_text(json.dumps(about))
    options = {"path": str(folder), "statistics": "line", "chunk": 2, "cameras": ["top"]}
    rows = trained(
        ranks,
        tmp_path / "run",
        workflow="imitation",
        steps=12,
        **{
            "models.policy.body": {"type": "openvla_oft", "options": options},
            "data.evaluation": None,
            "batch": {"prompts_per_step": 4, "micro_batch_tokens": 16},
            "optimizer.learning_rate": 1e-2,
        },
    )
    first, last = (sum(row["policy/loss"] for row in some) / 3 for some in (rows[:3], rows[-3:]))
    assert last < 0.8 * first
