"""A policy learns from clients while they use it: on ranks of all kinds, and after it was started again."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import openai
import pytest
from openai import OpenAI
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import run, start
from tests.tiny import tiny_model

from leaderless.observability.episode_files import episode_files, read_episode_file
from leaderless.observability.run_directory import RunDirectory

GROUPS, RESPONSES = 4, 4


def write_recipe(folder: Path, **sections: object) -> Path:
    settings: dict[str, object] = {
        "name": "online",
        "workflow": "grpo",
        "models": {"policy": tiny_model(num_layers=1)},
        "online": {"port": 0, "feedback": {"yes": 1.0, "no": 0.0}, "feedback_timeout_s": 60.0},
        "data": {"max_prompt_tokens": 8},
        "batch": {"prompts_per_step": GROUPS, "responses_per_prompt": RESPONSES, "micro_batch_tokens": 128},
        "rollout": {"max_response_tokens": 12, "temperature": 0.9},
        "optimizer": {"learning_rate": 1e-3},
        "run": {"directory": str(folder), "timeout_s": 60, "reward_processes": 0},
        "loggers": [],
        "steps": 3,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(settings | sections))
    return path


class Crowd:
    """Clients of some replicas of a run, who like texts with many digits, until the run ends.

    Attributes:
        given: Names of replies and their texts.
        failed: Errors before the end.
    """

    def __init__(self, folder: Path, num_replicas: int = 1, num_choices: int = 1) -> None:
        self.doors, self.num_choices = folder / "online/doors", num_choices
        self.given: dict[str, str] = {}
        self.failed: list[Exception] = []
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(f"{place}", number))
            for place in range(num_replicas)
            for number in range(3)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _work(self, replica: str, number: int) -> None:
        while not (self.doors / replica).exists():
            if self._is_over.wait(0.02):
                return
        client = OpenAI(base_url=(self.doors / replica).read_text().strip(), api_key="none", max_retries=0)
        count = 0
        while not self._is_over.is_set():
            count += 1
            try:
                prompt = f"{number}{count % 10}+"
                reply = client.completions.create(model="policy", prompt=prompt, n=self.num_choices, max_tokens=12)
                for choice in reply.choices:
                    word = "yes" if sum(map(str.isdigit, choice.text)) > 2 else "no"
                    body = {"id": reply.id, "choice": choice.index, "feedback": word}
                    client.post("/feedback", body=body, cast_to=object)
                    self.given[f"{reply.id}/{choice.index}"] = word
            except openai.APIConnectionError:
                return
            except openai.APIStatusError as error:
                if error.code == "run_ending":
                    return
                self.failed.append(error)
                return


def records_of(folder: Path) -> list[dict[str, float]]:
    return list(RunDirectory(folder / "online").read_metrics())


def journal_of(folder: Path) -> list[dict[str, object]]:
    files = [file for file in episode_files(folder / "online/episodes") if file.what == "played"]
    return [line | {"step": file.step} for file in files for line in read_episode_file(file.path)]  # type: ignore[misc]


def train(ranks: RankPool, folder: Path, crowd: Crowd, *arguments: object, num_ranks: int = 1) -> str:
    try:
        outcome = run(ranks, folder, "train", folder / "recipe.yaml", *arguments, num_ranks=num_ranks)
    finally:
        crowd.end()
    assert outcome.code == 0, outcome.errors
    assert not crowd.failed
    return outcome.output


def check_journal(folder: Path, crowd: Crowd, num_steps: int) -> list[dict[str, object]]:
    """Each episode is a response that a client was given, with the reward of what it said last."""
    lines = journal_of(folder)
    assert len(lines) == num_steps * GROUPS * RESPONSES
    for line in lines:
        info, (_, said) = line["info"], line["nodes"]  # type: ignore[misc, assignment]
        assert crowd.given[f"{info['id']}/{info['choice']}"] == info["feedback"]  # type: ignore[index]
        facts = said["said"]  # type: ignore[index]
        assert facts["reward"] == {"yes": 1.0, "no": 0.0}[info["feedback"]]  # type: ignore[index]
        assert facts["temperature"] == 0.9
        assert len(facts["log_probs"]) == len(facts["policy_versions"]) == len(said["tokens"])  # type: ignore[index]
    return lines


def test_a_rank_learns_from_its_clients_and_goes_on_after_a_restart(ranks: RankPool, tmp_path: Path) -> None:
    write_recipe(tmp_path)
    crowd = Crowd(tmp_path, num_choices=2)
    output = train(ranks, tmp_path, crowd)
    assert "clients: http://127.0.0.1:" in output
    check_journal(tmp_path, crowd, 3)
    records = records_of(tmp_path)
    assert len(records) == 3
    for record in records:
        assert record["online/acceptance"] == record["reward/mean"] == record["reward/environment"]
        assert record["online/failed"] == record["online/stale"] == record["episode/failed"] == 0
        assert record["online/requests"] > 0
        assert record["mismatch/abs_mean"] < 1e-4 + record["rollout/staleness"]
    (tmp_path / "online/doors/0").unlink()
    later = Crowd(tmp_path)
    train(ranks, tmp_path, later, "steps=4")
    assert [record["step"] for record in records_of(tmp_path)] == [1, 2, 3, 4]
    crowd.given |= later.given
    lines = check_journal(tmp_path, crowd, 4)
    groups = [{line["group_id"] for line in lines if line["step"] == step} for step in (1, 2, 3, 4)]
    assert groups == [{*range(GROUPS * step, GROUPS * (step + 1))} for step in range(4)]


def test_ranks_that_generate_serve_while_others_train(ranks: RankPool, tmp_path: Path) -> None:
    write_recipe(
        tmp_path,
        layout={"rollout": {"ranks": "0"}, "reward": {"ranks": "0"}, "policy": {"ranks": "1"}},
        channels={"rollout": {"capacity": 1}},
        steps=5,
    )
    crowd = Crowd(tmp_path)
    train(ranks, tmp_path, crowd, num_ranks=2)
    lines = check_journal(tmp_path, crowd, 5)
    records = records_of(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    # Iteration k samples with the weights that training iteration k - 2 has left, and responses may be older.
    for line in lines:
        versions = line["nodes"][1]["said"]["policy_versions"]  # type: ignore[index]
        assert versions == sorted(versions)
        assert versions[-1] <= max(0, line["step"] - 2)  # type: ignore[operator]
    ages: dict[int, list[float]] = {}
    for line in lines:
        for version in line["nodes"][1]["said"]["policy_versions"]:  # type: ignore[index]
            ages.setdefault(line["step"], []).append(line["step"] - 1 - version)  # type: ignore[call-overload, operator]
    num_silent = 0.0  # updates of earlier steps that were not made
    for record in records:
        own = ages[int(record["step"])]
        assert abs(record["rollout/staleness"] - (sum(own) / len(own) - num_silent)) < 1e-6
        num_silent = record.get("policy/updates_without_signal", num_silent)


def test_each_rank_has_an_address_and_learns_from_its_own_clients(ranks: RankPool, tmp_path: Path) -> None:
    write_recipe(tmp_path)
    crowd = Crowd(tmp_path, num_replicas=2)
    output = train(ranks, tmp_path, crowd, num_ranks=2)
    assert "replica 0 of 2; all addresses are in" in output
    lines = check_journal(tmp_path, crowd, 3)
    groups = Counter(line["group_id"] for line in lines)
    assert {*groups.values()} == {RESPONSES}
    assert len(groups) == 3 * GROUPS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_waits_for_feedback_can_be_ended(tmp_path: Path, number: signal.Signals) -> None:
    """By a second Ctrl-C at once, and by another signal in its time."""
    write_recipe(tmp_path)
    training = start(tmp_path, "leaderless", "train", tmp_path / "recipe.yaml", "run.grace_s=1")
    door = tmp_path / "online/doors/0"
    while not door.exists():
        assert training.poll() is None, training.communicate()
        time.sleep(0.02)
    client = OpenAI(base_url=door.read_text().strip(), api_key="none", max_retries=0)
    assert client.completions.create(model="policy", prompt="1+").choices
    training.send_signal(number)
    begin = time.monotonic()
    if number == signal.SIGINT:
        time.sleep(2)
        assert training.poll() is None, "the step may take its time"
        training.send_signal(number)
    output, errors = training.communicate(timeout=60)
    assert time.monotonic() - begin < 30
    assert training.returncode == 128 + number, errors
    said = "step 1 is abandoned after run.grace_s=1 s; the same command begins anew"
    assert (said in output + errors) == (number == signal.SIGTERM)


def test_plan_shows_where_clients_ask(ranks: RankPool, tmp_path: Path) -> None:
    write_recipe(tmp_path)
    shown = run(ranks, tmp_path, "plan", tmp_path / "recipe.yaml", "online.port=8100", "--world-size", "2").output
    assert "http://127.0.0.1:8101/v1" in shown
