"""`leaderless verify`: a run that is as it was written holds, and whatever was changed since is found."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.alone import refused, run_alone
from tests.end_to_end.changed_runs import (
    FORGED,
    KINDS,
    Copy,
    Line,
    chained,
    change_reward,
    checkpoints_of,
    forge,
    lines_of,
)
from tests.end_to_end.cli import Outcome, succeed
from tests.tiny import tiny_model, write_recipe

from leaderless.observability.proof_log import FIRST, ProofLog, sign
from leaderless.observability.run_directory import RunDirectory

SIGNAL = {"reward": {"format": {"pattern": r".*\d.*"}}, "optimizer.learning_rate": 3e-3, "batch.prompts_per_step": 5}
STEPS = {"steps": 4, "checkpoint": {"every_steps": 2, "keep": 9, "asynchronous": False}}
KEY = "a key that only its owner has"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with two checkpoints, a signed one, and one with another seed."""
    folder = tmp_path_factory.mktemp("verify")
    recipe = write_recipe(folder, tiny_model(num_layers=1), SIGNAL | STEPS)
    with pytest.MonkeyPatch.context() as patch:
        for name, key, seed in (("tiny", "", 0), ("signed", KEY, 0), ("other", "", 1)):
            patch.setenv("LEADERLESS_PROOF_KEY", key)
            made = run_alone(folder, "train", recipe, f"name={name}", f"seed={seed}")
            assert made.code == 0, made.errors
    return folder / "runs"


def findings(outcome: Outcome) -> list[Line]:
    found: list[Line] = json.loads(outcome.output)
    return found


def statuses(run: Path, *options: object) -> dict[str, set[str]]:
    """Results by check, of a run that holds."""
    outcome = run_alone(run.parent, "verify", run, "--json", *options)
    found: dict[str, set[str]] = {}
    for one in findings(outcome):
        found.setdefault(one["check"], set()).add(one["status"])
    assert outcome.code == 0, outcome
    return found


def test_a_run_that_was_not_touched_holds(runs: Path) -> None:
    found = statuses(runs / "tiny")
    assert found.pop("signatures") == {"not checked"}
    assert all(status == {"holds"} for status in found.values()), found
    wanted = {"chain", "recipe", "plan", "source", "end", "metrics", "checkpoint", "samples", "rows"}
    wanted |= {"texts", "rewards", "advantages", "log-probs"}
    assert wanted <= found.keys()
    said = run_alone(runs, "verify", runs / "tiny")
    assert said.code == 0
    assert said.output.splitlines()[-1].startswith("the run holds")
    (runs / "key").write_text(f"{KEY}\n")
    assert statuses(runs / "signed", "--key-file", runs / "key")["signatures"] == {"holds"}
    assert KEY not in "".join(path.read_text() for path in (runs / "signed").glob("*.json*"))


def test_lines_hold_what_a_step_was_made_of(runs: Path) -> None:
    *lines, end = lines_of(runs / "tiny/proof.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["previous"] == FIRST
    assert [*end["checkpoints"]] == ["step-000004"]
    assert [*checkpoints_of(lines)] == ["step-000002"]
    for before, line in pairwise(lines):
        assert line["weights"]["policy"]["before"] == before["weights"]["policy"]["after"]
        assert line["weights"]["policy"]["after"] != line["weights"]["policy"]["before"]
        assert line["versions"] == [line["step"] - 1] * 2
    assert {name: rows["count"] for name, rows in lines[0]["rows"].items()} == dict.fromkeys(lines[0]["rows"], 20)
    assert lines[0]["recorded"]["count"] == lines[0]["lines"]["count"] == 16
    logged = lines_of(runs / "tiny/metrics.jsonl")
    assert not [name for line in logged for name in line if "proof" in name]


@pytest.fixture
def copy(runs: Path, tmp_path: Path) -> Copy:
    return Copy(Path(shutil.copytree(runs / "tiny", tmp_path / "tiny")), runs / "other")


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_changed_since_is_found(copy: Copy, kind: str) -> None:
    change, check, step = KINDS[kind]
    change(copy)
    outcome = run_alone(copy.run, "verify", copy.run, "--json")
    assert outcome.code == 1, outcome
    wrong = [one for one in findings(outcome) if one["status"] == "fails"]
    assert (check, step) in {(one["check"], one["step"]) for one in wrong}, wrong
    assert "the run does not hold: " in run_alone(copy.run, "verify", copy.run).output


def test_a_proof_that_was_written_anew_is_found_by_its_key_or_its_last_hash(runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "signed", tmp_path / "signed"))
    copy, head = Copy(run, runs / "other"), lines_of(run / "proof.jsonl")[-1]["hash"]
    key = tmp_path / "key"
    key.write_text(KEY)
    good = run_alone(tmp_path, "verify", run, "--key-file", key, "--head", head)
    assert good.code == 0, good

    def change(lines: list[Line]) -> None:
        lines[0]["libraries"]["torch"] = "2.0.0"
        chained(lines)
        for line in lines:
            line["signature"] = sign(b"another key", line["hash"])

    copy.change_proof(change)
    assert run_alone(tmp_path, "verify", run).code == 0, "nothing else knows of it"
    for options, check in ((("--key-file", key), "signatures"), (("--head", head), "chain")):
        outcome = run_alone(tmp_path, "verify", run, "--json", *options)
        assert outcome.code == 1
        assert [one["check"] for one in findings(outcome) if one["status"] == "fails"] == [check]
    copy.change_proof(lambda lines: [line.pop("signature") for line in lines])
    assert run_alone(tmp_path, "verify", run, "--key-file", key).code == 1, "unsigned lines do not pass for signed ones"


