"""LIBERO's tasks, with its files in a folder of the user's. Imports no torch of its own."""

from __future__ import annotations

import codecs
import os
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import numpy as np
import yaml
from numpy.typing import NDArray
from typing_extensions import override

from leaderless.embodied.simulators.protocol import Continuous, Floats, Spaces
from leaderless.embodied.simulators.single_envs import Single, SingleObservation, Singles, StepOutcome
from leaderless.environments.adapters import GL_REMEDY, needed
from leaderless.environments.protocol import Task

CAMERAS = ("agentview", "robot0_eye_in_hand")
SETTLING_STEPS = 15
"""Steps without a movement after a start, in which things fall to where they stay."""
WRAPPERS = "libero.libero.envs.env_wrapper"
"""LIBERO's module of environments."""
ROOT = "LIBERO_ROOT"
"""Environment variable that names the folder of LIBERO's repository, where the option does not."""


class Libero(Singles):
    """Tasks of one of LIBERO's suites, from its own start states.

    The column `task` of the dataset's row is the number of a task in the order of its file names, and `start` the
    number of its start state; without them, the seed chooses. An action is a movement along three axes, a turn about
    them, and the gripper, which closes above 0. The state is the gripper's place, its turn as an axis times an angle,
    and the places of its two fingers. Images are upright.
    """

    def __init__(
        self,
        num: int,
        suite: str = "libero_spatial",
        *,
        root: str | None = None,
        max_steps: int = 512,
        image_size: int = 128,
    ) -> None:
        """Make the environments; the first episode of a task takes seconds to load.

        Args:
            num: Number of episodes.
            suite: Name of the suite, such as `libero_10`.
            root: Folder of LIBERO's repository with all of its assets; by default, that in the variable LIBERO_ROOT.
            max_steps: Steps after which an episode is truncated.
            image_size: Pixels of a side of the images of both cameras; 0 for none.

        Raises:
            ModuleNotFoundError: A package is missing.
            FileNotFoundError: LIBERO's files are not there.
            OSError: It cannot render here.
        """
        if max_steps < 1 or image_size < 0:
            raise ValueError(
                f"max_steps={max_steps}, image_size={image_size}: there must be a step, and no negative size"
            )
        folder = root or os.environ.get(ROOT)
        if not folder:
            raise FileNotFoundError(
                f"LIBERO's files are not named: give its repository's folder as `root` or in {ROOT}"
            )
        library = Path(folder).resolve() / "libero" / "libero"
        tasks = sorted(one.stem for one in (library / "bddl_files" / suite).glob("*.bddl"))
        if not tasks or not (library / "assets").is_dir():
            raise FileNotFoundError(
                f"'{library}' has no assets, or no tasks of '{suite}' in bddl_files: copy LIBERO's repository with its "
                "assets there"
            )
        super().__init__(num, partial(_Libero, _Suite(library, suite, tasks), max_steps, image_size))


class _Suite:
    """The files of a suite."""

    def __init__(self, library: Path, name: str, tasks: list[str]) -> None:
        self.library, self.name, self.tasks = library, name, tasks

    def start_of(self, row: Task, seed: int) -> tuple[str, NDArray[np.float64]]:
        """Name of the task of an episode, and the state in which it starts."""
        chance = np.random.default_rng(seed)
        name = self.tasks[_number(row, "task", len(self.tasks), chance)]
        starts = starts_of(self.library / "init_files", self.name, name)
        return name, starts[_number(row, "start", len(starts), chance)]

    def open(self, task: str, image_size: int) -> Any:  # noqa: ANN401 - LIBERO has no types
        """The simulator of a task, made by LIBERO."""
        needed("robosuite", "libero")
        needed("bddl", "libero")
        wrappers = _environments(self.library)
        try:
            return wrappers.ControlEnv(
                str(self.library / "bddl_files" / self.name / f"{task}.bddl"),
                use_camera_obs=image_size > 0,
                has_offscreen_renderer=image_size > 0,
                camera_names=list(CAMERAS) if image_size else [],
                camera_heights=image_size,
                camera_widths=image_size,
                ignore_done=True,
            )
        except (ImportError, AttributeError, RuntimeError) as error:
            raise OSError(f"LIBERO's '{task}' cannot be opened ({error}); {GL_REMEDY}") from error


def _number(row: Task, column: str, count: int, chance: np.random.Generator) -> int:
    drawn, given = int(chance.integers(count)), row.get(column)
    if given is None:
        return drawn
    if not isinstance(given, int) or not 0 <= given < count:
        raise ValueError(f"column '{column}' of the dataset is {given!r}: must be a number from 0 to {count - 1}")
    return given


def _environments(library: Path) -> Any:  # noqa: ANN401 - LIBERO has no types
    """LIBERO's module of environments, without the question that it asks on the terminal when it is first imported.

    It reads the places of its files from a file, anew for each question. That file is there only while it is imported:
    it would be left behind when this process is killed. Afterwards the answers come from here.
    """
    if "libero.libero" in sys.modules:
        return needed(WRAPPERS, "libero")
    sys.path.append(str(library.parents[1]))
    names = {"bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets", "datasets": "datasets"}
    places = {"benchmark_root": str(library)} | {key: str(library / name) for key, name in names.items()}
    with tempfile.TemporaryDirectory(prefix="leaderless-libero-") as folder:
        (Path(folder) / "config.yaml").write_text(yaml.safe_dump(places), encoding="utf-8")
        os.environ["LIBERO_CONFIG_PATH"] = folder
        try:
            package = needed("libero.libero", "libero")
            package.get_libero_path = places.__getitem__  # type: ignore[attr-defined]  # others take it from there
            needed("libero.libero.utils", "libero")  # it reads the file as well
            return needed(WRAPPERS, "libero")
        finally:
            del os.environ["LIBERO_CONFIG_PATH"]


