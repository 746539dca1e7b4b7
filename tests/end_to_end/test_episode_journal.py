"""The journal of episodes: what a run leaves, and that it is played and graded again from it alone."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from random import Random

import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import metrics, run, succeed
from tests.tiny import tiny_model, write_additions, write_recipe

from leaderless.environments.protocol import Environment, Observation, Task, Turn
from leaderless.observability.episode_files import episode_files, read_episode_file
from leaderless.observability.report.run_files import read_run
from leaderless.rewards.protocol import RewardInput

NUM_STEPS = 2
SHORT, LONG = f"{__name__}:share_of_digits", f"{__name__}:length"


class Talk(Environment):
    """Says random digits; a play may fail. With `is_louder`, it says something else in the second turn."""

    def __init__(self, *, is_louder: bool = False) -> None:
        self.is_louder = is_louder

    def reset(self, task: Task, rng: Random) -> Observation:
        self.rng, self.turn = rng, 0
        return f"{task['question']}{rng.randrange(10)}"

    def act(self, text: str) -> Turn:
        self.turn += 1
        if "7" in text:
            raise RuntimeError("unlucky")
        told = f"<{self.rng.randrange(10)}>" + "!" * (self.is_louder and self.turn == 2)
        return Turn(told, reward=0.125 * len(text), done=self.turn == 3 or "3" in text, info={"turn": self.turn})


def share_of_digits(sample: RewardInput) -> float:
    return sum(letter.isdigit() for letter in sample.response) / max(1, len(sample.response))


def length(sample: RewardInput) -> float:
    """Letters of the whole episode, and how often others spoke."""
    return sum(len(passage.text) * (1 if passage.is_sampled else 100) for passage in sample.transcript)


@pytest.fixture(scope="module")
def folder(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and with its run on two ranks."""
    folder = tmp_path_factory.mktemp("journal")
    held_out = {"path": str(write_additions(folder / "test.jsonl", 4)), "prompt": "question", "template": "plain"}
    changes = {
        "environment": {"type": f"{__name__}:Talk", "max_turns": 4, "max_episode_tokens": 40},
        "reward": {SHORT: 1.0},
        "optimizer.learning_rate": 1e-2,
        "data.max_prompt_tokens": 10,
        "data.evaluation": held_out,
        "evaluation": {"every_steps": 2},
        "batch.micro_batch_tokens": 128,
        "guards": {"reward_failures_limit": None},
        "steps": NUM_STEPS,
    }
    write_recipe(folder, tiny_model(num_layers=1), changes)
    succeed(ranks, folder, "train", "recipe.yaml", num_ranks=2)
    return folder


def test_each_rank_writes_its_episodes_of_each_step(folder: Path) -> None:
    files = episode_files(folder / "runs/tiny/episodes")
    wanted = {("step", step) for step in (1, 2)} | {("evaluation", step) for step in (0, 2)}
    assert {(file.kind, file.step) for file in files} == wanted
    assert {file.rank for file in files} == {0, 1}
    lines = [line for file in files if file.what == "played" for line in read_episode_file(file.path)]
    of_step = [line for file in files if file[:3] == ("step", 1, "played") for line in read_episode_file(file.path)]
    assert len({line["id"] for line in of_step}) == len(of_step) == 6 * 4
    assert 0 < sum(line["cause"] == "environment" for line in lines) < len(lines) / 2


def test_the_trace_says_how_long_episodes_have_waited(folder: Path) -> None:
    for rank in (0, 1):
        events = json.loads((folder / f"runs/tiny/trace/rank-{rank}.json").read_text(encoding="utf-8"))
        facts = [event["args"] for event in events if event["name"] == "rollout" and event["args"]["step"] == 2]
        assert [len(one["waits"]) for one in facts] == [len(one["lengths"]) for one in facts] == [facts[0]["rows"]]
        assert sum(facts[0]["waits"]) > 0


def test_the_report_has_the_conversations_of_recorded_samples(folder: Path) -> None:
    run_files = read_run(folder / "runs/tiny")
    for samples in (run_files.samples, run_files.held_out):
        for step in samples.steps:
            shown = {sample.episode for group in step.groups for sample in group.samples}
            assert shown
            assert shown == step.episodes.keys()
    assert not run_files.notes


