"""Tools are described by their type hints, run at the same time, and every wrong call is answered."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from pydantic import Field

from leaderless.environments.guarded_environment import EnvironmentFailure
from leaderless.environments.protocol import EpisodeFailed
from leaderless.environments.tools import Call, Toolbox, ToolError, result_messages, tool
from leaderless.environments.tools.formats import read_qwen3_coder
from leaderless.environments.tools.function_tool import FunctionTool, ToolOwner, tools_of


@dataclass
class Point:
    x: int
    y: int = 0


def add(a: int, b: float = 1.0) -> float:
    """Add two numbers.

    Both may be negative.

    Args:
        a: First summand.
        b: Second summand.
    """
    return a + b


def draw(
    points: list[Point], color: Literal["red", "blue"] = "red", size: Annotated[int, Field(ge=1)] | None = None
) -> str:
    """Draw points."""
    return f"{points} {color} {size}"


def box(*functions, **settings):
    return Toolbox([FunctionTool.of(function) for function in functions], **settings)


def run(toolbox, *calls, timeout_s=5.0):
    return asyncio.run(toolbox.run(calls, timeout_s))


def failure_of(toolbox, *calls, timeout_s=5.0):
    with pytest.raises(EnvironmentFailure) as failed:
        run(toolbox, *calls, timeout_s=timeout_s)
    return failed.value.kind, str(failed.value)


def test_a_schema_follows_from_hints_and_docstring():
    assert FunctionTool.of(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.\n\nBoth may be negative.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "First summand."},
                    "b": {"type": "number", "description": "Second summand.", "default": 1.0},
                },
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    assert FunctionTool.of(add).usage == "add(a: integer, b: number = 1.0)"
    drawn = FunctionTool.of(draw)
    assert drawn.usage == "draw(points: array, color: 'red' | 'blue' = \"red\", size: integer | null = null)"
    assert "title" not in json.dumps(drawn.parameters)


def no_hint(a, b: int) -> int: ...
def with_rest(a: int, *others: int) -> int: ...
def with_names(**others: int) -> int: ...
def by_place(a: int, /) -> int: ...
def of_a_lock(lock: threading.Lock) -> int: ...
def of_an_unknown(x: Unknown) -> int: ...  # noqa: F821


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (no_hint, "parameter 'a' has no type hint"),
        (with_rest, r"parameter 'others' (*others: 'int') cannot be given by name"),
        (with_names, "parameter 'others'"),
        (by_place, "parameter 'a'"),
        (of_a_lock, "parameter 'lock' has the type"),
        (of_an_unknown, "name 'Unknown' is not defined: types of parameters must be imported"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused(function, problem):
    with pytest.raises(ValueError, match=f"tool '{function.__name__}'") as error:
        FunctionTool.of(function)
    assert problem in str(error.value)


def test_arguments_are_converted_and_results_are_texts():
    toolbox = box(add, draw)
    results = run(toolbox, Call("add", {"a": "2"}), Call("draw", {"points": [{"x": 1}], "color": "blue", "size": 2}))
    assert [result.text for result in results] == ["3.0", "[Point(x=1, y=0)] blue 2"]
    assert all(result.refusal is None for result in results)
    assert result_messages(results)[0] == {
        "role": "tool",
        "name": "add",
        "tool_call_id": "call00000",
        "content": "3.0",
    }


@pytest.mark.parametrize(
    ("call", "refusal", "says"),
    [
        (Call("", problem="nothing is closed"), "malformed", "nothing is closed. Tools: add(a: integer"),
        (Call("ad", {}), "unknown_tool", "There is no tool 'ad' (did you mean 'add'?)"),
        (Call("x" * 10**6, {}), "unknown_tool", "xxx…'"),
        (Call("add", {"a": 1, "bb": 2}), "wrong_arguments", "there is no argument 'bb' (known: a, b)"),
        (Call("add", {}), "wrong_arguments", "argument 'a' is missing. Use add(a: integer, b: number = 1.0)"),
        (Call("add", {"a": "x"}), "wrong_arguments", "argument 'a' = \"x\": Input should be a valid integer"),
        (Call("add", {"a": "x" * 10**6}), "wrong_arguments", "…: Input should be a valid integer"),
        (Call("add", {"field_0": 1}), "wrong_arguments", "there is no argument 'field_0'"),
    ],
)
def test_a_wrong_call_is_answered_with_what_is_wrong(call, refusal, says):
    (result,) = run(box(add), call)
    assert result.refusal == refusal
    assert result.text.startswith("Error: ")
    assert says in result.text
    assert len(result.text) < 500


def test_texts_become_what_the_tool_wants():
    def show(a: int, b: list[int], c: str, d: str | None, e: bool) -> str:
        return repr((a, b, c, d, e))

    values = {"a": "1", "b": "[2, 3]", "c": "4", "d": "null", "e": "true"}
    text = "".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in values.items())
    toolbox = box(show, reader=read_qwen3_coder)
    calls = toolbox.parse(f"<tool_call><function=show>{text}</function></tool_call>").calls
    assert run(toolbox, *calls)[0].text == "(1, [2, 3], '4', 'null', True)"
    wrong = toolbox.parse(f"<function=show>{text.replace('[2, 3]', '[2, 3')}</function>").calls
    assert run(toolbox, *wrong)[0].refusal == "wrong_arguments"


def test_a_tool_refuses_by_a_tool_error_and_fails_the_episode_by_any_other():
    def divide(a: int, b: int) -> float:
        if b < 0:
            raise ToolError("b must not be negative")
        return a / b

    async def divide_later(a: int, b: int) -> float:
        return divide(a, b)

    toolbox = box(divide, divide_later)
    for name in ("divide", "divide_later"):
        (result,) = run(toolbox, Call(name, {"a": 1, "b": -1}))
        assert (result.text, result.refusal) == ("Error: b must not be negative", "tool_error")
        assert failure_of(toolbox, Call(name, {"a": 1, "b": 0})) == (
            "tool",
            f"the tool '{name}' raised ZeroDivisionError: division by zero",
        )


def test_a_tool_fails_the_episode_with_a_cause_of_its_own():
    def give_up() -> str:
        raise EpisodeFailed("no more")

    assert failure_of(box(give_up), Call("give_up")) == ("tool", "the tool 'give_up' gave up: no more")


def leave() -> str:
    sys.exit(3)


async def leave_later() -> str:
    sys.exit(3)


def stop() -> str:
    raise StopIteration


def own_limit() -> str:
    raise TimeoutError("too slow")


def of_a_set() -> object:
    return {1}


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (leave, "SystemExit: 3"),
        (leave_later, "SystemExit: 3"),
        (stop, "StopIteration"),
        (own_limit, "too slow"),
        (of_a_set, "returned set"),
    ],
)
def test_a_tool_that_ends_strangely_fails_only_its_episode(function, says):
    cause, detail = failure_of(box(function), Call(function.__name__))
    assert cause == "tool"
    assert f"the tool '{function.__name__}' raised" in detail
    assert says in detail


def test_calls_run_at_the_same_time_and_are_answered_in_order():
    met = threading.Barrier(3, timeout=10)

    def wait(name: str) -> str:
        met.wait()
        return name

    async def wait_too(name: str) -> str:
        await asyncio.to_thread(met.wait)
        return name

    results = run(
        box(wait, wait_too),
        Call("wait", {"name": "x"}),
        Call("wait_too", {"name": "y"}),
        Call("wait", {"name": "z"}),
        Call("no"),
    )
    assert [result.text for result in results[:3]] == ["x", "y", "z"]
    assert results[3].refusal == "unknown_tool"


class Counter:
    """Changes its state, slowly."""

    def __init__(self):
        self.value = 0

    @tool
    def increase(self, by: int) -> int:
        """Increase the value."""
        value = self.value
        time.sleep(0.01)
        self.value = value + by
        return self.value

    @staticmethod
    @tool
    def double(x: int) -> int:
        return 2 * x

    def hidden(self, x): ...


class Louder(Counter):
    @tool
    def increase(self, by: int, times: int = 1) -> int:
        """Increase more."""
        return super().increase(by * times)

    @tool
    def shout(self) -> str:
        return "!" * self.value


def test_methods_of_one_object_are_called_in_order_one_by_one():
    described = tools_of(ToolOwner(Louder, {}))
    assert [found.usage for found in described] == [
        "increase(by: integer, times: integer = 1)",
        "double(x: integer)",
        "shout()",
    ]
    counter = Louder()
    toolbox = Toolbox([found.of_instance(counter) for found in described])
    calls = [Call("increase", {"by": number}) for number in range(1, 5)]
    results = run(toolbox, *calls, Call("shout"), Call("double", {"x": 4}))
    assert [result.text for result in results] == ["1", "3", "6", "10", "!" * 10, "8"]


def test_a_tool_that_hangs_fails_its_episode_and_does_not_keep_the_process():
    program = """
