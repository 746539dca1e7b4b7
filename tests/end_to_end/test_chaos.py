"""Workers that are killed while they write arrive at the same curve as an undisturbed run; see `make chaos`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.chaos.__main__ import main
from tests.chaos.harness import check, run
from tests.chaos.stage import COMMIT, VARIABLE, WRITE, Kill

STEPS = 4


def test_workers_killed_around_a_checkpoint_come_to_the_same_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    kills = [
        Kill(rank=1, phase=WRITE, step=2, delay_s=0.001),
        Kill(rank=0, phase=COMMIT, step=3, delay_s=0.0),
    ]
    undisturbed = run(tmp_path / "undisturbed", "2 workers", [], STEPS)
    disturbed = run(tmp_path / "disturbed", "2 workers", kills, STEPS)
    assert [kill["rank"] for kill in disturbed.kills] == [kill.rank for kill in kills]
    assert disturbed.num_starts == 1, "it goes on by itself"
    check(disturbed, undisturbed)


@pytest.mark.thorough
def test_workers_killed_in_any_phase_come_to_the_same_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(sys, "argv", ["chaos", "--kills", "40"])
    main()
