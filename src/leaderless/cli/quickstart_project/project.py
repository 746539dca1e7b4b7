"""The small project of `leaderless new`, which trains at once."""

from __future__ import annotations

import random
import re
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from leaderless.cli.quickstart_project.data import write_rows
from leaderless.config import RecipeError
from leaderless.observability.run_directory import write_atomically

FILES = ("recipe.yaml", "rewards.py", "test_project.py", "README.md")
NUM_PROJECT_HELD_OUT = 20
CHARACTERS = "0123456789>"


def write_project(folder: Path, model: str = "", seed: int = 0) -> None:
    """Write a project that trains a model to answer with the larger of two digits.

    Args:
        folder: Folder to make; it may exist if it is empty.
        model: Folder or hub name of a model; a tiny one is written if it is empty.
        seed: Seed of the tiny model's weights and of the choice of held-out questions.

    Raises:
        RecipeError: The folder has files already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError.at("", f"{folder} exists already, and is not an empty folder: name another one")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).lstrip("._-") or "project"
    source = Path(model).expanduser()
    values = {"name": name, "model": str(source.resolve()) if model and source.is_dir() else model}
    loader = PackageLoader("leaderless.cli.quickstart_project", "project_files")
    templates = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)  # noqa: S701 - no HTML
    for file in FILES:
        write_atomically(folder / file, templates.get_template(f"{file}.jinja").render(values))
    # A model that knows language is asked in words.
    ask = "Which digit is larger, {} or {}? Answer with the digit alone." if model else "{}{}>"
    rows = [{"question": ask.format(a, b), "answer": str(max(a, b))} for a in range(10) for b in range(10) if a != b]
    random.Random(seed).shuffle(rows)  # noqa: S311 - no secret
    write_rows(folder / "data/test.jsonl", rows[:NUM_PROJECT_HELD_OUT])
    write_rows(folder / "data/train.jsonl", rows[NUM_PROJECT_HELD_OUT:])
    if not model:
        from leaderless.models.loading.tiny import write_tiny_model

        write_tiny_model(folder / "model", CHARACTERS, seed=seed)
