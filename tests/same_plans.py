"""Compares the plans of all recipes with those of another commit.

    python -m tests.same_plans REVISION [--keep FOLDER]

`leaderless plan --json` plans each recipe of `recipes` and `examples` for several numbers of workers, with the sources
of both commits. Plans and refusals must be the same but for names of modules and the order of keys.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

import yaml
from tests.same_numbers import PREPARATIONS, ROOT, commit_of, environment, other_sources, prepare, working_folder

WORLD_SIZES = (1, 4, 8, 64)
MODULE = re.compile(r"\bleaderless(\.\w+)*[.:](?=\w)")
"""Names of modules of the package, before the name of what is in them."""
_PLAN = """
import contextlib, io, json, runpy, sys
for arguments in json.load(sys.stdin):
    sys.argv, printed, code = ["leaderless", *arguments], io.StringIO(), 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            runpy.run_module("leaderless", run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([code, printed.getvalue()]), flush=True)
"""
"""A program that executes several commands, because importing takes longer than planning."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="commit to compare with")
    parser.add_argument("--keep", type=Path, help="folder that keeps the other commit's plans for the next comparison")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="same-plans-") as scratch, other_sources(options.revision) as sources:
        other = (options.keep or Path(scratch)).resolve() / commit_of(options.revision)
        starts = [prepare(name, sources, other) for name in PREPARATIONS]
        kept = other / "plans.json"
        before = json.loads(kept.read_text()) if kept.exists() else {}
        before |= _plans(sources, starts, Path(scratch) / "other", known=before)
        kept.write_text(json.dumps(before))
        now = _plans(ROOT, starts, Path(scratch) / "here")
    different = [name for name in sorted({*before, *now}) if _compare(name, before.get(name, ""), now.get(name, ""))]
    num_planned = sum(text.startswith("{") for text in now.values())
    print(f"{len(now)} commands, {num_planned} of them with a plan: {len(different)} differ")
    sys.exit(1 if different else 0)


def _plans(sources: Path, starts: list[Path], folder: Path, known: Collection[str] = ()) -> dict[str, str]:
    """Plans as JSON, and messages of commands that are refused, by recipe and number of workers, but for known ones."""
    working_folder(folder, sources, *starts)
    recipes = sorted(
        str(path.relative_to(sources))
        for part in ("recipes", "examples")
        for path in (sources / part).rglob("*.yaml")
        if "models" in yaml.safe_load(path.read_text(encoding="utf-8"))
    )
    named = {f"{recipe} --world-size {size}" for recipe in recipes for size in WORLD_SIZES}
    commands = sorted(named - set(known))
    done = subprocess.run(
        [sys.executable, "-c", _PLAN],
        cwd=folder,
        env=environment(sources) | {"COLUMNS": "400"},
        input=json.dumps([["plan", "--json", *command.split()] for command in commands]),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"planning in {folder} ended with {done.returncode}:\n{done.stderr}")
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        command: text if code == 0 else f"refused with {code}: {text}"
        for command, (code, text) in zip(commands, printed, strict=True)
    }


def _compare(name: str, before: str, now: str) -> bool:
    """Print the first lines that differ but for names of modules and the order of keys."""
    lines = [MODULE.sub("", _in_order(text)).splitlines() for text in (before, now)]
    differing = [line for line in difflib.unified_diff(*lines, n=0, lineterm="") if line[:3] not in {"---", "+++"}]
    if differing:
        print(f"{name}: {len(differing)} lines of a comparison", *differing[:12], sep="\n    ")
    return bool(differing)


def _in_order(text: str) -> str:
    """A plan with sorted keys, or a refusal as it is."""
    return json.dumps(json.loads(text), indent=2, sort_keys=True) if text.startswith("{") else text


if __name__ == "__main__":
    main()
