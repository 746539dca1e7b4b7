"""Worlds of Harbor's tasks: a folder in bubblewrap, or a container of Docker. Imports no torch."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Self

from typing_extensions import override

from leaderless.config import RecipeError
from leaderless.environments.adapters.harbor_folder import HarborTask
from leaderless.environments.programs.run_command import run_command
from leaderless.rewards.sandbox.messages import SandboxError
from leaderless.rewards.sandbox.sandboxes import bubblewrap_refusal, find_bubblewrap

_KEY = "environment.options.world"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_READ = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/group", "/etc/ld.so.cache"),
    *("/etc/localtime", "/etc/nsswitch.conf", "/etc/passwd", "/etc/python3", "/etc/ssl"),
)
"""Files of this machine that a task sees: programs, but no data."""
_OWN = ("/tmp", "/root", "/logs", "/tests", "/solution")  # noqa: S108 - inside of a world
_IGNORED = frozenset({"FROM", "CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL"})
"""Instructions of a Dockerfile that change no file."""
_TIMED_OUT = 124
"""Exit code of `timeout` for a command that it has ended."""
_SETTLE_S = 60.0
"""Seconds in which a container starts, or takes a file."""


class Ran(NamedTuple):
    """End of a command in a world.

    Attributes:
        code: Exit code; None if it took too long.
        output: End of what it has printed.
    """

    code: int | None
    output: str


class TaskWorld(ABC):
    """The surroundings of one task, in a context."""

    def __init__(self, task: HarborTask) -> None:
        self.task = task

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Make them."""

    @abstractmethod
    async def __aexit__(self, *error: object) -> None:
        """Remove them."""

    @abstractmethod
    async def run(self, command: str, timeout_s: float, env: Mapping[str, str] | None = None) -> Ran:
        """Run a command of the shell in the folder of the task."""

    @abstractmethod
    async def put(self, folder: Path, place: str) -> None:
        """Make a place that holds a folder's content, and nothing else."""

    async def read(self, place: str) -> str | None:
        """The text of a file; None if there is none. It is read inside, where a link leads nowhere else."""
        found = await self.run(f"cat -- {shlex.quote(place)}", _SETTLE_S)
        return found.output if found.code == 0 else None


class LocalWorld(TaskWorld):
    """A folder, seen through bubblewrap: programs of this machine, no network, and nothing else to read.

    Of a Dockerfile it follows WORKDIR, ENV and COPY; what builds an image needs Docker.
    """

    @staticmethod
    def refusal(task: HarborTask) -> str | None:
        """Reason why a task cannot be played here, with the remedy; None if it can."""
        try:
            _Recipe.of(task)
        except ValueError as error:
            return f"{error}: set world to docker, or play it with the programs of this machine, without a Dockerfile"
        return None

    @override
    async def __aenter__(self) -> Self:
        self._recipe = _Recipe.of(self.task)
        self._folder = Path(tempfile.mkdtemp(prefix="leaderless-harbor-"))
        self._tops = {*_OWN, *(f"/{PurePosixPath(place).parts[1]}" for place in self._recipe.places)}
        for top in self._tops:
            self._here(top).mkdir()
        self._here(self._recipe.workdir).mkdir(parents=True, exist_ok=True)
        self._here("/logs/verifier").mkdir()
        self._here("/logs/agent").mkdir()
        for source, target in self._recipe.copies:
            await asyncio.to_thread(_copy, source, self._here(target), is_folder=target.endswith("/"))
        return self

    @override
    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    @override
    async def run(self, command: str, timeout_s: float, env: Mapping[str, str] | None = None) -> Ran:
        program = find_bubblewrap()
        if program is None:
            raise SandboxError("the program 'bwrap' is gone: install the package bubblewrap")
        shown = [part for path in _READ for part in ("--ro-bind-try", path, path)]
        own = [part for top in sorted(self._tops) for part in ("--bind", str(self._here(top)), top)]
        inside = [program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", *shown]
        inside += ["--proc", "/proc", "--dev", "/dev", *own, "--remount-ro", "/", "--chdir", self._recipe.workdir]
        settings = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8", **self._recipe.env, **(env or {})}
        return await _ran([*inside, "bash", "-c", f"exec 2>&1\n{command}"], settings, timeout_s)

    @override
    async def put(self, folder: Path, place: str) -> None:
        def replace() -> None:
            shutil.rmtree(self._here(place))  # with links that the policy may have put there, which lead out of it
            shutil.copytree(folder, self._here(place))

        await asyncio.to_thread(replace)

    def _here(self, place: str) -> Path:
        """Where a place of the world is on this machine."""
        return self._folder.joinpath(*PurePosixPath(place).parts[1:])


class DockerWorld(TaskWorld):
    """A container of the image that a task names, or of its Dockerfile."""

    @override
    async def __aenter__(self) -> Self:
        known, folder = self.task.table("environment"), self.task.folder / "environment"
        image = known.get("docker_image")
        if not image:
            limit_s = self.task.number("environment", "build_timeout_sec", 600.0)
            image = (await self._docker(limit_s, "build", "--quiet", str(folder))).splitlines()[-1]
        limits = [f"--cpus={known['cpus']}"] if known.get("cpus") else []
        limits += [f"--memory={known['memory_mb']}m"] if known.get("memory_mb") else []
        limits += ["--network=none"] if known.get("network_mode") == "no-network" else []
        limits += [f"--workdir={known['workdir']}"] if known.get("workdir") else []
        begun = await self._docker(_SETTLE_S, "run", "--detach", "--rm", *limits, str(image), "sleep", "infinity")
        self._container = begun.splitlines()[-1]
        await self._docker(_SETTLE_S, "exec", self._container, "mkdir", "-p", "/logs/verifier", "/logs/agent")
        return self

    @override
    async def __aexit__(self, *error: object) -> None:
        await self._docker(_SETTLE_S, "rm", "--force", self._container)

    @override
    async def run(self, command: str, timeout_s: float, env: Mapping[str, str] | None = None) -> Ran:
        settings = [f"--env={name}={value}" for name, value in (env or {}).items()]
        # The limit holds inside, too: ending the client would leave the command running.
        limited = ["timeout", "--kill-after=1", f"{timeout_s:g}", "bash", "-c", f"exec 2>&1\n{command}"]
        found = await _ran(["docker", "exec", *settings, self._container, *limited], os.environ, timeout_s + _SETTLE_S)
        return found._replace(code=None) if found.code == _TIMED_OUT else found

    @override
    async def put(self, folder: Path, place: str) -> None:
        await self._docker(_SETTLE_S, "exec", self._container, "sh", "-c", f"rm -rf {place} && mkdir -p {place}")
        await self._docker(_SETTLE_S, "cp", f"{folder}/.", f"{self._container}:{place}")

    async def _docker(self, timeout_s: float, *arguments: str) -> str:
        found = await _ran(["docker", *arguments], os.environ, timeout_s)
        if found.code != 0:
            what = "took too long" if found.code is None else f"ended with exit code {found.code}"
            raise SandboxError(f"docker {arguments[0]} for {self.task.name} {what}: {found.output.strip()[-500:]}")
        return found.output.strip()


def choose_world(name: str) -> type[TaskWorld]:
    """The world of a name, `local`, `docker`, or `auto` for Docker where a daemon answers.

    Raises:
        RecipeError: There is no such world, or it does not work here.
    """
    if name not in {"auto", "local", "docker"}:
        raise RecipeError.at(_KEY, f"is {name!r}: must be auto, local or docker")
    no_docker = None if name == "local" else _docker_refusal()
    if name != "local" and no_docker is None:
        return DockerWorld
    if name == "docker":
        raise RecipeError.at(_KEY, f"is docker, but {no_docker}: start it, or choose local")
    if problem := bubblewrap_refusal():
        raise RecipeError.at(_KEY, f"{problem}{f'; and {no_docker}' if no_docker else ''}")
    return LocalWorld


@cache
def _docker_refusal() -> str | None:
    """Why Docker does not work here; None if it does."""
    if shutil.which("docker") is None:
        return "there is no program 'docker'"
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=_SETTLE_S, check=False)  # noqa: S603
    return None if tried.returncode == 0 else f"no daemon of Docker answers ({tried.stderr.strip()[-200:]})"


