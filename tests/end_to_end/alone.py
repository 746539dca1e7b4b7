"""Runs the command line as the only worker, inside the process of the tests: fast, and with its signals."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch.distributed as dist
from tests.end_to_end.cli import Outcome, command

MOST_LINES = 4
"""Most lines of a message about something that the user has to correct."""


def run_alone(folder: Path, *arguments: object) -> Outcome:
    """Outcome of a command; a process group that it leaves behind is destroyed."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            words = [str(argument) for argument in arguments]
            if words[:1] == ["train"] and not {"--workers", "--nodes", "--rendezvous", "--help"} & {*words}:
                words.append("--in-process")
            outcome = command(str(folder), words)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    loud = [str(w.message) for w in caught if not issubclass(w.category, ResourceWarning | DeprecationWarning)]
    assert not loud, "libraries' warnings are not for users"
    return outcome


def refused(folder: Path, *arguments: object) -> str:
    """Errors of a command that must be refused as something that the user can correct."""
    outcome = run_alone(folder, *arguments)
    assert outcome.code == 2, outcome
    assert "Traceback" not in outcome.errors
    assert any(line.startswith("error ") for line in outcome.errors.splitlines()), outcome.errors
    assert len(outcome.errors.splitlines()) <= MOST_LINES, outcome.errors
    return outcome.errors
