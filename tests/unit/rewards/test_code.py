"""The `code` reward: what counts as passed, and that no trick does."""

from __future__ import annotations

import json
import re
import time

import pytest
from pydantic import ValidationError
from tests.unit.rewards.calls import ROOT, error_of, make_config, make_sample

from leaderless.base.values import Json
from leaderless.config import load_recipe
from leaderless.config.rewards import CodeOptions
from leaderless.rewards.code_reward import CodeReward, find_program
from leaderless.rewards.pool import RewardPool
from leaderless.rewards.protocol import RewardResult
from leaderless.rewards.sandbox.sandboxes import Sandbox

pytestmark = pytest.mark.skipif(
    Sandbox().refusal(allow_weaker=False) is not None,
    reason="this machine's kernel lacks a layer of the sandbox",
)
PATIENT = {"timeout_s": 120.0, "test_timeout_s": 60.0}
"""Other processes may use the same cores."""


def grade(program: str, answer: Json, **options: object) -> float:
    result = CodeReward(CodeOptions.model_validate(PATIENT | options))(make_sample(program, answer))
    assert isinstance(result, RewardResult)
    assert result.answer is None
    return result.value


def examples(*pairs: tuple[str, str]) -> str:
    return json.dumps({"inputs": [given for given, _ in pairs], "outputs": [expected for _, expected in pairs]})


def asserts(text: str) -> str:
    return json.dumps({"asserts": text})


DOUBLE = examples(("1\n", "2\n"), ("5\n", "10\n"), ("-1\n", "-2\n"), ("0\n", "0\n"))


def test_the_share_of_examples_counts_or_all_of_them() -> None:
    assert grade("print(2 * int(input()))", DOUBLE) == 1.0
    assert grade("print(abs(2 * int(input())))", DOUBLE) == 0.75
    assert grade("print(abs(2 * int(input())))", DOUBLE, score="all") == 0.0
    assert grade("print(2 * int(input()))", DOUBLE, score="all") == 1.0
    assert grade("print(2 * int(input()))", json.loads(DOUBLE)) == 1.0, "the column may hold the mapping itself"


@pytest.mark.parametrize(
    ("printed", "is_right"),
    [
        ("a  \nb\n\n\n", True),
        ("a\nb", True),
        ("a\r\nb", True),
        ("a b", False),
        (" a\nb", False),
        ("a\n\nb", False),
        ("", False),
    ],
)
def test_white_space_counts_only_within_and_before_a_line(printed: str, is_right: bool) -> None:
    assert grade(f"print({printed!r}, end='')", examples(("", "a\nb\n"))) == float(is_right)


@pytest.mark.parametrize(
    "program",
    [
        "",
        "def (",
        "I would print 2.",
        "raise ValueError",
        "import sys; print(2); sys.exit(1)",
        "import os; os.abort()",
        "\0",
    ],
)
def test_a_program_that_fails_is_worth_0(program: str) -> None:
    assert grade(program, examples(("", "2"))) == 0.0
    assert grade(program, asserts("assert f(2) == 4")) == 0.0


def test_the_program_is_the_last_block_of_python() -> None:
    assert find_program("x\n```python\none\n```\ny\n```py\ntwo\n```\nz\n```\nthree\n```") == "two\n"
    assert find_program("x\n```Python3\none\ntwo") == "one\ntwo"
    assert find_program("print(1)") == "print(1)"
    assert find_program("x = '''\n  ```python\n'''") == "x = '''\n  ```python\n'''"
    assert grade("First:\n```python\nprint(1)\n```\nNo:\n```python\nprint(2)\n```\nDone.", examples(("", "2"))) == 1.0


