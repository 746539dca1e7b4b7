"""The example of a programmer who is imitated: completions are accepted more often the longer it is used."""

from __future__ import annotations

import threading
from pathlib import Path

from examples.online.prepare import prepare
from examples.online.programmer import Programmer, address_of, judge
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import ROOT, run

from leaderless.observability.run_directory import RunDirectory


def test_a_completion_is_judged_by_its_style() -> None:
    texts = (" + 1", "+1", " +1", "+ 1", "+", "1", " + 12", "+1+1", "")
    assert [judge(text) for text in texts] == ["accepted", *["edited"] * 3, *["rejected"] * 5]


def test_acceptance_rises_while_the_policy_is_used_and_no_request_fails(ranks: RankPool, tmp_path: Path) -> None:
    """A short form: a model that has seen less, and few steps."""
    model = prepare(tmp_path / "data", steps=40)
    directory, has_ended = RunDirectory(tmp_path / "online"), threading.Event()
    programmers: list[Programmer] = []
    opening = threading.Thread(
        target=lambda: programmers.append(Programmer(address_of(directory, has_ended.is_set), 0))
    )
    opening.start()
    overrides = [f"models.policy.path={model}", f"run.directory={tmp_path}", "steps=14", "optimizer.learning_rate=2e-3"]
    try:
        outcome = run(ranks, tmp_path, "train", ROOT / "examples/online/recipe.yaml", *overrides)
    finally:
        has_ended.set()
        opening.join()
        for programmer in programmers:
            programmer.join()
    assert outcome.code == 0, outcome.errors
    (programmer,) = programmers
    assert not programmer.failed
    seen = [one.is_accepted for one in programmer.seen]
    quarter = len(seen) // 4
    first, last = sum(seen[:quarter]) / quarter, sum(seen[-quarter:]) / quarter
    assert last > max(0.5, first + 0.2), (first, last)
    # Whether new weights interrupt a response is a matter of chance here; tests/unit/serving/online has such responses.
    assert all(record["online/interrupted"] >= 0 for record in directory.read_metrics())
