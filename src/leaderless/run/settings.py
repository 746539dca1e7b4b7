"""Makes a recipe from the objects of a Python program: functions become names, datasets and models become files."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from leaderless.config import LoadedRecipe, Recipe, RecipeError
from leaderless.config.packaged_files import find_packaged, how_to_install
from leaderless.config.run import RunConfig
from leaderless.config.source import RecipeSource, Setting, apply_overrides, path_of, read_yaml, with_setting
from leaderless.data.sources.row_sources import plain_row
from leaderless.observability.console import print_line
from leaderless.observability.run_directory import write_atomically
from leaderless.planner.workflow import Workflow, WorkflowRecipe, builtin_workflows, load_recipe, write_workflow

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAIN = "__main__"
"""Module of a script or notebook, which other processes cannot import."""
GGUF, GGUF_ENDS = b"GGUF", 1 << 20
"""First bytes of a GGUF file; bytes at each of its ends by which it is known again."""
INPUTS = ".inputs"
"""Folder under `run.directory`."""
_Leaf = tuple[tuple[str, ...], Setting]


def read_settings(
    recipe: Recipe | Mapping[str, Setting] | str | Path, overrides: Sequence[str], settings: Mapping[str, Setting]
) -> WorkflowRecipe:
    """Read a recipe from what `Run` takes, and write files for the objects in it.

    Overrides change the recipe, and the settings change both.
    """
    given, whole = dict(leaves_of(settings)), dict[tuple[str, ...], Setting]()
    if isinstance(recipe, Mapping | Recipe):
        whole = dict(leaves_of(recipe.model_dump(mode="json") if isinstance(recipe, Recipe) else recipe))
        source = RecipeSource({}, {})
    elif str(recipe) in builtin_workflows() and not Path(recipe).exists():
        source = RecipeSource({"workflow": str(recipe)}, {})
    else:
        source = read_yaml(recipe_path(Path(recipe)))
    changed, key = apply_overrides(source, overrides), ("run", "directory")
    directory = given.get(key) or _section(changed, "run").get("directory") or whole.get(key)
    inputs = _Inputs(Path(str(directory or RunConfig.model_fields["directory"].default)) / INPUTS)
    source = _with(source, whole, inputs)
    source = _unpacked(_with(apply_overrides(source, overrides), given, inputs), inputs)
    has_local_reward = any(str(name).startswith(f"{MAIN}:") for name in _section(source, "reward"))
    if has_local_reward and "reward_processes" not in _section(source, "run"):
        source = with_setting(source, ("run", "reward_processes"), 0, f"default for rewards of {MAIN}")
    loaded = load_recipe(source)
    inputs.write()
    return loaded


def _with(source: RecipeSource, given: Mapping[tuple[str, ...], Setting], inputs: _Inputs) -> RecipeSource:
    """A recipe with a program's settings, by path."""
    for key, value in given.items():
        source = with_setting(source, key, inputs.plain(value, key), f"argument {'.'.join(key)}")
    return source


def _unpacked(source: RecipeSource, inputs: _Inputs) -> RecipeSource:
    """A recipe in which the folder of each GGUF file takes its place."""
    for role, model in _section(source, "models").items():
        key = ("models", role) if isinstance(model, str) else ("models", role, "path")
        path = model.get("path") if isinstance(model, Mapping) else model
        if isinstance(path, str) and is_gguf(Path(path)):
            source = with_setting(source, key, inputs.unpacked(Path(path)), source.place_of(key))
    return source


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file."""
    if not (path.is_file() and os.access(path, os.R_OK)):
        return False
    with path.open("rb") as file:
        return file.read(len(GGUF)) == GGUF


def gguf_folder(file: Path, inputs: Path) -> Path:
    """The folder to which a GGUF file is unpacked, which its size and both of its ends name."""
    with file.open("rb") as content:
        digest, size = hashlib.sha256(content.read(GGUF_ENDS)), file.stat().st_size
        content.seek(max(0, size - GGUF_ENDS))
        digest.update(content.read() + str(size).encode())
    return inputs / f"{file.stem}-{digest.hexdigest()[:16]}"


def unpack_gguf(file: Path, folder: Path, say: Callable[[str], None] = print_line) -> None:
    """Make the folder of a GGUF file, in another process, whose memory is not that of the run.

    Other processes that need the same folder wait for it.

    Raises:
        RecipeError: The file cannot be read, or a package for that is missing.
    """
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        reason = f"{file} is a GGUF file, which {' and '.join(missing)} would read: {how_to_install('gguf')}"
        raise RecipeError.at("models", reason)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return
        say(f"unpacking {file} into {folder}, this once")
        unfinished = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        command = [sys.executable, "-m", "leaderless.models.loading.gguf", str(file.resolve()), str(unfinished)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)  # noqa: S603
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise RecipeError.at("models", f"{file} is a GGUF file that cannot be unpacked: {reason}")
        unfinished.rename(folder)


def recipe_path(target: Path) -> Path:
    """The recipe that a path means: the file, a run's recipe in its folder, or the packaged one of that name."""
    return target / "config.yaml" if target.is_dir() else find_packaged(target)