@pytest.mark.parametrize("kind", FORGED)
def test_what_a_run_wrote_wrong_from_the_beginning_is_found(copy: Copy, kind: str) -> None:
    change, check = FORGED[kind]
    forge(copy, change)
    outcome = run_alone(copy.run, "verify", copy.run, "--json", "--rows", 64)
    assert outcome.code == 1, outcome
    wrong = [one for one in findings(outcome) if one["status"] == "fails"]
    assert (check, 3, 0) in {(one["check"], one["step"], one["rank"]) for one in wrong}, wrong
    assert {one["check"] for one in wrong} <= {check, "advantages"}, "hashes fit"
    assert run_alone(copy.run, "verify", copy.run, "--rows", 0).code == 0


def test_the_same_rows_are_recomputed_by_all_who_check(runs: Path) -> None:
    first, second = (run_alone(runs, "verify", runs / "tiny", "--json", "--rows", 3) for _ in range(2))
    assert first.output == second.output
    details = {one["check"]: one["detail"] for one in findings(first)}
    assert details["rewards"].startswith("3 values of 3 samples")
    assert details["log-probs"].startswith("of 3 samples and step-000002")


def test_a_step_alone_is_checked(copy: Copy) -> None:
    change_reward(copy)
    assert run_alone(copy.run, "verify", copy.run, "--step", 2).code == 0
    assert run_alone(copy.run, "verify", copy.run, "--step", 3).code == 1
    assert "the proof has steps 1 to 4" in refused(copy.run, "verify", copy.run, "--step", 9)


def test_a_line_that_a_crash_cut_off_is_named_with_the_remedy(copy: Copy) -> None:
    path = copy.run / "proof.jsonl"
    path.write_text(path.read_text()[:-300])
    outcome = run_alone(copy.run, "verify", copy.run)
    assert outcome.code == 1
    said = " ".join(outcome.output.split())
    assert "the line is incomplete, as after a crash: continue the run" in said


def test_what_has_no_proof_is_refused(copy: Copy, tmp_path: Path) -> None:
    (copy.run / "proof.jsonl").unlink()
    assert "has no proof.jsonl: the run was made by an earlier version" in refused(tmp_path, "verify", copy.run)
    (copy.run / "proof.jsonl").write_text("")
    assert "holds no line: the run has not finished a step" in refused(tmp_path, "verify", copy.run)
    (tmp_path / "project").mkdir()
    outcome = run_alone(tmp_path, "verify", tmp_path / "project")
    assert outcome.code == 2
    assert "holds no config.yaml" in " ".join(outcome.errors.replace("│", " ").split())
    assert "cannot be read" in refused(tmp_path, "verify", copy.run, "--key-file", tmp_path / "none")


def test_a_run_that_was_killed_continues_its_proof(runs: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), SIGNAL | STEPS)
    run = Path(shutil.copytree(runs / "tiny", tmp_path / "runs/tiny"))
    before = lines_of(run / "proof.jsonl")
    shutil.rmtree(run / "checkpoints/step-000004")
    with (run / "proof.jsonl").open("a") as file:
        file.write('{"step": 5, "previous"')
    shutil.copy(runs.parent / "recipe.yaml", recipe)
    outcome = run_alone(tmp_path, "train", run / "config.yaml", f"run.directory={tmp_path / 'runs'}", "steps=5")
    assert outcome.code == 0, outcome.errors
    assert "continuing from step 2" in outcome.output + outcome.errors
    lines = lines_of(run / "proof.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 5]
    assert lines[:2] == before[:2]
    same = ("rows", "recorded", "lines", "weights")
    assert [{name: line[name] for name in same} for line in lines[2:4]] == [
        {name: line[name] for name in same} for line in before[2:4]
    ]
    found = statuses(run)
    assert found["chain"] == found["checkpoint"] == found["recipe"] == {"holds"}


def test_what_an_earlier_attempt_has_left_is_named(runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "tiny", tmp_path / "tiny"))
    log = ProofLog(RunDirectory(run), None)
    log.open(3)
    copy = Copy(run, runs / "other")
    copy.change_lines("metrics.jsonl", lambda lines: lines.__delitem__(slice(3, None)))
    line = lines_of(runs / "tiny/proof.jsonl")[2]
    log.write(
        3, {name: value for name, value in line.items() if name not in {"step", "previous", "hash", "checkpoints"}}
    )
    assert [*lines_of(run / "proof.jsonl")[2]["left"]] == ["step-000004"]
    shutil.copy(run / "samples/step-000003.rank-0.jsonl", run / "samples/step-000003.rank-7.jsonl")
    found = [one for one in findings(run_alone(tmp_path, "verify", run, "--json")) if one["status"] == "not checked"]
    said = {one["check"]: one["detail"] for one in found}
    assert said["checkpoint"].startswith("step-000004 is of an attempt that the run did not continue")
    assert said["samples"].startswith("1 files are of ranks that recorded nothing")


def test_sums_do_not_depend_on_the_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    changes = SIGNAL | {"steps": 1, "run.recorded_prompts": 0}
    made: list[Line] = []
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        recipe = write_recipe(folder, tiny_model(num_layers=1), changes)
        succeed(ranks, folder, "train", recipe, num_ranks=num_ranks)
        made.append(lines_of(folder / "runs/tiny/proof.jsonl")[0])
        found = statuses(folder / "runs/tiny")
        assert found["checkpoint"] == {"holds"}, "a checkpoint of two ranks has the weights of both"
        assert found["samples"] == found["rewards"] == {"not checked"}, "none are recorded"
    alone, together = made
    assert together["world_size"] == 2
    assert together["rows"]["advantage"] == alone["rows"]["advantage"]
    assert together["weights"]["policy"]["before"] == alone["weights"]["policy"]["before"]
