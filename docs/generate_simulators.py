"""A page for each simulator: how it is installed, its options, what it shows and takes, and what was tried.

`.venv-bodies/bin/python docs/generate_simulators.py` records what simulators declare; those not installed stay.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import yaml
from generate_markup import cell, table_of

from leaderless.config.environment import BodyConfig
from leaderless.embodied.simulators.protocol import Continuous, Spaces, VectorEnvironment
from leaderless.embodied.simulators.registry import ADAPTERS, find_body

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS / "performance/bodies.json"
SPACES = DOCS / "performance/body_spaces.json"
WRITTEN = DOCS / "reference/simulators.yaml"
Space = Mapping[str, object]


class Simulator(NamedTuple):
    """What only a person knows of a simulator.

    Attributes:
        title: Heading of its page.
        install: Commands.
        recipe: Part of a recipe that uses it.
        traps: Behavior that users may not expect.
        tried: Trials that are not in the tables, or how to make them.
    """

    title: str
    install: str
    recipe: str
    traps: list[str]
    tried: str = ""


def simulator_pages() -> dict[str, str]:
    """The pages, by the names that recipes use."""
    table = yaml.safe_load(WRITTEN.read_text(encoding="utf-8"))
    return {name: _page(name, Simulator(**one)) for name, one in table.items()}


def _page(name: str, simulator: Simulator) -> str:
    module, _, kind = ADAPTERS[name].partition(":")
    found = getattr(import_module(module), kind)
    about = (inspect.getdoc(found) or "").partition("\n\nAttributes:")[0]
    parts = [
        f"# {simulator.title}",
        f"`body.type: {name}`. {cell(about, keep_lines=True)}",
        "## Installation",
        f"```shell\n{simulator.install.strip()}\n```",
        "## Options",
        table_of(("option", "default", "meaning"), _options(found)),
        "## Observations and actions",
        _shown(name),
        "## What was tried",
        _tried(name, simulator.tried),
        "## Traps",
        "\n".join(f"- {trap}" for trap in simulator.traps),
        "## In a recipe",
        f"```yaml\n{simulator.recipe.strip()}\n```",
        "[`body`](../configuration/body.md) lists all settings; [Bodies](../../guides/bodies.md) explains them.",
    ]
    return "\n\n".join(parts)


def _options(found: type[VectorEnvironment]) -> list[tuple[str, str, str]]:
    """Name, default and meaning of each option, from the constructor and its docstring."""
    said = (inspect.getdoc(found.__init__) or "").partition("Args:\n")[2].partition("\n\n")[0]
    meanings = {name: cell(text) for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", said, re.M)}
    parameters = list(inspect.signature(found).parameters.values())[1:]  # the first is the number of episodes
    return [(f"`{one.name}`", _default(one.default), meanings[one.name]) for one in parameters]


def _default(value: object) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    if value is None or value == "":
        return "none"
    if isinstance(value, tuple):
        return ", ".join(f"`{one}`" for one in value)
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def _shown(name: str) -> str:
    """What environments of a type show and take, as they declare it."""
    table = json.loads(SPACES.read_text(encoding="utf-8"))
    rows = [
        (
            case,
            ", ".join(f"`{camera}` {size}" for camera, size in one["images"].items()) or "none",
            f"{one['state_size']:,}",
            "yes" if one["has_instructions"] else "no",
            one["actions"],
            f"{one['max_steps']:,}",
        )
        for case, one in table.items()
        if one["type"] == name
    ]
    if not rows:
        return "They are read from the task when it is made, and were not recorded."
    titles = ("environment", "images", "numbers of the state", "instruction", "actions", "most steps")
    return f"As they are declared, with the options of `benchmarks/bodies.py`:\n\n{table_of(titles, rows)}"


def _tried(name: str, more: str) -> str:
    """The rules, versions and speeds of a type, as `benchmarks/bodies.py` has measured them."""
    table = json.loads(RESULTS.read_text(encoding="utf-8"))["environments"]
    rows = []
    for case, one in table.items():
        if one["type"] == name:
            rates = one["steps_per_second"]
            kept = f"{one['num_rules'] - len(one['broken'])} of {one['num_rules']}"
            speed = f"{rates[len(rates) // 2]:,} ({rates[0]:,} to {rates[-1]:,})"
            rows.append((case, one["package"], kept, speed))
    titles = ("environment", "package", "rules kept", "steps/s: median (range)")
    parts = [table_of(titles, rows), MEASURED] if rows else ["Speed was not measured."]
    return "\n\n".join([*parts, more] if more else parts)


MEASURED = (
    "Random actions, single steps in one process, on two cores that did nothing else. "
    "[Simulators](../bodies.md) explains the rules, and how to try them again."
)


def described(kind: str, spaces: Spaces) -> Space:
    """What an environment of a type shows and takes, as it is recorded."""
    actions = spaces.actions
    return {
        "type": kind,
        "images": {camera: f"{height} x {width}" for camera, (height, width) in spaces.images.items()},
        "state_size": spaces.state_size,
        "has_instructions": spaces.has_instructions,
        "actions": _in_words(actions) if isinstance(actions, Continuous) else f"one of {actions.num_choices}",
        "max_steps": spaces.max_steps,
    }


def _in_words(actions: Continuous) -> str:
    ranges = set(zip(actions.low, actions.high, strict=True))
    low, high = min(actions.low), max(actions.high)
    number = f"{actions.dim} numbers"
    return (
        f"{number} from {low:g} to {high:g}" if len(ranges) == 1 else f"{number}, in ranges within {low:g} to {high:g}"
    )


def main() -> None:
    """Record what all simulators declare that are installed here."""
    sys.path.insert(0, str(DOCS.parent))
    from benchmarks.bodies import CASES

    table = json.loads(SPACES.read_text(encoding="utf-8")) if SPACES.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libero/libero"
        for place in ("assets", "bddl_files/libero_spatial"):
            (library / place).mkdir(parents=True)
        (library / "bddl_files/libero_spatial/task.bddl").touch()  # all that declaring takes
        cases = {**CASES, "LIBERO": ("libero", {"root": folder}, "")}
        for case, (kind, options, _) in cases.items():
            try:
                one = find_body(BodyConfig(type=kind, options=dict(options)))(1, **options)
            except (ImportError, OSError) as error:
                print(f"{case}: {error}")  # noqa: T201 - what the command is for
                continue
            table[case] = described(kind, one.spaces)
            one.close()
    SPACES.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
