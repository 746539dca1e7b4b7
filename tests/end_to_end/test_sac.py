"""Runs that learn from transitions: ranks change nothing, and neither does a kill at any moment."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
from examples.robots.rlpd import record
from tests.chaos.stage import COMMIT, VARIABLE, WRITE, Kill
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import ROOT, finish, run, start, succeed
from tests.end_to_end.test_bodies import BROKEN, NOT_STOPPED, numbers
from tests.small_bodies import settings_of
from tests.unit.embodied.robots.serving import serving

from leaderless.embodied.data.replay_buffer import RECORDS_FILE, ReplayBuffer
from leaderless.embodied.robots.environment import RobotEnvironment
from leaderless.embodied.robots.simulated_arm import dummy
from leaderless.embodied.simulators.protocol import Continuous, Spaces
from leaderless.embodied.stages.sac import FOLDER

SHOWN = Spaces({"front": (8, 8)}, 6, Continuous((-1.0, -1.0), (1.0, 1.0)), 50), 2
"""What the dummy arm with a camera shows and takes, and steps of a decision."""


def sac_recipe(folder: Path, **changes: object) -> Path:
    """Write a recipe that learns from its own attempts and demonstrations, in a folder."""
    folder.mkdir(exist_ok=True)
    small = {"batch_size": 16, "hidden_size": 8, "num_heads": 3, "first_decisions": 8, "critic_updates": 2}
    settings = settings_of(folder, workflow="imitation")
    settings |= {
        "workflow": "sac",
        "models": {"policy": {"body": {"type": "squashed", "options": {"chunk": 2, "hidden_size": 8}}}},
        "algorithm": {"sac": small},
        "optimizer": {"learning_rate": 3e-3},
        "batch": {"prompts_per_step": 4, "responses_per_prompt": 1},
        "checkpoint": {"every_steps": 1},
        "steps": 4,
        **changes,
    }
    settings["data"]["train"] = {"path": str(folder / "tasks.jsonl")}  # type: ignore[index]
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(settings))
    return path


def kept(folder: Path) -> dict[str, bytes]:
    """The transitions of a run, file by file."""
    root = folder / "runs/line" / FOLDER
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.glob(f"*/{RECORDS_FILE}"))}


def test_ranks_change_no_number_and_a_run_continues_with_another_number_of_them(
    ranks: RankPool, tmp_path: Path
) -> None:
    for name in ("one", "more"):
        sac_recipe(tmp_path / name, steps=4, evaluation={"every_steps": 2})
    printed = succeed(ranks, tmp_path / "one", "train", "recipe.yaml")
    assert "accuracy" in printed
    expected = numbers(tmp_path / "one")
    last = expected[-1]
    assert last["sac/updates"] > 0
    assert last["sac/demonstrations"] > 16
    succeed(ranks, tmp_path / "more", "train", "recipe.yaml", "steps=2", num_ranks=2)
    assert len(kept(tmp_path / "more")) == 2
    succeed(ranks, tmp_path / "more", "train", "recipe.yaml")
    for row, other in zip(numbers(tmp_path / "more"), expected, strict=True):
        assert row == pytest.approx(other, abs=1e-4)


def test_ranks_whose_episodes_all_fail_learn_from_those_of_others(ranks: RankPool, tmp_path: Path) -> None:
    def broken(folder: Path, where: list[int], **changes: object) -> Path:
        body = {**BROKEN, "options": {"ranks": where}, "demonstrations": str(folder / "demonstrations")}
        return sac_recipe(folder, body=body, steps=3, **changes)

    broken(tmp_path / "stopped", [0])
    outcome = run(ranks, tmp_path / "stopped", "train", "recipe.yaml")
    assert "node 'reward': guards.reward_failures_limit=0.5: 1 is above it" in " ".join(outcome.errors.split())
    assert "the arm has no power" in outcome.errors
    broken(tmp_path / "all", [0], **NOT_STOPPED)
    succeed(ranks, tmp_path / "all", "train", "recipe.yaml")
    assert [(row["body/failed"], row["sac/transitions"]) for row in numbers(tmp_path / "all")] == [(1.0, 0.0)] * 3
    broken(tmp_path / "one", [1])
    succeed(ranks, tmp_path / "one", "train", "recipe.yaml", num_ranks=2)
    assert all(row["body/failed"] == 0.5 for row in numbers(tmp_path / "one"))
    assert numbers(tmp_path / "one")[-1]["sac/transitions"] > 0


DELAYS_S = {"act": 0.0, "remember": 0.002, "policy": 0.01, WRITE: 0.0, COMMIT: 0.0}
"""Seconds from the begin of a phase to a kill, by phase."""


@pytest.mark.parametrize(
    "phases", [["remember", "policy", WRITE], pytest.param([*DELAYS_S], marks=pytest.mark.thorough)]
)
def test_a_kill_in_any_phase_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phases: list[str]) -> None:
    """Workers are killed while they remember, learn and write a checkpoint; in the long form, at other times too."""
    kills = [Kill(0, phase, step, DELAYS_S[phase]) for step, phase in enumerate(phases, 2)]
    steps = len(phases) + 1
    for name, planned in (("plain", []), ("killed", kills)):
        folder = tmp_path / name
        body = {"type": "tests.chaos.bodies:Line", "num_environments": 8, "max_steps": 6}
        body["demonstrations"] = str(folder / "demonstrations")
        traced = {"directory": str(folder / "runs"), "trace_steps": steps, "max_restarts": 9}
        sac_recipe(folder, body=body, run=traced, steps=steps)
        (folder / "kills.json").write_text(json.dumps([asdict(kill) for kill in planned]))
        monkeypatch.setenv(VARIABLE, str(folder))
        outcome = finish(start(folder, "leaderless", "train", "recipe.yaml", "--workers", 1))
        assert outcome.code == 0, outcome.errors
    done = [json.loads(path.read_text()) for path in sorted((tmp_path / "killed").glob("killed-*.json"))]
    assert len(done) == len(kills)
    hits = [kill.phase in note["phases"] for kill, note in zip(kills, done, strict=True)]
    assert all(hit or kill.delay_s for kill, hit in zip(kills, hits, strict=True)), (
        "on a busy machine, a delay is longer"
    )
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "plain")
    assert kept(tmp_path / "killed") == kept(tmp_path / "plain")
    (weights, *_), (others, *_) = (
        [
            path.read_bytes()
            for path in sorted(
                (tmp_path / name / "runs/line").glob(f"checkpoints/step-{steps:06d}/policy/*.safetensors")
            )
        ]
        for name in ("killed", "plain")
    )
    assert weights == others


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": {"policy": {"body": "mlp"}}}, "SAC trains policies of the type squashed or squashed_cnn"),
        ({"workflow": "grpo", "batch": {}}, "use the workflow sac, or leave it out"),
        (
            {"models": {"policy": {"body": "squashed", "gradient_checkpointing": True}}},
            "models.policy.gradient_checkpointing: cannot be combined with node",
        ),
        ({"optimizer": {"schedule": "cosine"}}, "which learns by SAC: leave it out"),
        ({"algorithm": {"sac": {"subset_size": 4, "num_heads": 3}}}, "must be at most num_heads=3"),
    ],
    ids=["policy", "workflow", "checkpointing", "schedule", "subset"],
)
def test_what_sac_cannot_do_is_refused(
    ranks: RankPool, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    sac_recipe(tmp_path / "run", **changes)
    outcome = run(ranks, tmp_path / "run", "train", "recipe.yaml")
    assert outcome.code == 2, outcome.errors
    assert message in " ".join(outcome.errors.split())


def test_the_recipe_of_an_arm_learns_from_the_script_of_its_example(ranks: RankPool, tmp_path: Path) -> None:
    with serving(dummy()) as served:
        with closing(RobotEnvironment(1, [str(served.address)])) as arm:
            assert record(arm, tmp_path, 3) == 3
        (tmp_path / "recipe.yaml").write_text((ROOT / "recipes/robots/rlpd.yaml").read_text())
        changes = [
            f"body.options.addresses=[{served.address}]",
            f"body.demonstrations={tmp_path}/demonstrations",
            f"data.train.path={tmp_path}/train.jsonl",
            f"data.evaluation.path={tmp_path}/test.jsonl",
            f"run.directory={tmp_path}/runs",
            "evaluation={every_steps: 3, max_prompts: 2}",
        ]
        succeed(ranks, tmp_path, "train", "recipe.yaml", "steps=3", "algorithm.sac.first_decisions=40", *changes)
    rows = numbers(tmp_path, "rlpd")
    assert rows[-1]["sac/updates"] > 0
    assert rows[-1]["sac/transitions"] == sum(row["body/decisions"] for row in rows if row["step"])


def test_what_a_person_does_is_kept_and_shown_in_a_run(ranks: RankPool, tmp_path: Path) -> None:
    """Episodes in which a person acted count, their transitions are demonstrations, and films of all are kept."""
    folder = tmp_path / "run"
    with serving(dummy(has_human=True, patience_steps=3, far=0.05, camera_size=8)) as served:
        options = {"addresses": [str(served.address)], "allows_help": True}
        body = {"type": "robots", "options": options, "num_environments": 1}
        batch = {"prompts_per_step": 2, "responses_per_prompt": 1}
        sac_recipe(folder, body=body, batch=batch, steps=2)
        succeed(ranks, folder, "train", "recipe.yaml")
    rows = [row for row in numbers(folder) if row["step"]]
    assert all(row["body/failed"] == 0 for row in rows)
    with closing(ReplayBuffer(folder / "runs/line" / FOLDER / "0", *SHOWN)) as buffer:
        helped = int(buffer.places()[2].sum())
        assert rows[-1]["sac/transitions"] == len(buffer) > helped
    assert rows[-1]["sac/demonstrations"] == helped > 0
    lines = [json.loads(line) for path in (folder / "runs/line/samples").glob("*.jsonl") for line in path.open()]
    films = [line["images"][0] for line in lines if line["step"] == 2]
    assert len(films) == 2
    assert all(film.startswith("data:image/png;base64,") for film in films)
    assert "advantage" not in lines[0]
    assert films[0] in (folder / "runs/line/report.html").read_text()
    seconds = [json.loads(line) for line in (folder / "runs/line/metrics.jsonl").open()][-1]
    assert seconds["seconds/0/data"] > seconds["seconds/0/score"], "to remember is no scoring"


def test_transitions_that_are_missing_are_noticed(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sac_recipe(folder)
    succeed(ranks, folder, "train", "recipe.yaml", "steps=2")
    for path in (folder / "runs/line" / FOLDER).glob(f"*/{RECORDS_FILE}"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    outcome = run(ranks, folder, "train", "recipe.yaml", "steps=3")
    assert outcome.code != 0
    assert "bring back its files, or begin again with --fresh" in " ".join(outcome.errors.split())
