"""Recipes that come with the package, so that a command needs no copy of the repository. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from leaderless.config.errors import RecipeError, nearest

FOLDER = Path("recipes")
"""First part of their names, as in `recipes/gsm8k/grpo.yaml`."""
_PACKAGE = Path(__file__).parents[1]


def recipes_folder() -> Path:
    """Folder of the recipes: a part of the installed package, or of the repository in which it is developed."""
    inside = _PACKAGE / FOLDER
    return inside if inside.is_dir() else _PACKAGE.parents[1] / FOLDER


def find_packaged(path: Path) -> Path:
    """The file that a path means: itself, or if there is none, the packaged one of that name.

    Args:
        path: File, such as `recipes/gsm8k/grpo.yaml`.

    Raises:
        RecipeError: There is neither.
    """
    if path.exists():
        return path
    if path.parts[:1] == FOLDER.parts and ".." not in path.parts:
        found = recipes_folder().joinpath(*path.parts[1:])
        if found.is_file():
            return found
    known = [str(FOLDER / file.relative_to(recipes_folder())) for file in recipes_folder().rglob("*.yaml")]
    remedy = f"recipes of the package have names such as {FOLDER}/gsm8k/grpo.yaml; `leaderless new DIR` writes one"
    raise RecipeError.at(
        "", f"{path} does not exist (looked for from {Path.cwd()}){nearest(str(path), known)}; {remedy}"
    )


def how_to_make(path: Path) -> str:
    """The remedy for a file or folder that does not exist, which begins with a semicolon; empty if none is known.

    Args:
        path: File or folder that a recipe names.
    """
    parts = path.parts
    made = next((part for part in parts if part.startswith("quickstart-")), None)
    if "runs" not in parts or made is None:
        return ""
    robot = " --robot" if made.removeprefix("quickstart-") in {"demonstrations", "imitated", "tasks"} else ""
    return f"; `leaderless quickstart{robot}` makes it"
