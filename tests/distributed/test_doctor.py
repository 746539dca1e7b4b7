"""The doctor's ranks agree on what they see."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import finish, start

from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.run.doctor import collective_checks
from leaderless.run.doctor.finding import DoctorFinding


def findings(folder: str, places: list[str], is_lying: bool) -> list[DoctorFinding]:
    import torch

    world: ProcessGroup = Transport(torch.device("cpu"), 60.0).world
    collective_checks.APPEARS_S = 0.5
    own = Path(folder) / (str(world.rank) if is_lying else "all")
    versions = {"torch": "2.12" if is_lying and world.rank == 1 else "2.13"}
    place = places[world.rank]
    found = collective_checks.compare_versions(versions, place, world) + collective_checks.check_shared(
        own, place, world
    )
    found += collective_checks.check_network(world, places) + collective_checks.check_collective(
        world, torch.device("cpu")
    )
    os.sync()
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_agree_have_no_errors(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    places = [f"host{rank // 2}" if num_ranks == 4 else f"host{rank}" for rank in range(num_ranks)]
    first, *others = ranks.run(num_ranks, findings, str(tmp_path), places, False)
    assert all(other == first for other in others if other[0].name == "torch" and other[-1].name != "sum over ranks")
    by_name = {finding.name: finding for finding in first}
    assert by_name["torch"].value == "2.13"
    assert not [finding for finding in first if finding.level == "error"]
    assert {finding.places for finding in first if finding.name == "bandwidth"} == {("host0-host1",)}
    assert not list((tmp_path / "all").iterdir()), "nothing is left in the folder"


def test_ranks_of_one_machine_measure_their_own_network(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, findings, str(tmp_path), ["here", "here"], False)[0]
    assert {finding.places for finding in found if finding.name == "latency"} == {("ranks 0-1",)}


def test_another_version_and_another_folder_are_errors_on_their_machine(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, findings, str(tmp_path), ["a", "b"], True)[0]
    errors = {(finding.name, finding.value, finding.places) for finding in found if finding.level == "error"}
    assert errors == {
        ("torch", "2.12", ("b",)),
        ("torch", "2.13", ("a",)),
        ("files of rank 0", "do not appear, or an older one does", ("b",)),
    }


def test_the_command_checks_with_workers(tmp_path: Path) -> None:
    outcome = finish(start(tmp_path, "leaderless", "doctor", "--workers", 2))
    assert outcome.code == 0, outcome.output + outcome.errors
    assert "sum over ranks" in outcome.output
    assert "2 ranks" in outcome.output


def test_a_rank_alone_checks_what_takes_no_other(tmp_path: Path) -> None:
    outcome = finish(start(tmp_path, "leaderless", "doctor", "--workers", 1, "--json"))
    assert outcome.code == 0, outcome.output + outcome.errors
    assert "sum over ranks" in outcome.output
    assert "bandwidth" not in outcome.output


def test_a_folder_that_the_first_rank_cannot_write_is_an_error_for_all(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "all").write_text("a file where the folder should be")
    for found in ranks.run(2, findings, str(tmp_path), ["a", "b"], False):
        (error,) = [finding for finding in found if finding.level == "error"]
        assert error.value == f"cannot be written in {tmp_path / 'all'}: File exists"
        assert "run.directory" in error.remedy
