"""Runs the command line: in processes that stay, or as a person does."""

from __future__ import annotations

import functools
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import typer.main
from tests.distributed.ranks import RankPool
from tests.forking import Forked

_get_command = functools.cache(typer.main.get_command)
"""Makes the parsers of all commands, once for all commands of a process."""
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600
"""Longest time for a command: many times what it needs, because other processes may use the same cores."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a command.

    Attributes:
        code: Exit code.
        output: Standard output.
        errors: Standard error.
    """

    code: int
    output: str
    errors: str


def command(folder: str, arguments: list[str]) -> Outcome:
    """Run `leaderless ARGUMENTS` in this process, which acts as started by torch elastic if its place is given."""
    from leaderless.cli.main import main

    output, errors = io.StringIO(), io.StringIO()
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    try:
        with (
            redirect_stdout(output),
            redirect_stderr(errors),
            patch.object(sys, "argv", ["leaderless", *arguments]),
            patch.object(typer.main, "get_command", _get_command),
        ):
            main()
            code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os.chdir(before)
        sys.path[:] = path
    return Outcome(code, output.getvalue(), errors.getvalue())


def run(ranks: RankPool, folder: Path, *arguments: object, num_ranks: int = 1) -> Outcome:
    """Outcome of a command on the first of some ranks; all must have the same exit code."""
    words = [str(argument) for argument in arguments]
    outcomes = ranks.run(num_ranks, command, str(folder), words, init_group=False, deadline_s=TIMEOUT_S)
    assert len({outcome.code for outcome in outcomes}) == 1, outcomes
    return outcomes[0]


def succeed(ranks: RankPool, folder: Path, *arguments: object, num_ranks: int = 1) -> str:
    """Output of a command that must succeed."""
    outcome = run(ranks, folder, *arguments, num_ranks=num_ranks)
    assert outcome.code == 0, outcome.errors
    return outcome.output


def environment() -> dict[str, str]:
    """Environment of processes that a person starts."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}


def start(folder: Path, *arguments: object, is_forked: bool = True) -> subprocess.Popen[str]:
    """Start `python -m ARGUMENTS`: in a forked process, which takes no time for imports, or as a person does."""
    return (Forked if is_forked else subprocess.Popen)(
        [sys.executable, "-m", *(str(argument) for argument in arguments)],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> Outcome:
    """Wait for a process, and kill it when it takes too long."""
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    return Outcome(process.returncode, output, errors)


def metrics(run_folder: Path, log: str = "metrics.jsonl", *, with_times: bool = False) -> list[Mapping[str, float]]:
    """The lines of a run's log, usually without what depends on the clock."""
    lines = [json.loads(line) for line in (run_folder / log).read_text().splitlines()]
    if with_times:
        return lines
    clocks = ("time", "seconds/", "sent/", "throughput/", "rollout/tokens_per_s")
    return [{name: value for name, value in line.items() if not name.startswith(clocks)} for line in lines]
