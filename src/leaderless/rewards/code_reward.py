"""The `code` reward: the program in the response passes the row's tests, in a sandbox. Imports no torch."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Mapping, Sequence

from leaderless.base.values import Json
from leaderless.config.rewards import CODE_RESERVE_S, CodeOptions
from leaderless.rewards.protocol import RewardInput, RewardResult
from leaderless.rewards.sandbox.jail import Script, TestTrial
from leaderless.rewards.sandbox.messages import SandboxLimits
from leaderless.rewards.sandbox.sandboxes import choose_sandbox

_BLOCK = re.compile(
    r"^```[ \t]*(?:python3?|py)[ \t]*\r?\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE | re.IGNORECASE
)
_FORMS = (
    'must be {"inputs": [text, ...], "outputs": [text, ...]} of equal length, or {"asserts": "assert ..."}, as JSON'
)


class CodeReward:
    """The share of the row's tests that the program in the response passes; or 1 if it passes all of them, else 0.

    The program is the last block of the response that is fenced as Python, or without one the whole response. It runs
    in a sandbox, with nothing but the standard library. A program that fails in any way is worth 0. There is no reward
    only if the row has no usable tests or the sandbox does not work.

    Each example of input and output is a separate run. It passes with exit code 0 and the expected output, apart from
    white space at the ends of lines and empty lines at the end. The expected output never leaves this process.

    With assertions, the program is loaded in one process, and the assertions run in another, to which its values are
    copied. So it does not help a program to exit early, to change the meaning of `assert` or `==`, or to search memory
    for what is expected. Some tricks remain possible: returning an object of its own that lies about its length, truth
    or items (but not about equality with a value of a built-in type); comparing two objects of its own falsely; having
    the tests call its own function by a name that they expect from elsewhere and do not import; and recognizing the
    arguments of the tests.

    Raises:
        RuntimeError: The sandbox cannot be used on this machine.
    """

    def __init__(self, options: CodeOptions) -> None:
        try:
            self._sandbox = choose_sandbox(options.sandbox, allow_weaker=options.allow_weaker)
        except RuntimeError as error:
            raise RuntimeError(f"reward.code {error}") from error
        self._options = options
        self._limits = SandboxLimits(*(getattr(options, name) for name in SandboxLimits._fields))

    def __call__(self, sample: RewardInput, /) -> RewardResult:
        """Grade a response by the tests in its row's answer column.

        Raises:
            ValueError: The row has no tests, or none that can be run.
            RuntimeError: The sandbox does not work.
        """
        deadline = time.monotonic() + self._options.timeout_s - CODE_RESERVE_S
        examples, statements = _parse_tests(sample.answer)
        program = find_program(sample.response)
        if examples:
            passed = self._run_examples(program, examples, deadline)
        else:
            passed = self._run_statements(program, statements, deadline)
        share = sum(passed) / (len(examples) or sum(kind == "test" for _, kind in statements))
        return RewardResult(share if self._options.score == "share" else float(share == 1))

    def _run_examples(self, program: str, examples: Sequence[tuple[str, str]], deadline: float) -> Sequence[bool]:
        """Whether each example passed, while it matters and there is time."""
        passed: list[bool] = []
        with Script(self._sandbox, program, self._limits) as script:
            for given, expected in examples:
                if time.monotonic() >= deadline or (self._options.score == "all" and not all(passed)):
                    break
                ended = script.run(given, deadline)
                is_right = _plain_lines(ended.output) == _plain_lines(expected)
                passed.append(ended.cause == "exited" and ended.code == 0 and is_right)
        return passed

    def _run_statements(self, program: str, statements: Sequence[tuple[str, str]], deadline: float) -> Sequence[bool]:
        with TestTrial(self._sandbox, program, self._limits) as trial:
            ended = trial.run(statements, deadline)
        if ended.unfit:
            raise ValueError(f"the row's tests cannot be run: one {ended.unfit}")
        return ended.passed


def find_program(response: str) -> str:
    """The program in a response: the last block fenced as Python, perhaps cut off; without one all of it."""
    blocks = _BLOCK.findall(response)
    return str(blocks[-1]) if blocks else response


def _plain_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _parse_tests(answer: Json) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The content of a row's answer column: either examples of input and output, or statements, each with its kind."""
    tests = answer
    if isinstance(answer, str):
        try:
            tests = json.loads(answer)
        except ValueError as error:
            raise ValueError(f"the row's tests are no JSON ({error}); the answer column {_FORMS}") from error
    if isinstance(tests, Mapping) and set(tests) == {"asserts"} and isinstance(tests["asserts"], str):
        return [], _parse_statements(tests["asserts"])
    if isinstance(tests, Mapping) and set(tests) == {"inputs", "outputs"}:
        inputs, outputs = _texts(tests["inputs"]), _texts(tests["outputs"])
        if inputs and outputs and len(inputs) == len(outputs):
            return list(zip(inputs, outputs, strict=True)), []
    found = f"keys {', '.join(sorted(tests))}" if isinstance(tests, Mapping) else f"a {type(tests).__name__}"
    raise ValueError(f"the row's tests have an unknown form ({found}); the answer column {_FORMS}")


def _texts(value: Json) -> list[str]:
    """The items of a list of texts; none for anything else."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return []
    texts = [item for item in value if isinstance(item, str)]
    return texts if len(texts) == len(value) else []


def _parse_statements(source: str) -> list[tuple[str, str]]:
    """Statements in their order, each with its kind; a `test` passes where it raises nothing."""
    try:
        statements = [(ast.unparse(statement), _kind(statement)) for statement in ast.parse(source).body]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the row's tests are no Python ({type(error).__name__}: {error}); correct the row") from error
    if not any(kind == "test" for _, kind in statements):
        raise ValueError("the row's tests assert nothing; leave out such rows")
    return statements


def _kind(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return "import"
    is_other = isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign | ast.AugAssign)
    return "other" if is_other else "test"
