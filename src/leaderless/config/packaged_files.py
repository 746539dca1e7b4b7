"""Files that come with the package, so that a command needs no copy of the repository. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from leaderless.base.errors import RecipeError, nearest

if TYPE_CHECKING:
    from leaderless.config.source import Setting

FOLDER = Path("recipes")
"""First part of their names, as in `recipes/gsm8k/grpo.yaml`."""
_PACKAGE = Path(__file__).parents[1]


def recipes_folder() -> Path:
    """Folder of the recipes: a part of the installed package, or of the repository in which it is developed."""
    inside = _PACKAGE / FOLDER
    return inside if inside.is_dir() else _PACKAGE.parents[1] / FOLDER


def find_packaged(path: Path) -> Path:
    """The file that a path means: itself, or else the packaged one of that name; a RecipeError if there is neither."""
    if path.exists():
        return path
    if path.parts[:1] == FOLDER.parts and ".." not in path.parts:
        found = recipes_folder().joinpath(*path.parts[1:])
        if found.is_file():
            return found
    known = [str(FOLDER / file.relative_to(recipes_folder())) for file in recipes_folder().rglob("*.yaml")]
    known += [str(file) for file in path.parent.glob("*.yaml")]
    remedy = f"recipes of the package have names such as {FOLDER}/gsm8k/grpo.yaml; `leaderless new DIR` writes one"
    raise RecipeError.at(
        "", f"{path} does not exist (looked for from {Path.cwd()}){nearest(str(path), known)}; {remedy}"
    )


def with_packaged_files(path: Path, settings: dict[str, Setting]) -> dict[str, Setting]:
    """Settings of a file, where names of packaged files are made absolute if the file is packaged, too.

    In a copy of the repository they stay as they are, since they are there.
    """
    if path.resolve().is_relative_to(recipes_folder().resolve()):
        return {key: _with_packaged_files(value) for key, value in settings.items()}
    return settings


def _with_packaged_files(value: Setting) -> Setting:
    if isinstance(value, Mapping):
        return {key: _with_packaged_files(one) for key, one in value.items()}
    if isinstance(value, str) and value.startswith(f"{FOLDER}/") and not Path(value).exists():
        found = recipes_folder() / Path(value).relative_to(FOLDER)
        return str(found) if found.exists() else value
    return value


def how_to_install(*extras: str) -> str:
    """The command that installs optional parts, such as `serve`: of the installed package, or of a developed copy."""
    names = ",".join(extras)
    if (_PACKAGE / FOLDER).is_dir():
        return f"pip install 'leaderless[{names}]'"
    return f"from a copy of the project, pip install --editable '.[{names}]'"


def server_refusal(*extras: str) -> str | None:
    """Why this process cannot answer clients at an address; None if it can.

    Args:
        extras: Further parts that are to be installed with what is missing.
    """
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    return f"needs the package {' and '.join(missing)}: {how_to_install('serve', *extras)}" if missing else None


_OPTIONS = {"demonstrations": " --robot", "imitated": " --robot", "tasks": " --robot", "problems": " --real"}
"""Option of `leaderless quickstart` that makes a folder, by the end of the folder's name."""
_PREPARED = ("calculator", "counting", "nim", "search", "spelling")
_EXAMPLES = {
    "guess-data": "python examples/environment/guess.py",
    "look-data": "python examples/tools/look.py",
    "own-data-rows": "python examples/own_data/convert.py",
    "order": "python -m examples.order_game.prepare",
    "signal": "python -m examples.signal_game.prepare",
    "preferences": "python -m examples.preferences.prepare",
    **{f"{name}-data": f"python -m examples.{name}.prepare" for name in _PREPARED},
}
"""Command of an example, in a copy of the project, that makes a folder in `runs`."""


def how_to_make(path: Path) -> str:
    """The remedy for a file or folder that does not exist, which begins with a semicolon; empty if none is known."""
    parts = path.parts if "runs" in path.parts else ()
    if example := next((_EXAMPLES[part] for part in parts if part in _EXAMPLES), ""):
        return f"; in a copy of the project, `{example}` makes it"
    made = next((part for part in parts if part.startswith("quickstart-")), None)
    if made is None:
        return ""
    option = _OPTIONS.get(made.removeprefix("quickstart-"), "")
    return f"; `leaderless quickstart{option}` makes it"