def check_importable(loaded: LoadedRecipe) -> None:
    """Refuse functions that other processes cannot import because a script or notebook defines them."""
    for path, value in leaves_of(loaded.recipe.model_dump(mode="json")):
        name = next((part for part in (*path, value) if str(part).startswith(f"{MAIN}:")), None)
        if name is not None:
            reason = f"'{name}' is defined in the script or notebook, which other processes cannot import: "
            remedy = "move it into a module, or train with workers=1"
            raise loaded.locate(RecipeError.at(".".join(path), reason + remedy))


def _section(source: RecipeSource, name: str) -> Mapping[str, Setting]:
    section = source.settings.get(name)
    return section if isinstance(section, Mapping) else {}


def leaves_of(settings: Mapping[str, Setting], prefix: tuple[str, ...] = ()) -> Iterator[_Leaf]:
    """Settings that are not sections, by path. Keys of the mapping may be dotted, or functions."""
    for key, value in settings.items():
        name = _name_of(key, prefix) if callable(key) else str(key)
        path = path_of(".".join((*prefix, name)))
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, path)
        else:
            yield path, value


def _name_of(function: Callable[..., object], path: Sequence[str]) -> str:
    """The name by which workers find a function."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if getattr(sys.modules.get(module), name or " ", None) is not function:
        reason = f"{function!r} must be a function defined with `def` at the top level of a module or notebook"
        raise RecipeError.at(".".join(path), reason)
    return f"{module}:{name}"


class _Inputs:
    """Files for objects, named after their content, so that the same object gives the same setting at a later start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._missing: dict[Path, Callable[[Path], object]] = {}

    def plain(self, value: Setting, path: tuple[str, ...]) -> Setting:
        """A program's value for the setting at a path, in a form that a YAML file can hold."""
        key = ".".join(path)
        if isinstance(value, Workflow):
            file = self._text(write_workflow(value), ".yaml")
            self.write()  # reading the recipe needs it
            return file
        if isinstance(value, Path):
            return str(value)
        rows = _rows_of(value) if path[0] == "data" else None
        if rows is not None:
            file = self._text("".join(_lines(rows, key)), ".jsonl")
            return file if path[-1] == "path" else {"path": file}
        if path[0] == "models" and isinstance(value, tuple):
            return self._model(value, key)
        if hasattr(value, "save_pretrained"):
            raise RecipeError.at(key, "must come with its tokenizer: give the pair (model, tokenizer)")
        if isinstance(value, list | tuple):
            return [self.plain(inner, path) for inner in value]
        return _name_of(value, path) if callable(value) else value

    def unpacked(self, file: Path) -> str:
        """The folder of a GGUF file."""
        path = gguf_folder(file, self._folder)
        self._missing[path] = partial(unpack_gguf, file)
        return str(path)

    def write(self) -> None:
        """Write the files that are not there yet."""
        while self._missing:
            path, write = self._missing.popitem()
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write(path)

    def _text(self, text: str, suffix: str) -> str:
        path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}{suffix}"
        self._missing[path] = partial(write_atomically, content=text)
        return str(path)

    def _model(self, pair: tuple[PreTrainedModel, PreTrainedTokenizerBase], key: str) -> str:
        if len(pair) != 2 or not all(hasattr(part, "save_pretrained") for part in pair):
            raise RecipeError.at(key, "must be a path, or a pair (model, tokenizer) of transformers")
        model, tokenizer = pair
        digest = hashlib.sha256(model.config.to_json_string().encode())
        vocabulary = sorted(tokenizer.get_vocab().items())
        digest.update(f"{vocabulary} {tokenizer.chat_template} {tokenizer.eos_token_id}".encode())
        for name, tensor in sorted(model.state_dict().items()):
            import torch

            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        path = self._folder / f"model-{digest.hexdigest()[:16]}"
        self._missing[path] = partial(_save_model, pair)
        return str(path)


def _rows_of(value: Setting) -> Iterable[Mapping[str, object]] | None:
    """The rows of a dataset, which is a list of mappings or one of the library `datasets`; None for anything else."""
    is_list = isinstance(value, list | tuple) and value and all(isinstance(row, Mapping) for row in value)
    return cast("Iterable[Mapping[str, object]]", value) if is_list or hasattr(value, "column_names") else None


def _lines(rows: Iterable[Mapping[str, object]], key: str) -> Iterator[str]:
    for number, row in enumerate(rows):
        yield json.dumps(plain_row(row, f"{key}[{number}]"), ensure_ascii=False) + "\n"


def _save_model(pair: tuple[PreTrainedModel, PreTrainedTokenizerBase], path: Path) -> None:
    partial_path = path.with_name(f"{path.name}.partial-{os.getpid()}")
    for part in pair:
        part.save_pretrained(str(partial_path))
    if path.exists():
        shutil.rmtree(partial_path)
    else:
        partial_path.rename(path)
