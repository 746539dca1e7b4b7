"""Reading ahead: in order, as far as allowed, and with errors in their turn."""

from __future__ import annotations

import threading
import time
from itertools import count
from pathlib import Path

import pytest
from tests.rows import recipe_of, shards_of, take, write_jsonl

from leaderless.config import RecipeError
from leaderless.data.sources.jsonl import JsonlSource
from leaderless.data.sources.row_sources import Row
from leaderless.distributed.background import ReadAhead


def wait_until(condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("num_ahead", [1, 2, 5])
def test_so_much_is_made_ahead_and_no_more(num_ahead: int) -> None:
    made: list[int] = []
    numbers = count()

    def make() -> int:
        made.append(next(numbers))
        return made[-1]

    ahead = ReadAhead(make, num_ahead, "test", 10)
    for expected in range(10):
        assert ahead.next() == expected
        wait_until(lambda expected=expected: len(made) == expected + 1 + num_ahead)
    time.sleep(0.05)
    assert len(made) == 10 + num_ahead
    ahead.close()
    assert not ahead._background._thread.is_alive()


def test_nothing_is_made_ahead_without_being_asked_for() -> None:
    numbers = count()
    ahead = ReadAhead(lambda: next(numbers), 0, "test", 10)
    before = threading.active_count()
    assert [ahead.next() for _ in range(3)] == [0, 1, 2]
    assert threading.active_count() == before
    ahead.close()
    assert next(numbers) == 3


@pytest.mark.parametrize("num_ahead", [0, 4])
def test_an_error_comes_in_its_turn_and_stays(num_ahead: int) -> None:
    numbers = count()

    def make() -> int:
        number = next(numbers)
        if number == 2:
            raise RecipeError.at("data", "row 2 is bad")
        return number

    ahead = ReadAhead(make, num_ahead, "test", 10)
    assert [ahead.next(), ahead.next()] == [0, 1]
    for _ in range(2):
        with pytest.raises(RecipeError, match="row 2 is bad"):
            ahead.next()
    ahead.close()
    assert next(numbers) == 3, "nothing is made behind an error"


def test_a_time_limit_of_the_function_itself_is_not_taken_for_that_of_the_wait() -> None:
    def make() -> int:
        raise TimeoutError("the hub does not answer")

    ahead = ReadAhead(make, 1, "test", 10)
    with pytest.raises(TimeoutError, match="the hub does not answer"):
        ahead.next()
    ahead.close()


def test_no_wait_is_without_end() -> None:
    never = threading.Event()
    ahead = ReadAhead(never.wait, 1, "the reader", 0.05)
    with pytest.raises(RuntimeError, match=r"the reader has waited 0.05 s for data: see whether the disk"):
        ahead.next()
    never.set()
    ahead.close()
    with pytest.raises(AssertionError, match="is closed"):
        ahead.next()


def test_it_can_be_closed_at_any_time() -> None:
    for num_taken in range(3):
        ahead = ReadAhead(lambda: time.sleep(0.01), 2, "test", 10)
        for _ in range(num_taken):
            ahead.next()
        ahead.close()
        ahead.close()
        assert not ahead._background._thread.is_alive()


def watch_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the rows that are read."""
    seen: list[int] = []
    read = JsonlSource.row

    def watched(self: JsonlSource, index: int) -> Row:
        seen.append(index)
        return read(self, index)

    monkeypatch.setattr(JsonlSource, "row", watched)
    return seen


def test_position_counts_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"{index}"} for index in range(10)])
    expected = take(shards_of(recipe_of(path, {"prefetch_steps": 0}, batch={"prompts_per_step": 3}), 1), 9)
    recipe = recipe_of(path, {"prefetch_steps": 3}, batch={"prompts_per_step": 3})
    (loader,) = shards_of(recipe, 1)
    seen = watch_rows(monkeypatch)
    taken = take([loader], 2)
    wait_until(lambda: len(seen) >= 15)  # three steps beyond the two that were given
    assert loader.position == 6
    (resumed,) = shards_of(recipe, 1, loader.position)
    assert taken + take([resumed], 7) == expected
    loader.position = 3  # what was read ahead is dropped
    assert take([loader], 8) == expected[3:]
    for one in (loader, resumed):
        one.close()


@pytest.mark.parametrize("prefetch_steps", [0, 2])
def test_a_bad_row_is_named_when_its_step_is_asked_for(tmp_path: Path, prefetch_steps: int) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": 3}])
    data: dict[str, object] = {"prefetch_steps": prefetch_steps, "shuffle": False, "streaming": True}
    (loader,) = shards_of(recipe_of(path, data | {"overlong": "error"}, batch={"prompts_per_step": 1}), 1)
    assert [prompt for _, prompt in take([loader], 2)] == ["a", "b"]
    for _ in range(2):
        with pytest.raises(RecipeError, match=r"a.jsonl:3: column 'prompt' holds int"):
            loader.next()
    assert loader.position == 2
    loader.close()
