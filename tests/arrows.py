"""Which package may import which: the one table, and all imports of the source, read from its syntax trees.

    python -m tests.arrows

prints the table as CONTRIBUTING.md shows it, and the imports that break it.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = "leaderless"
ROOMS = {
    "cli": "the command line, recipes of other frameworks, the project that `leaderless new` writes",
    "serving": "a wing: OpenAI's API, learning online, training services, the live page; only it imports web libraries",
    "embodied": "a wing: policies of bodies, simulators, robots, and how they are trained",
    "run": "a run from its recipe to its report; launchers, checks of machines, jobs of clusters",
    "worker": "one process: builds its part, walks its chain, evaluates, saves and supervises",
    "stages": "the functions that built-in nodes run, one file a stage",
    "environments": "episodes: environments, tools and programs, how they are played, traces of what was said",
    "rollout": "engines that generate: the native one, and those outside of this package",
    "training": "engines that train",
    "models": "decoders, their attention, parallelism, adapters, images, loading and chat templates",
    "rewards": "rewards, judges, and the sandbox for programs that the policy wrote",
    "data": "batch, dataset, dataloader and databuffer",
    "distributed": "how ranks and processes exchange numbers, rows and weights",
    "planner": "the workflow that a user writes, and the plan that becomes of it; no torch",
    "observability": "metrics, traces, run directory, report, loggers; nothing here changes training",
    "config": "what a user may set; no torch",
    "algorithms": "the mathematics, one file an algorithm",
    "base": "sections of recipes, errors, devices, versions; no torch",
}
"""All packages, from the top to the bottom: each may import those below it."""
WINGS = ("serving", "embodied")
"""Packages that only the command line imports, and that do not import each other."""


def may_import(importer: str, imported: str) -> bool:
    """Whether the table lets a package import another one."""
    if imported == importer:
        return True
    if imported in WINGS:
        return importer == "cli"
    return list(ROOMS).index(imported) > list(ROOMS).index(importer)


class Arrow(NamedTuple):
    """An import: at the top of a module, in a function, or for types."""

    module: str
    line: int
    imported: str


class Source(NamedTuple):
    """A module: its file, its imports of this package's own modules, and the names of its public classes."""

    path: Path
    arrows: tuple[Arrow, ...]
    classes: tuple[str, ...]


@functools.cache
def sources() -> tuple[Source, ...]:
    """All modules of the package, which are parsed once for all tests of a process."""
    found = []
    for path in sorted((SOURCE / PACKAGE).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = (node.name for node in tree.body if isinstance(node, ast.ClassDef))
        public = tuple(name for name in classes if not name.startswith("_"))
        found.append(Source(path, tuple(_arrows_of(path, tree)), public))
    return tuple(found)


def arrows() -> Iterator[Arrow]:
    """Yield all imports of this package's own modules."""
    for source in sources():
        yield from source.arrows


def _arrows_of(path: Path, tree: ast.Module) -> Iterator[Arrow]:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    module, package = ".".join(parts).removesuffix(".__init__"), parts[:-1]
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            begin = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*begin, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (Arrow(module, node.lineno, name) for name in names if name.split(".")[0] == PACKAGE)


def _statements(block: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements in a block; they are not looked for in expressions, which hold none."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for node in getattr(block, field, ()):
            yield node
            yield from _statements(node)


def room_of(module: str) -> str | None:
    """The package of a module; None for what is in none."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else None


def broken() -> list[str]:
    """Imports that the table does not allow. The root, which names what users import, and its entry may import all."""
    found = []
    for arrow in arrows():
        importer, imported = room_of(arrow.module), room_of(arrow.imported)
        if importer is not None and (imported is None or not may_import(importer, imported)):
            found.append(f"{arrow.module}:{arrow.line} imports {arrow.imported}")
    return found


def section() -> str:
    """The table as a page shows it."""
    rows = [f"| `{name}/` | {text} |" for name, text in ROOMS.items()]
    return "\n".join(["| package | content |", "| --- | --- |", *rows])


if __name__ == "__main__":
    sys.stdout.write("\n".join([section(), "", *broken(), ""]))
