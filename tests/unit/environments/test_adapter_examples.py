"""What the examples of adapters show their models, and by whom they are measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from examples.nim.game import AgainstRandom, random_move
from examples.nim.prepare import SIZE, played
from examples.nim.prepare import prepare as prepare_nim
from examples.spelling.prepare import prepare as prepare_words
from transformers import AutoTokenizer

from leaderless.base.values import Json
from leaderless.environments.adapters.reasoning_gym_tasks import score, solved
from leaderless.environments.protocol import Turn
from leaderless.models.loading.tiny import END_TOKEN
from leaderless.rewards.protocol import RewardInput


def rows(folder: Path, name: str) -> list[dict[str, Json]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NUM_SHOWN", "NUM_TASKS"):
        monkeypatch.setattr(f"examples.spelling.prepare.{name}", 2000)


@pytest.mark.usefixtures("few_words")
def test_an_unsure_answer_is_nearly_right_and_not_solved(tmp_path: Path) -> None:
    prepare_words(tmp_path)
    shown, train, test = (rows(tmp_path, name) for name in ("demonstrations", "train", "test"))
    assert 0.65 < fmean(str(row["answer"]).endswith("?") for row in shown) < 0.75
    known = {row["question"] for row in (*shown, *train)}
    assert len(test) == 256
    assert not known & {row["question"] for row in test}
    right = RewardInput(str(test[0]["question"]), str(test[0]["answer"]), None, test[0], is_truncated=False)
    unsure = replace(right, response=f"{right.response}?")
    assert (solved(right).value, solved(unsure).value) == (1.0, 0.0)
    assert score(unsure).value > 0.7, "partial credit would hardly tell them apart"


@pytest.mark.usefixtures("few_words")
def test_no_two_seeds_share_their_tasks(tmp_path: Path) -> None:
    for seed in (0, 1):
        prepare_words(tmp_path / str(seed), seed)
    files = [(seed, name) for seed in (0, 1) for name in ("train", "test")]
    tasks = [{row["seed"] + row["index"] for row in rows(tmp_path / str(seed), name)} for seed, name in files]
    assert len(set.union(*tasks)) == sum(map(len, tasks)), "the package makes a task of the sum of its seed and number"


def test_what_random_players_show_is_allowed(tmp_path: Path) -> None:
    for game in (played(Random(seed)) for seed in range(50)):
        told = "".join(message["content"] for messages in game for message in messages if message["role"] == "user")
        assert "invalid" not in told
        assert {message["role"] for messages in game for message in messages[1::2]} == {"assistant"}


def test_the_model_of_nim_can_write_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.nim.prepare.NUM_GAMES", 20)
    prepare_nim(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for row in rows(tmp_path, "demonstrations"):
        text = f"{row['prompt']}{row['response']}{END_TOKEN}"
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert len(tokens) < len(text) / 3


def test_a_random_player_wins_every_other_game_and_nonsense_none() -> None:
    def outcome(seed: int, *, is_random: bool) -> float:
        game, rng = AgainstRandom(), Random(f"policy {seed}")
        turn = Turn(game.reset({}, Random(seed)))
        while not turn.done:
            piles = [int(size) for size in SIZE.findall(str(turn.observation))[-3:]]
            turn = game.act(random_move(piles, rng) if is_random else "hello")
        assert isinstance(turn.reward, float)
        return turn.reward

    assert 0.44 < fmean(outcome(seed, is_random=True) for seed in range(600)) < 0.56
    assert not any(outcome(seed, is_random=False) for seed in range(20))


def test_both_seats_are_played_against_the_random_player() -> None:
    told = {str(AgainstRandom().reset({}, Random(seed))) for seed in range(20)}
    assert {text.count("removes") for text in told} == {0, 1}
    assert {re.findall(r"Player (\d)!", text)[0] for text in told} == {"0", "1"}