def test_limits_reach_the_program() -> None:
    large = "x = bytearray(300 * 2**20); print(2)"
    assert grade(large, examples(("", "2"))) == 1.0
    assert grade(large, examples(("", "2")), memory_mib=128) == 0.0
    fork = "import os\nif os.fork(): os.wait(); print(2)"
    assert grade(fork, examples(("", "2"))) == 1.0
    assert grade(fork, examples(("", "2")), max_processes=0) == 0.0
    write = "with open('a', 'w') as file: file.write('x' * 2000)\nprint(2)"
    assert grade(write, examples(("", "2"))) == 1.0
    assert grade(write, examples(("", "2")), max_files=0) == 0.0
    assert grade(write, examples(("", "2")), max_file_bytes=1000) == 0.0
    speak = "import sys; sys.stderr.write('x' * 2000); print(2)"
    assert grade(speak, examples(("", "2"))) == 1.0
    assert grade(speak, examples(("", "2")), max_output_bytes=1000) == 0.0


def test_time_is_limited_for_each_test_and_for_all() -> None:
    wait = "import time; time.sleep(0.3 * int(input())); print(2)"
    quick_and_slow = examples(("100", "2"), ("0", "2"))
    assert grade(wait, quick_and_slow, test_timeout_s=3.0) == 0.5
    begin = time.monotonic()
    slow = examples(*[("100", "2")] * 50)
    assert grade(wait, slow, test_timeout_s=1.0, timeout_s=3.5) == 0.0
    assert time.monotonic() - begin < 25.0, "each would take a second"
    hang = "def f(x):\n    while x: pass\n    return x"
    assert grade(hang, asserts("assert f(0) == 0\nassert f(1) == 1\nassert f(0) == 0"), test_timeout_s=1.0) == 1 / 3
    with pytest.raises(ValidationError, match="timeout_s=5 must be at least 2 more than test_timeout_s=4"):
        CodeOptions(timeout_s=5, test_timeout_s=4)


GOOD = """
import math
from collections import Counter, namedtuple

LIMIT = 10

def double(x): return 2 * x
def halves(x): return x / 2
def sort(values): values.sort()
def fill(table): table["b"] = [2]
def count(text): return Counter(text)
def fail(x): raise ValueError(f"no {x}")
def words(): return iter(["a", "b"])
def everything(): return [None, True, 2**70, 1.5, 1j, "é\\ud800", b"a", (1, {2}), {(1,): {"k": []}}, float("inf")]
def same(x): return x
def named(*, a, b=2): return [a, b]
Point = namedtuple("Point", "x y")

class Stack:
    def __init__(self, *items): self.items = list(items)
    def push(self, item): self.items.append(item)
    def __len__(self): return len(self.items)
    def __getitem__(self, at): return self.items[at]
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __lt__(self, other): return self.items < other.items
    def __repr__(self): return f"Stack({self.items})"
"""


@pytest.mark.parametrize(
    "tests",
    [
        "assert double(2) == 4 and double('a') == 'aa' and double([1]) == [1, 1]",
        "import math\nassert math.isclose(halves(3), 1.5)",
        "assert math.floor(halves(3)) == 1",
        "from math import isclose as near\nassert near(halves(3), 1.5)",
        "values = [3, 1]\nsort(values)\nassert values == [1, 3]",
        "table = {'a': 1}\nfill(table)\nassert table == {'a': 1, 'b': [2]}",
        "assert count('aab') == {'a': 2, 'b': 1} and count('a')['a'] == 1",
        "try:\n    fail(3)\n    assert False\nexcept ValueError as error:\n    assert 'no 3' in str(error)",
        "assert list(words()) == ['a', 'b'] and [w for w in words()] == ['a', 'b']",
        "assert everything()[:4] == [None, True, 2**70, 1.5] and everything()[4] == 1j",
        "assert everything()[5:] == ['é\\ud800', b'a', (1, {2}), {(1,): {'k': []}}, float('inf')]",
        "assert same(bytearray(b'x')) == bytearray(b'x') and same(frozenset({1})) == {1} and same(1) == 1",
        "assert named(a=1) == [1, 2]",
        "assert Point(1, 2) == (1, 2) and Point(3, 4)[1] == 4",
        "stack = Stack(1)\nstack.push(2)\nassert len(stack) == 2 and stack[0] == 1 and stack.items == [1, 2]",
        "stack = Stack(1)\nassert stack == Stack(1) and stack != Stack(2) and stack < Stack(2) and not stack == 1",
        "stack = Stack(1)\nassert isinstance(stack, Stack) and not isinstance(1, Stack)",
        "stack = Stack()\nassert not stack\nstack.items = [5]\nassert [5] == stack.items and str(stack)[:5] == 'Stack'",
        "assert repr(Stack(1)) == 'Stack([1])'",
        "assert LIMIT == 10 and isinstance(double(1), int)",
        "def check(f):\n    for x in range(3):\n        assert f(x) == 2 * x\n\ncheck(double)",
    ],
)
def test_tests_see_what_a_program_defines(tests: str) -> None:
    assert grade(GOOD, asserts(tests)) == 1.0
    changed = re.sub(r"(assert )(.*)$", r"\1not (\2)", tests, flags=re.MULTILINE)
    assert grade(GOOD, asserts(changed)) < 1.0


