"""A forked process behaves like one that `subprocess.Popen` would start, as far as tests can see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.forking import ROOT, Forked

PROGRAM = [sys.executable, "-m", "tests.distributed.programs"]


def run(kind: type[subprocess.Popen], *arguments: str, **options: object) -> tuple[int, str, str]:
    """Exit code, output and errors of a program."""
    process = kind([*PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def test_it_has_the_folder_variables_and_streams_that_it_was_given(tmp_path: Path) -> None:
    variables = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TMPDIR": str(tmp_path), "MINE": "yes"}
    options = {"cwd": tmp_path, "env": variables, "start_new_session": True, "stdin": subprocess.DEVNULL}
    known = []
    for kind in (Forked, subprocess.Popen):
        code, output, errors = run(kind, "describe", "a b", **options)
        assert (code, errors) == (0, "")
        known.append(json.loads(output))
        assert [name.partition(":")[0] for name in known[-1].pop("files")] == ["/dev/null", "pipe", "pipe"]
        for name in ("LC_CTYPE", "PWD", "_"):  # the interpreter or the shell may add these
            known[-1]["variables"].pop(name, None)
    forked, real = known
    assert forked.pop("torch")
    assert not real.pop("torch")
    assert forked.pop("hash") != real.pop("hash")
    assert forked == real
    assert forked["parent"] == os.getpid()


@pytest.mark.parametrize("how", ["late", "exit", "raise", "killed"])
def test_it_ends_as_any_other(how: str) -> None:
    codes = {"late": 0, "exit": 3, "raise": 1, "killed": -signal.SIGKILL}
    code, output, errors = run(Forked, how)
    assert code == codes[how]
    assert output.split() == (["main", "thread", "last"] if how == "late" else [])
    assert ("KeyError: 'no such thing'" in errors) == (how == "raise")


def test_signals_reach_it_and_the_system_knows_it() -> None:
    process = Forked([*PROGRAM, "wait"], stderr=subprocess.DEVNULL)
    assert psutil.Process(process.pid).ppid() == os.getpid()
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM


def test_hash_seeds_differ_between_nurseries() -> None:
    hashes = [json.loads(run(Forked, "describe", nursery=nursery)[1])["hash"] for nursery in (0, 1, 0)]
    assert hashes[0] == hashes[2] != hashes[1]
