"""The end of the output of a call of `benchmarks/gpu.py`: all that has to be known of it, in at most 12,000 characters.

First come failing tests and parts with the frames of our own code, then short forms of what was measured.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Tests = Sequence[Mapping[str, Any]]
"""Lines of `tests/gpu/conftest.py`: what has become of each test."""

MOST_CHARACTERS = 11_500
SHARES = {"notes": 1_500, "tests": 4_500, "parts": 3_000, "measured": 2_500}
"""Characters of each section; what one does not need is left to the next."""
MOST_FRAMES = 8
OWN = re.compile(r"(?:^|.*/)((?:src/leaderless|benchmarks|tests)/[^ ]*\.py)$")
FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)|^(?P<short>\S+\.py):(?P<at>\d+): in (?P<of>\S+)'
)
ERROR = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Failure|Interrupt|Warning|Exit|Timeout|Skipped)\b.*|^Fatal .*")
STACK = re.compile(r"^Current thread .*?(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
"""Stack of the thread at which a process was stopped, the innermost frame first."""
FILE = re.compile(r'File "(?:[^"]*/)?([^"/]+/[^"/]+)", line \d+')
"""The end of a path in a stack."""
LEFT_OUT = {"planned", "preset", "lanes", "device", "seconds_in_all", "longest"}


def own_frames(text: str) -> list[str]:
    """Places in our own code that tracebacks, stacks of threads and failures of pytest name, in their order.

    Args:
        text: Output of a process.
    """
    found: dict[str, None] = {}
    for line in text.splitlines():
        match = FRAME.search(line.removeprefix("E ").strip() if line.startswith("E ") else line)
        if match is None:
            continue
        file = match["file"] or match["short"]
        own = None if "site-packages" in file else OWN.match(file)
        if own:
            place = f"{own[1].removeprefix('src/')}:{match['line'] or match['at']} {match['name'] or match['of']}"
            found.pop(place, None)
            found[place] = None
    return list(found)


def errors(text: str) -> list[str]:
    """Lines that say what went wrong: of a failing test the first ones, of another process the last one."""
    marked = [line[1:].strip() for line in text.splitlines() if re.match(r"E\s", line)]
    if marked:
        lines = [line for line in marked if line and not FRAME.search(line) and not set(line) <= set("^~ ")]
        said = [line for line in lines if ERROR.match(line)]
        return list(dict.fromkeys([*lines[:2], *said[-1:]]))
    said = [line.strip() for line in text.splitlines() if ERROR.match(line)]
    return said[-1:] or [line.strip() for line in text.strip().splitlines()[-2:]]


def failed(tests: Tests) -> list[Mapping[str, Any]]:
    """Tests that have failed, or had begun and not ended, each once."""
    last: dict[str, Mapping[str, Any]] = {}
    for one in tests:
        if last.get(one["test"], {}).get("outcome") not in {"failed", "error"}:
            last[one["test"]] = one
    return [one for one in last.values() if one["outcome"] in {"failed", "error", "started"}]


def counts(tests: Tests) -> dict[str, int]:
    """Numbers of tests by outcome."""
    last = {one["test"]: one["outcome"] for one in tests if one["outcome"] != "started"}
    last |= {one["test"]: one["outcome"] for one in failed(tests)}
    found = Counter(last.values())
    names = {"passed": "passed", "failed": "failed", "error": "errors", "skipped": "skipped", "started": "unfinished"}
    return {name: found[outcome] for outcome, name in names.items()}


def described_tests(tests: Tests) -> list[str]:
    """Failing tests with their errors and frames; those that fail alike are named together."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for one in failed(tests):
        if one["outcome"] == "started":
            key = ("  had begun and not ended",)
        else:
            frames = own_frames(one["text"])[-MOST_FRAMES:]
            key = (
                *(f"  {line[:200]}" for line in errors(one["text"])[:3]),
                *([f"  at {' < '.join(frames[::-1])}"] * bool(frames)),
            )
        alike.setdefault(key, []).append(one["test"])
    lines = []
    for key, names in alike.items():
        lines += [f"FAILS {names[0]}", *(f"  and {name}" for name in names[1:]), *key]
    return lines


def described_parts(parts: Iterable[tuple[str, str, str]]) -> list[str]:
    """Parts that have failed or were stopped, with their errors and frames; those that fail alike are described once.

    Args:
        parts: Name, problem and output of each.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, problem, output in parts:
        stack = "\n".join(STACK.findall(output))
        newest = own_frames(stack) or own_frames(output)[::-1] or FILE.findall(stack)
        said = [f"  {line[:300]}" for line in errors(output) if not line.startswith(("MEASURED ", "Fatal "))]
        places = [f"  at {' < '.join(newest[:MOST_FRAMES])}"] * bool(newest)
        alike.setdefault((*said, *places), []).append(f"{name}: {problem}")
    return [line for common, names in alike.items() for line in (*(f"FAILS {name}" for name in names), *common)]


def short(value: object) -> object:
    """A result without its long parts, and with numbers of four digits."""
    if isinstance(value, Mapping):
        return {name: short(one) for name, one in value.items() if name not in LEFT_OUT}
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return value[:100] if isinstance(value, str) else value


def screen(sections: Mapping[str, Sequence[str]], end: Iterable[str]) -> str:
    """Sections under their titles, none of which takes the place of another, and the last lines.

    Args:
        sections: Lines of each section of `SHARES`.
        end: Lines that are there in any case.
    """
    last, kept, left = "\n".join(end), list[str](), 0
    for name, share in SHARES.items():
        lines = list(sections.get(name, ()))
        if not lines:
            left += share
            continue
        text = clipped([f"== {name}", *lines], share + left)
        left += share - len(text)
        kept.append(text)
    return "\n".join([*kept, last])[-MOST_CHARACTERS:]


def clipped(lines: Sequence[str], most: int) -> str:
    """As many whole lines as fit, and how many do not."""
    kept, size = list[str](), 0
    for place, line in enumerate(lines):
        size += len(line) + 1
        if size > most - 40 and place < len(lines) - 1:
            return "\n".join([*kept, f"... {len(lines) - place} more lines in logs.tgz"])
        kept.append(line)
    return "\n".join(kept)