class _Libero(Single):
    def __init__(self, suite: _Suite, max_steps: int, image_size: int) -> None:
        self._suite, self._image_size = suite, image_size
        self._task, self._world = "", cast("Any", None)
        cameras = dict.fromkeys(CAMERAS, (image_size, image_size)) if image_size else {}
        self.spaces = Spaces(cameras, 8, Continuous((-1.0,) * 7, (1.0,) * 7), max_steps, has_instructions=True)

    @override
    def reset(self, task: Task, seed: int) -> SingleObservation:
        name, start = self._suite.start_of(task, seed)
        if name != self._task:
            self.close()
            self._world, self._task = self._suite.open(name, self._image_size), name
        self._world.seed(0)  # things are placed by chance first; the start state then places them
        self._world.reset()
        shown = self._world.set_init_state(start)
        still = np.zeros(7)
        still[6] = -1
        for _ in range(SETTLING_STEPS):
            shown, *_ = self._world.step(still)
        return self._seen(shown)

    @override
    def step(self, action: NDArray[np.generic]) -> StepOutcome:
        shown, *_ = self._world.step(np.asarray(action, np.float64))
        is_success = bool(self._world.check_success())
        return StepOutcome(self._seen(shown), float(is_success), is_success, False, is_success, {"task": self._task})

    def _seen(self, shown: dict[str, NDArray[np.float64]]) -> SingleObservation:
        images = {name: np.array(shown[f"{name}_image"], np.uint8)[::-1, ::-1].copy() for name in self.spaces.images}
        turn = axis_angle(shown["robot0_eef_quat"])
        parts = (shown["robot0_eef_pos"], turn, shown["robot0_gripper_qpos"])
        state = np.concatenate([np.asarray(part, np.float32) for part in parts])
        return SingleObservation(images, state, self._world.language_instruction)

    @override
    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world, self._task = None, ""


def axis_angle(quaternion: NDArray[np.float64]) -> Floats:
    """A turn (x, y, z, w) as its axis times its angle, which is from 0 to pi times 2."""
    w = float(np.clip(quaternion[3], -1, 1))
    length = float(np.sqrt(1 - w * w))
    if length < 1e-9:
        return np.zeros(3, np.float32)
    turn: Floats = (quaternion[:3] * 2 * np.arccos(w) / length).astype(np.float32)
    return turn


def read_states(path: Path) -> NDArray[np.float64]:
    """States [number of starts, size] of a file of LIBERO (`.pruned_init`, `.init`), or of its conversion (`.npy`).

    Raises:
        ValueError: The file holds something else than an array of numbers.
    """
    try:
        found = np.load(path, allow_pickle=False) if path.suffix == ".npy" else _unpickled(path)
        states = np.array(found, np.float64)
        if not isinstance(found, np.ndarray) or states.ndim != 2 or not np.isfinite(states).all():
            raise ValueError(f"a {type(found).__name__} {states.shape} in place of finite rows")
    except (UnpicklingError, zipfile.BadZipFile, RuntimeError, ValueError, TypeError, EOFError) as error:
        raise ValueError(f"'{path}' does not hold start states of LIBERO ({error}): get the file again") from error
    return states


def _unpickled(path: Path) -> object:
    """Contents of a file that torch has saved, which may be an array of numbers and nothing else."""
    import torch  # LIBERO itself needs it

    with zipfile.ZipFile(path) as archive:  # torch compares no checksums, and reads files of other forms, too
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"'{damaged}' is damaged")
    make = np.empty(0).__reduce__()[0]  # NumPy's function that begins an array, of which versions have two names
    makers: list[Any] = [(make, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    kinds: list[Any] = [np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8"))]
    with torch.serialization.safe_globals([*kinds, (codecs.encode, "_codecs.encode"), *makers]):
        try:
            return torch.load(path, weights_only=True)
        except Exception as error:  # what is no pickle fails in many ways
            # Without the rest of torch's text, which advises to read the file with less care.
            first = str(error.__context__ or error).strip().partition("\n")[0].partition(". ")[0]
            raise UnpicklingError(f"{type(error).__name__}: {first}") from error


def starts_of(folder: Path, suite: str, task: str) -> NDArray[np.float64]:
    """Start states of a task, from LIBERO's folder `init_files`.

    They are converted once, and written next to LIBERO's file if that is allowed.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It holds something else.
    """
    converted = folder / suite / f"{task}.npy"
    if converted.exists():
        return read_states(converted)
    original = converted.with_suffix(".pruned_init")
    if not original.exists():
        raise FileNotFoundError(f"there is no '{original}': copy LIBERO's folder init_files there")
    states = read_states(original)
    partial = converted.with_suffix(".partial.npy")
    try:
        np.save(partial, states, allow_pickle=False)
        partial.replace(converted)
    except OSError:  # a folder that may not be written to is converted again each time
        partial.unlink(missing_ok=True)
    return states