def test_episodes_are_played_again_byte_for_byte(ranks: RankPool, folder: Path) -> None:
    for options in ([], ["--from-journal"], ["--evaluation"]):
        output = succeed(ranks, folder, "env", "replay", "runs/tiny", *options)
        num = 2 * 4 if options == ["--evaluation"] else NUM_STEPS * 6 * 4
        assert f"{num} episodes played again; none differs" in output
    assert "episodes played again" in succeed(
        ranks, folder, "env", "replay", "runs/tiny/episodes/step-000002/played.rank-1.jsonl.gz"
    )


def test_a_changed_environment_is_found(ranks: RankPool, folder: Path) -> None:
    outcome = run(ranks, folder, "env", "replay", "runs/tiny", "environment.options={is_louder: true}", "--step", "1")
    assert outcome.code == 1
    assert re.search(
        r"step 1, episode \d+, answer of the environment to turn 2:\n  expected <\d>\n  found    <\d>!", outcome.output
    )
    outcome = run(ranks, folder, "env", "replay", "runs/tiny", "environment.max_turns=2")
    assert outcome.code == 1
    assert re.search(r"end of the episode, is_cut:\n  expected false\n  found    true", outcome.output)


def test_a_changed_token_is_found_without_the_environment(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "runs/tiny", tmp_path / "runs/tiny")
    path = tmp_path / "runs/tiny/episodes/step-000001/played.rank-0.jsonl.gz"
    lines = list(read_episode_file(path))
    changed = next(line for line in lines if not line["cause"])
    told = changed["nodes"][2]["tokens"]  # type: ignore[index,call-overload]
    told[0] += 1  # type: ignore[index,operator]
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    outcome = run(ranks, folder, "env", "replay", str(tmp_path / "runs/tiny"), "--from-journal", "--step", "1")
    assert outcome.code == 1
    assert f"episode {changed['id']}, what is told before turn 2, tokens:" in outcome.output
    assert "1 of 24 episodes differ" in outcome.output


def test_grading_again_equals_a_run_with_these_rewards(ranks: RankPool, folder: Path) -> None:
    from leaderless.run.episodes import RunEpisodes

    succeed(ranks, folder, "train", "recipe.yaml", "name=other", f"reward={{'{LONG}': 1.0}}", "steps=1", num_ranks=2)
    other = RunEpisodes.of(folder / "runs/other").graded("step", 1)
    first = RunEpisodes.of(folder / "runs/tiny")
    (folder / "rewards.yaml").write_text(f"reward: {{'{LONG}': 1.0}}\n")
    ((_, graded),) = first.regrade([1], [str(folder / "rewards.yaml")])
    assert len(graded) == len(other) == 24
    for one in graded:
        known = other[one.part.number, one.part.actor]
        assert (one.new.value, one.new.is_valid) == (known["reward"], known["is_valid"])
        assert json.loads(json.dumps(one.new.details)) == known["details"]
    values = [one.new.value for one in graded if one.new.is_valid]
    assert len(set(values)) > 3, "the rewards tell episodes apart"
    logged = metrics(folder / "runs/other")[1]
    assert logged["reward/mean"] == pytest.approx(sum(values) / len(values))
    output = succeed(ranks, folder, "env", "regrade", "runs/tiny", "--reward", "rewards.yaml", "--step", "1")
    assert f"{sum(values) / len(values):.4f}" in output
    before = metrics(folder / "runs/tiny")[1]["reward/mean"]
    assert f"{before:.4f}" in output
    assert "rewards that have changed (the largest 10 of" in output


def test_a_resumed_run_leaves_no_later_episodes_behind(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "runs/tiny", tmp_path / "runs/tiny")
    files = tmp_path / "runs/tiny/episodes"
    for kind, rank in (("step", 0), ("step", 5), ("evaluation", 1)):
        later = files / f"{kind}-000009" / f"played.rank-{rank}.jsonl.gz"
        later.parent.mkdir(exist_ok=True)
        later.write_bytes(b"")
    arguments = ["train", "recipe.yaml", "steps=3", f"run.directory={tmp_path / 'runs'}"]
    succeed(ranks, folder, *arguments, "run.kept_episodes=1", num_ranks=2)
    found = {(file.kind, file.step) for file in episode_files(files)}
    assert found == {("step", 1), ("step", 3), ("evaluation", 2), ("evaluation", 3)}