async def _ran(command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> Ran:
    try:
        async with asyncio.timeout(timeout_s):
            end = await run_command(command, env)
    except TimeoutError:
        return Ran(None, "")
    return Ran(end.code, f"{end.printed}{end.told}")


class _Recipe(NamedTuple):
    """What the local world follows of a Dockerfile."""

    workdir: str
    env: Mapping[str, str]
    copies: Sequence[tuple[Path, str]]

    @property
    def places(self) -> Sequence[str]:
        """Places that a task may write to."""
        return [self.workdir, *(target for _, target in self.copies)]

    @classmethod
    def of(cls, task: HarborTask) -> _Recipe:
        """Read a Dockerfile; a ValueError names what the local world does not have."""
        known, file = task.table("environment"), task.folder / "environment/Dockerfile"
        workdir, env, copies = "/app", dict[str, str](), list[tuple[Path, str]]()
        if not file.exists() and known.get("docker_image"):
            raise ValueError(f"its image is {known['docker_image']}")
        lines = re.sub(r"\\\n", " ", file.read_text()).splitlines() if file.exists() else []
        for line in lines:
            if not (text := line.strip()) or text.startswith("#"):
                continue
            word, *rest = shlex.split(text)
            match word.upper():
                case "WORKDIR":
                    workdir = str(PurePosixPath(workdir, rest[0]))
                case "ENV":
                    env |= dict(part.partition("=")[::2] for part in rest)
                case "COPY" if not any(part.startswith("--") for part in rest) and len(rest) > 1:
                    *sources, target = rest
                    place = str(PurePosixPath(workdir, target))
                    is_folder = target.endswith(("/", ".")) or len(sources) > 1
                    copies += [(_source(file.parent, one), f"{place}/" if is_folder else place) for one in sources]
                case name if name not in _IGNORED:
                    raise ValueError(f"its Dockerfile has '{text[:60]}', which the local world does not follow")
        recipe = cls(str(known.get("workdir") or workdir), env, copies)
        for place in recipe.places:
            top = f"/{(*PurePosixPath(place).parts, '')[1]}"
            if top in {"/", "/etc", "/proc", "/dev", *_READ}:
                raise ValueError(f"it writes to {place}, which belongs to this machine in the local world")
        return recipe


def _source(folder: Path, name: str) -> Path:
    """A file of the folder of an image."""
    found = folder / name
    if not found.resolve().is_relative_to(folder.resolve()) or not found.exists():
        raise ValueError(f"its Dockerfile copies '{name}', which is not in environment/")
    return found


def _copy(source: Path, target: Path, *, is_folder: bool) -> None:
    """Copy a file, or the content of a folder, as COPY does."""
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
        return
    place = target / source.name if is_folder else target
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, place)