def test_each_statement_that_prepares_nothing_is_a_test() -> None:
    tests = (
        "import math\nlimit: int = 3\nassert double(1) == 2\nassert double(limit) == 7\nassert double(2) == 4\nfail(1)"
    )
    assert grade(GOOD, asserts(tests)) == 0.5
    assert grade(GOOD, asserts(tests), score="all") == 0.0


ALWAYS_EQUAL = "class Equal{base}:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
TRICKS = {
    "exits when loaded": "import sys; sys.exit(0)",
    "leaves when loaded": "import os; os._exit(0)",
    "exits when called": "import sys\ndef f(x): sys.exit(0)",
    "leaves when called": "import os\ndef f(x): os._exit(0)",
    "leaves at the end": "import atexit, os; atexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
    "equals everything": ALWAYS_EQUAL.format(base="") + "def f(x): return Equal()",
    "is a number that equals everything": ALWAYS_EQUAL.format(base="(int)") + "def f(x): return Equal(3)",
    "is a text that equals everything": ALWAYS_EQUAL.format(base="(str)") + "def f(x): return Equal('')",
    "is a list that equals everything": ALWAYS_EQUAL.format(base="(list)") + "def f(x): return Equal()",
    "pretends to be a number": ALWAYS_EQUAL.format(base="") + "    __class__ = int\ndef f(x): return Equal()",
    "subtracts to nothing": "class Zero:\n    def __sub__(self, o): return 0\ndef f(x): return Zero()",
    "changes AssertionError": "import builtins\nbuiltins.AssertionError = KeyError\ndef f(x): return 3",
    "changes what equality is": "import operator\noperator.eq = lambda a, b: True\ndef f(x): return 3",
    "changes the sandbox": (
        "import sys\nfor name, module in list(sys.modules.items()):\n    if 'sandbox' in name:\n"
        "        for key in list(vars(module)):\n            if not key.startswith('__'): vars(module)[key] = None\n"
        "def f(x): return 3"
    ),
    "names built-in functions": "def abs(x): return 0\nall = any = len = print = abs\ndef f(x): return 3",
    "names a module": "class math:\n    isclose = staticmethod(lambda a, b: True)\ndef f(x): return 3",
    "reports to everyone": (
        "import os\ndef f(x):\n    for fd in range(200):\n        try: os.write(fd, b'true\\ntrue\\ntrue\\n')\n"
        "        except OSError: pass\n    return 3"
    ),
    "answers for another": (
        "import gc, io, json\ndef f(x):\n    for o in gc.get_objects():\n        if isinstance(o, io.TextIOWrapper):\n"
        '            try: o.write(\'{"value": 4, "arguments": []}\\n\'); o.flush()\n            except OSError: pass\n'
        "    return 3"
    ),
    "looks in its memory": (
        "import gc, sys\ndef f(x):\n    frame, found = sys._getframe(), []\n    while frame:\n"
        "        found += frame.f_locals.values(); frame = frame.f_back\n"
        "    for text in [str(o) for o in found] + [o for o in gc.get_objects() if isinstance(o, (str, dict))]:\n"
        # Not in its final form, because the source of the program is in its memory too.
        "        if bytes.fromhex('6173736572742066283229').decode() in str(text): return 4\n    return 3"
    ),
    "raises what a loop takes for its end": "def f(x): raise StopIteration",
    "raises a failed import": "def f(x): raise ImportError('numpy')",
    "never returns plain values": "def f(x): return f",
    "deeply nested": "def f(x):\n    v = []\n    for _ in range(100000): v = [v]\n    return v",
    "contains itself": "def f(x):\n    v = []\n    v.append(v)\n    return v",
    "floods the tests": "def f(x): return 'x' * 2**28",
}


