"""Environments of other packages, with the packages themselves."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from random import Random

import pytest
from tests.unit.environments.scripted import ScriptedEngine, play
from tests.unit.environments.test_play import Tokenizer

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.environment import EnvironmentConfig
from leaderless.environments.adapters import gymnasium_text, needed, reasoning_gym_tasks, textarena_games
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.protocol import Environment, EpisodeFailed, Turn
from leaderless.environments.registry import BUILT_IN, environment_class, world_maker
from leaderless.environments.remote import ProcessEnvironment
from leaderless.rewards.protocol import RewardInput, RewardResult


def begin(type_: str, task: dict[str, Json] | None = None, seed: int = 0, **options: Json) -> tuple[Environment, str]:
    """An episode as a recipe would begin it, and what the policy is told first."""
    config = EnvironmentConfig.model_validate({"type": type_, "options": options})
    found = environment_class(config)
    assert found is not None
    environment = found(**options)
    told = environment.reset(task or {}, Random(seed))
    assert isinstance(told, str)
    return environment, told


def act(environment: Environment, text: str) -> Turn:
    turn = environment.act(text)
    assert isinstance(turn, Turn)
    return turn


def test_each_has_a_name() -> None:
    for name, options in OPTIONS.items():
        assert name in BUILT_IN
        assert environment_class(EnvironmentConfig.model_validate({"type": name, "options": options}))


OPTIONS: dict[str, dict[str, Json]] = {
    "gymnasium": {"id": "FrozenLake-v1"},
    "reasoning_gym": {"dataset": "chain_sum"},
    "search_r1": {"pages": "pages.jsonl"},
    "textarena": {"id": "TicTacToe-v0"},
    "textarena_solo": {"id": "GuessTheNumber-v0"},
}


def test_a_missing_package_is_named_with_the_remedy() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"no package 'no_such': .*pip install --editable '\.\[extra\]'"):
        needed("no_such", "extra")


def test_a_lake_is_crossed_by_naming_directions() -> None:
    environment, told = begin("gymnasium", id="FrozenLake-v1", options={"is_slippery": False})
    assert told.endswith("Actions: left, down, right, up.\n[S: on red]FFF\nFHFH\nFFFH\nHFFG")
    assert act(environment, "I wait.") == Turn("Name one of the actions: left, down, right, up.")
    turns = [act(environment, f"I go {way}.") for way in ("down", "down", "right", "not left but down", "right")]
    assert turns[0].observation == "(Down)\nSFFF\n[F: on red]HFH\nFFFH\nHFFG"
    assert [turn.done for turn in turns] == [False] * 5
    last = act(environment, "RIGHT")
    assert (last.done, last.reward) == (True, 1.0)
    environment.close()


def test_a_taxi_shows_by_words_what_it_shows_by_colors() -> None:
    _, told = begin("gymnasium", {"seed": 3}, id="Taxi-v4")
    assert all(told.count(color) >= 1 for color in (": on yellow]", ": blue]", ": magenta]"))
    assert "\x1b" not in told


def test_a_state_without_a_picture_is_numbers() -> None:
    environment, told = begin("gymnasium", seed=1, id="Blackjack-v1")
    assert told.splitlines()[1:] == ["Actions: stick, hit.", told.splitlines()[2]]
    assert act(environment, "stick").done
    assert begin("gymnasium", seed=1, id="Blackjack-v1")[1] == told, "the same random numbers, the same cards"
    assert len({begin("gymnasium", seed=seed, id="Blackjack-v1")[1] for seed in range(5)}) > 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"id": "Nothing-v0"}, "Gymnasium does not make 'Nothing-v0'"),
        ({"id": "FrozenLake-v1", "options": {"depth": 1}}, "unexpected keyword argument 'depth'"),
        ({"id": "Pendulum-v1"}, "must be numbered"),
        ({"id": "FrozenLake-v1", "actions": ["a", "b"]}, "has 4 actions"),
        ({"id": "FrozenLake-v1", "actions": ["a", "b", "c", "A"]}, "has 4 actions"),
    ],
)
def test_what_gymnasium_does_not_make_is_refused(options: dict[str, Json], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        gymnasium_text.GymnasiumEnvironment(**options)  # type: ignore[arg-type]


def test_tasks_of_reasoning_gym_are_rows_that_the_package_grades() -> None:
    rows = [*reasoning_gym_tasks.make_rows("chain_sum", 3, seed=3, min_terms=2, max_terms=2)]
    assert json.loads(json.dumps(rows)) == rows
    assert rows[2] == next(reasoning_gym_tasks.make_rows("chain_sum", 1, seed=3, first=2, min_terms=2, max_terms=2))
    for row in rows:
        right = RewardInput(row["question"], f"<answer> {row['answer']} </answer>", None, row, is_truncated=False)
        assert (
            reasoning_gym_tasks.score(right)
            == reasoning_gym_tasks.solved(right)
            == RewardResult(1.0, str(row["answer"]))
        )
        wordy = replace(right, response=f"it is {row['answer']}")
        assert 0 < reasoning_gym_tasks.score(wordy).value < 1, "partial credit for the right answer among other words"
        assert reasoning_gym_tasks.solved(wordy).value == 0


def test_a_task_of_reasoning_gym_is_an_episode_of_one_turn() -> None:
    row = next(reasoning_gym_tasks.make_rows("leg_counting", 1))
    environment, told = begin("reasoning_gym", row)
    assert told == row["question"]
    assert act(environment, str(row["answer"])) == Turn(reward=1.0, done=True, info={"answer": row["answer"]})
    row = next(reasoning_gym_tasks.make_rows("chain_sum", 1))
    text = f"it is {row['answer']}"
    credit, nothing = (act(begin("reasoning_gym", row, partial_credit=is_given)[0], text) for is_given in (True, False))
    assert isinstance(credit.reward, float)
    assert 0 < credit.reward < 1
    assert nothing.reward == 0


def test_tasks_of_a_named_dataset_follow_from_the_random_numbers() -> None:
    questions = [begin("reasoning_gym", seed=seed, dataset="chain_sum")[1] for seed in (1, 1, 2)]
    assert questions[0] == questions[1] != questions[2]


def test_what_is_no_task_of_reasoning_gym_is_refused() -> None:
    with pytest.raises(RecipeError, match="does not make 'nothing'"):
        next(reasoning_gym_tasks.make_rows("nothing", 1))
    with pytest.raises(RecipeError, match="unexpected keyword argument 'depth'"):
        reasoning_gym_tasks.ReasoningGym("chain_sum", settings={"depth": 1})
    with pytest.raises(EpisodeFailed, match="make rows with make_rows"):
        begin("reasoning_gym", {"question": "?"})


def test_two_players_of_a_game_take_turns_and_share_the_reward() -> None:
    environment, told = begin("textarena", id="TicTacToe-v0")
    assert "You are Player 0" in told
    turns = [act(environment, f"[{cell}]") for cell in (0, 3, 1, 4)]
    assert [turn.agent for turn in turns] == ["second", "first", "second", "first"]
    assert isinstance(turns[0].observation, str)
    assert "You are Player 1" in turns[0].observation
    assert "[Player 0] [0]" in turns[0].observation
    assert isinstance(turns[2].observation, str)
    assert "You are Player 1" not in turns[2].observation, "only what is new"
    assert "[Player 1]" not in turns[2].observation, "what a player has said itself is not repeated"
    last = act(environment, "[2]")
    assert last == Turn(reward={"first": 1.0, "second": -1.0}, done=True, info={"reason": "Player 0 has won!"})


class TicTacToe(textarena_games.TextArena):
    def __init__(self) -> None:
        super().__init__("TicTacToe-v0")


def test_each_player_of_a_game_is_trained_on_its_own_moves() -> None:
    moves = iter("03142")
    engine = ScriptedEngine(lambda _: [ord(letter) for letter in f"[{next(moves)}]"])
    writer = ChatWriter(Tokenizer(), is_chat=False)  # type: ignore[arg-type]
    (episode,), _ = play(engine, TicTacToe, writer, max_tokens=5000)
    assert not episode.error
    found = {}
    for sample in episode.trace.samples():
        trained = [token for token, is_trained in zip(sample.tokens, sample.is_trained, strict=True) if is_trained]
        found[sample.agent] = ("".join(map(chr, trained)), sum(sample.rewards))
    assert found == {"first": ("[0][1][2]", 1.0), "second": ("[3][4]", -1.0)}


def test_who_has_not_made_a_move_is_not_rewarded() -> None:
    environment, _ = begin("textarena", id="TicTacToe-v0")
    assert not act(environment, "nonsense").done, "one mistake is forgiven"
    last = act(environment, "nonsense")
    assert (last.done, last.reward) == (True, {"first": -1.0})


def test_games_that_use_global_random_numbers_are_reproduced_in_processes() -> None:
    config = EnvironmentConfig.model_validate({"type": "textarena_solo", "options": {"id": "GuessTheNumber-v0"}})

    async def play(seed: str) -> list[object]:
        world = world_maker(config)()
        assert isinstance(world, ProcessEnvironment)
        try:
            await world.reset({}, seed)
            return [(await world.act(f"[{guess}]")).observation for guess in (10, 4)]
        finally:
            await world.close()

    async def play_all() -> list[list[object]]:
        return await asyncio.gather(*(play(seed) for seed in ("1", "1", "2", "3", "4")))

    state = random.getstate()
    first, again, *others = asyncio.run(play_all())
    assert first == again
    assert any(other != first for other in others)
    assert random.getstate() == state, "nothing is drawn in this process"
    assert textarena_games.TextArenaSolo.needs_own_process


def test_a_game_that_is_not_there_is_refused() -> None:
    with pytest.raises(RecipeError, match="TextArena does not make 'Nothing-v0'"):
        textarena_games.TextArena("Nothing-v0")