import asyncio, time
from leaderless.environments.tools import Call, Toolbox
from leaderless.environments.tools.function_tool import FunctionTool
from leaderless.environments.guarded_environment import EnvironmentFailure

def hang() -> str:
    time.sleep(1000)

async def hang_too() -> str:
    await asyncio.sleep(1000)

toolbox = Toolbox(map(FunctionTool.of, (hang, hang_too)))
for name in ("hang", "hang_too"):
    try:
        asyncio.run(toolbox.run([Call(name)], 0.05))
    except EnvironmentFailure as error:
        print(error.kind, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[3] for line in lines] == ["'hang'", "'hang_too'"]
    assert all("took more than 0.05 s (environment.tool_timeout_s)" in line for line in lines)


def test_a_long_result_is_cut_in_the_middle_and_says_how_much():
    def flood() -> str:
        return "a" * 5_000_000 + "b" * 5_000_000

    (result,) = run(box(flood, max_result_characters=100), Call("flood"))
    assert result.text == "a" * 50 + "\n[... 9,999,900 characters left out ...]\n" + "b" * 50


def test_half_characters_are_replaced():
    def half() -> str:
        return "x\ud800"

    assert run(box(half), Call("half"))[0].text == "x?"


def test_prints_of_tools_go_to_standard_error(capsys):
    def speak() -> str:
        print("from a thread")
        return "said"

    async def speak_later() -> str:
        await asyncio.sleep(0)
        print("from the loop")
        return "said"

    run(box(speak, speak_later), Call("speak"), Call("speak_later"))
    print("from us")
    printed = capsys.readouterr()
    assert printed.out == "from us\n"
    assert sorted(printed.err.splitlines()) == ["from a thread", "from the loop"]


def test_a_fork_of_a_tool_ends_with_the_tool(tmp_path):
    def fork() -> int:
        return os.fork()

    async def fork_later() -> int:
        return os.fork()

    for function in (fork, fork_later):
        (result,) = run(box(function), Call(function.__name__))
        (tmp_path / "who.txt").open("a").write(f"{os.getpid()}\n")
        _, status = os.waitpid(int(result.text), 0)
        assert os.waitstatus_to_exitcode(status) == 0
    assert set((tmp_path / "who.txt").read_text().split()) == {str(os.getpid())}
