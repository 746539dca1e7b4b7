"""Checks how docstrings and `help=` describe arguments: `python -m tests.docstrings`, a part of `make lint`.

The line of an argument is a noun phrase that stands alone, as in "rank: Rank that failed." Lines that begin with
"That", "Of", "What", "How", "The same" or a verb only make sense together with the name, and often not even then. They
are recognized by their first words; whether a sentence is a good one is for the reader to judge.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "examples", "tests", "benchmarks")
SECTIONS = {"Args:", "Attributes:"}
ENTRY = re.compile(r"(?P<name>\*{0,2}\w+(?: \([^)]*\))?): (?P<text>\S.*)")
FRAGMENT = re.compile(
    r"(That|Of|Whose|Whom?|Told|Called|Which|By|For|From|To|In|On|At|As|With|Where|When|Because|Says|Names(?! of)|"
    r"Holds|Has|Have|Takes|Makes|Gives|Gets|Knows|Tells|Identifies|Computes|Decides|Describes|Keeps|Reads|Writes|Shows|"
    r"Means|Counts|Is|Are|Was|Were|Must|May|Can|Not|Behind|Beside|Before|After|Reported|Given|Asked|Needed|Wanted|Made|"
    r"Used|Written|Stands|Divides|Between|What|How|Why|Who|The same)\b"
)


def main() -> None:
    problems = [
        f"{path.relative_to(ROOT)}:{line}: {problem}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, problem in problems_of(path.read_text(encoding="utf-8"))
    ]
    print("\n".join(problems) or "docstrings: all arguments and attributes are described by noun phrases")
    sys.exit(1 if problems else 0)


def problems_of(source: str) -> Iterator[tuple[int, str]]:
    """Each description of an argument or attribute that does not begin like a noun phrase, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            yield from problem_of(node.value.lineno, "help", str(node.value.value).capitalize())
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            continue
        docstring = ast.get_docstring(node, clean=False)
        if docstring is not None:
            begin = node.body[0].lineno
            for offset, name, text in entries(docstring):
                yield from problem_of(begin + offset, name, text)


def problem_of(line: int, name: str, text: str) -> Iterator[tuple[int, str]]:
    first = FRAGMENT.match(text)
    if first:
        yield line, f'"{name}: {text[:40]}": begin with what it is, not with "{first[0]}"'


def entries(docstring: str) -> Iterator[tuple[int, str, str]]:
    """Offset of the line, name and first line of each argument or attribute."""
    indent: int | None = None
    in_section = False
    for offset, line in enumerate(docstring.split("\n")):
        text, depth = line.strip(), len(line) - len(line.lstrip())
        if text in SECTIONS:
            in_section, indent = True, None
            section_depth = depth
        elif in_section and text:
            if depth <= section_depth:
                in_section = False
                continue
            indent = depth if indent is None else indent
            match = ENTRY.match(text) if depth == indent else None
            if match:
                yield offset, match["name"], match["text"]


if __name__ == "__main__":
    main()