@pytest.mark.parametrize("trick", TRICKS)
def test_no_trick_passes_a_test(trick: str) -> None:
    tests = "import math\nassert f(2) == 4\nassert abs(f(2) - 4) < 1e-6\nassert math.isclose(f(2), 4)"
    assert grade(TRICKS[trick], asserts(tests)) == 0.0


def test_no_program_replaces_the_built_in_functions_of_tests() -> None:
    program = """
import json
def f(x): return 3
def nothing(x): return 0
dumps = json.dumps
def false(message):
    if "modules" in message: message["value"]["__builtins__"] = ["dict", "abs", ["object", 1]]
    return dumps(message)
json.dumps = false
"""
    assert grade(program, asserts("assert abs(f(2) - 4) < 1e-6")) == 0.0
    assert grade(program, asserts("import math\nassert math.isclose(f(2), 4)")) == 0.0


def test_the_honest_program_passes_what_no_trick_does() -> None:
    tests = "import math\nassert f(2) == 4\nassert abs(f(2) - 4) < 1e-6\nassert math.isclose(f(2), 4)"
    assert grade("def f(x): return 2 * x", asserts(tests)) == 1.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "unknown form (a NoneType)"),
        ("assert f(2) == 4", "are no JSON"),
        ("[1]", "unknown form (a list)"),
        ({"inputs": ["1"]}, "unknown form (keys inputs)"),
        ({"inputs": ["1"], "outputs": []}, "of equal length"),
        ({"inputs": [], "outputs": []}, "unknown form"),
        ({"inputs": [["1"]], "outputs": ["2"]}, "unknown form"),
        ({"inputs": "1", "outputs": "2"}, "unknown form"),
        ({"asserts": ["assert f"]}, "unknown form"),
        (asserts("assert f(2) =="), "are no Python (SyntaxError"),
        (asserts("x = 1"), "assert nothing"),
        (asserts("import numpy\nassert f(2) == 4"), "cannot import what it needs (No module named 'numpy')"),
        (asserts("assert f(lambda x: x) == 4"), "passes or expects a function"),
    ],
)
def test_a_row_whose_tests_cannot_be_run_gives_no_reward(answer: Json, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        grade("def f(x): return x", answer)


def test_programs_run_beside_each_other_and_only_broken_rows_fail() -> None:
    config = make_config({"code": PATIENT | {"weight": 2.0}})
    programs = ["print(2 * int(input()))", "print(3)", "while True: print(1)", "import os; os.kill(os.getppid(), 9)"]
    samples = [make_sample(f"```python\n{program}\n```", DOUBLE) for program in programs]
    with RewardPool(config, 2) as rewards:
        graded = rewards.grade([*samples, make_sample("", "no tests")], [None] * 5)
    assert [g.value for g in graded[:4]] == [2.0, 0.0, 0.0, 0.0]
    assert all(g.is_valid for g in graded[:4])
    assert "are no JSON" in error_of(graded[4], "code")


def test_the_rows_of_the_recipe_can_be_solved() -> None:
    text = (ROOT / "recipes/code/rows.jsonl").read_text(encoding="utf-8")
    options = load_recipe(ROOT / "recipes/code/grpo.yaml").recipe.reward.code
    assert options is not None
    reward = CodeReward(options.model_copy(update=PATIENT))
    for row in map(json.loads, text.splitlines()):
        assert reward(make_sample(f"So:\n```python\n{row['solution']}\n```", row["answer"])).value == 1.0, row[
            "question"
        ]
        assert reward(make_sample("I do not know.", row["answer"])).value == 0.0
