"""EleutherAI's lm-eval: its tasks put to a model that this process serves, by its own command in another process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from leaderless.base.errors import RecipeError, nearest
from leaderless.base.values import Json
from leaderless.config.packaged_files import how_to_install
from leaderless.distributed.remote.child_server import bound_command, worker_free_environment
from leaderless.observability.report.unchecked_values import as_mapping, parse_json
from leaderless.worker.supervision.stop import Interrupted

if TYPE_CHECKING:
    from leaderless.serving.api.app import ModelServer

NAME = "lm-eval"
OPTION = f"--with {NAME}"
OLDEST, LIMIT = (0, 4, 10), (0, 5)
"""The oldest version that is asked as here, and the first of which this is not known."""
CONCURRENT_REQUESTS = 32
"""Requests that lm-eval has answered at the same time: they are sampled together."""
REQUEST_S = 24 * 3600
"""Longest time for a request. A server that has ended is noticed at once, and a slow one may take long."""
END_S = 5.0
"""Time for lm-eval to end before it is killed."""
POLL_S = 0.2
"""Time between two looks at whether the server is stopping."""
_PROGRESS = re.compile(r".*:\s+\d+%\|.*\| (\d+)/(\d+) \[")
"""Progress as the library tqdm shows it, with a title."""

_LOOK = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
asked = json.loads(sys.argv[1])
found = {'version': None, 'lacking': [], 'unknown': [], 'names': []}
try:
    found['version'] = version('lm_eval')
except PackageNotFoundError:
    pass
found['lacking'] = [one for one in ('aiohttp', 'requests', 'tenacity', 'transformers') if find_spec(one) is None]
if asked['versions'][0] <= [int(one) for one in (found['version'] or '0').split('.')[:3] if one.isdigit()]:
    from lm_eval.tasks import TaskManager
    manager = TaskManager(include_path=asked['include_path'])
    found['unknown'] = [one for one in asked['tasks'] if not manager.match_tasks([one])]
    found['names'] = list(manager.all_tasks) if found['unknown'] else []
print('\\n' + json.dumps(found))
"""
"""Program that prints the version of lm-eval, what else it needs, and which tasks it does not know."""
_RUN = "import runpy\nrunpy.run_module('lm_eval', run_name='__main__', alter_sys=True)\n"


@dataclass(frozen=True)
class HarnessTasks:
    """What lm-eval is to measure.

    Attributes:
        names: Tasks or groups of tasks, by their names or as YAML files.
        limit: Most rows of a task, or their share if it is below 1; all of them if None.
        num_shots: Number of examples before each question; as the task says if None.
        include: Folder with further tasks.
        arguments: Further arguments of its command.
    """

    names: tuple[str, ...]
    limit: float | None = None
    num_shots: int | None = None
    include: Path | None = None
    arguments: tuple[str, ...] = ()

    _TAKEN = (
        *("--model", "-M", "--model_args", "-a", "--tasks", "-t", "--limit", "-L", "--num_fewshot", "-f"),
        *("--include_path", "--output_path", "-o", "--config", "-C"),
    )

    def check(self) -> None:
        """Refuse arguments that are given in another way, or are for something else.

        Raises:
            RecipeError: There is no task, or such an argument.
        """
        if not self.names:
            raise RecipeError.at("--task", f"is needed with {OPTION}: name one, as in --task arc_easy")
        if self.arguments and not self.arguments[0].startswith("-"):
            reason = f"is for recipes, which {NAME} does not read: leave it out; its own arguments come after --"
            raise RecipeError.at(self.arguments[0], reason)
        for word in self.arguments:
            if word.partition("=")[0] in self._TAKEN:
                reason = "is set by this command: use --task, --limit, --num-fewshot, --include-path or --out"
                raise RecipeError.at(word, reason)
        if self.include is not None and not self.include.is_dir():
            raise RecipeError.at("--include-path", f"{self.include} is no folder: name one with YAML files of tasks")

    def to_json(self) -> dict[str, Json]:
        """Return it for a file that says how a result has come about."""
        include = None if self.include is None else str(self.include)
        return {
            "tasks": [*self.names],
            "limit": self.limit,
            "num_fewshot": self.num_shots,
            "include_path": include,
            "arguments": [*self.arguments],
        }


@dataclass(frozen=True)
class HarnessTarget:
    """The model that lm-eval asks.

    Attributes:
        name: Name of the model at the server.
        url: Address of the server's API.
        tokenizer: Folder with its tokenizer.
        max_context: Most tokens of prompt and response together.
        adds_begin: Whether the tokenizer begins texts with a token of its own.
    """

    name: str
    url: str
    tokenizer: Path
    max_context: int
    adds_begin: bool


def find_harness(python: str, tasks: HarnessTasks) -> str:
    """Check that an environment has lm-eval, in a version that is known, and that it knows the tasks.

    Args:
        python: Interpreter of the environment.
        tasks: Tasks and their settings.

    Returns:
        The version.

    Raises:
        RecipeError: It is not so; the message has the remedy.
    """
    include = None if tasks.include is None else str(tasks.include)
    named = [
        name for name in ",".join(tasks.names).split(",") if not name.endswith(".yaml") and not Path(name).is_dir()
    ]
    asked = json.dumps({"versions": [OLDEST], "include_path": include, "tasks": named})
    try:
        done = subprocess.run(  # noqa: S603
            bound_command(python, _LOOK, asked),
            capture_output=True,
            text=True,
            env=worker_free_environment(),
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise RecipeError.at("--with-python", f"{python} cannot be started: {error.strerror}") from error
    try:
        found = as_mapping(parse_json(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        last = (done.stderr.strip() or "it has printed nothing").splitlines()[-1]
        raise RecipeError.at(OPTION, f"{NAME} of {python} cannot be used: {last}") from None
    _check_installed(python, found)
    unknown, names = found["unknown"], found["names"]
    assert isinstance(unknown, list)
    assert isinstance(names, list)
    if unknown:
        hint = nearest(unknown[0], names)
        raise RecipeError.at(
            "--task",
            f"'{unknown[0]}' is no task of {NAME} {found['version']}{hint}; its own command lists them, `lm-eval ls "
            "tasks`, and --include-path names a folder with further ones",
        )
    return str(found["version"])


def _check_installed(python: str, found: Mapping[str, object]) -> None:
    remedy = f"{how_to_install(NAME)}; or name the interpreter of an environment that has it by --with-python"
    version, lacking = found["version"], found["lacking"]
    if version is None:
        raise RecipeError.at(OPTION, f"{python} has no {NAME}: {remedy}")
    numbers = tuple(int(part) for part in re.findall(r"\d+", str(version))[:3])
    if not OLDEST <= numbers < LIMIT:
        oldest, limit = (".".join(map(str, one)) for one in (OLDEST, LIMIT))
        raise RecipeError.at(
            OPTION, f"{NAME} of {python} is {version}, but must be at least {oldest} and older than {limit}: {remedy}"
        )
    if lacking:
        assert isinstance(lacking, list)
        raise RecipeError.at(OPTION, f"{NAME} of {python} lacks {', '.join(lacking)}: {remedy}")


def write_config(tasks: HarnessTasks, target: HarnessTarget, folder: Path) -> Path:
    """Write the settings of lm-eval's command into the folder that gets its results; returns the file."""
    has_template = any(word.partition("=")[0] == "--apply_chat_template" for word in tasks.arguments)
    model: dict[str, Json] = {
        "model": target.name,
        "base_url": f"{target.url}/completions",
        "tokenizer": str(target.tokenizer),
        "tokenizer_backend": "huggingface",
        "tokenized_requests": True,
        "add_bos_token": target.adds_begin and not has_template,  # a template writes it
        "max_length": target.max_context,
        "num_concurrent": CONCURRENT_REQUESTS,
        "timeout": REQUEST_S,
    }
    settings = tasks.to_json()
    del settings["arguments"]
    config = {name: value for name, value in settings.items() if value is not None}
    config |= {"model": "local-completions", "model_args": model, "output_path": str(folder)}
    path = folder / "lm-eval.yaml"
    path.write_text(yaml.safe_dump(config, allow_unicode=True, sort_keys=False), encoding="utf-8")
    return path


def harness_command(python: str, config: Path, tasks: HarnessTasks) -> list[str]:
    """The command that runs lm-eval, which ends with this process."""
    return bound_command(python, _RUN, "run", "--config", str(config), *tasks.arguments)


async def answer_harness(
    server: ModelServer,
    listener: socket.socket,
    command: Sequence[str],
    token: str,
    log: Path,
    report: Callable[[int, int], None],
) -> None:
    """Answer lm-eval until it has ended. It is ended when the server stops, by a signal or because it has failed.

    Args:
        server: Server of the model.
        listener: Socket at which the server listens.
        command: Command that asks the server.
        token: Key that clients of the server send.
        log: File that gets the output of the command.
        report: Function that takes the number of requests of a task that are answered, and the number of all.

    Raises:
        RecipeError: lm-eval has ended with an error.
        RuntimeError: The server has ended before it.
    """
    started = asyncio.Event()
    serving = asyncio.create_task(server.answer(listener, started.set))
    beginning = asyncio.create_task(started.wait())
    await asyncio.wait({serving, beginning}, return_when=asyncio.FIRST_COMPLETED)
    beginning.cancel()
    code: int | None = None
    try:
        if not serving.done():
            async with _running(command, token) as process:
                reading = asyncio.create_task(_follow(process, log, report))
                while not reading.done() and not serving.done() and not server.should_exit:
                    await asyncio.wait({reading, serving}, timeout=POLL_S)
                code = await process.wait() if reading.done() else None
                reading.cancel()
    finally:
        server.should_exit = True
        failure = await _end_of(serving)
    if code is None or failure is not None:  # the package may have noticed first, and ended with an error
        reason = "" if failure is None else f": {failure}"
        raise RuntimeError(f"the server of the model has ended before {NAME}{reason}; see {log}") from failure
    if code:
        raise RecipeError.at(OPTION, f"{NAME} has ended with code {code}: {_last_error(log)}; its output is in {log}")


async def _end_of(serving: asyncio.Task[None]) -> Exception | None:
    """Wait for a server to end; returns the error with which it has failed, and raises the signal that stopped it."""
    try:
        await serving
    except Interrupted:
        raise
    except Exception as error:  # noqa: BLE001 - it is the cause of the error that follows
        return error
    return None


@asynccontextmanager
async def _running(command: Sequence[str], token: str) -> AsyncIterator[Process]:
    """A process that is ended with the context, and with it whatever it has started."""
    here = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1"]))
    keys = {"OPENAI_API_KEY": token, "NO_PROXY": here, "no_proxy": here, "PYTHONUNBUFFERED": "1"}
    # In a new session: Ctrl-C at the terminal goes only to this process, which ends it.
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        env=worker_free_environment() | keys,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _follow(process: Process, log: Path, report: Callable[[int, int], None]) -> None:
    """Write the output of a process to a file until it ends, and report the progress that is in it."""
    assert process.stdout is not None
    rest = ""
    with log.open("ab") as file:
        while part := await process.stdout.read(1 << 16):
            file.write(part)
            file.flush()
            *lines, rest = re.split(r"[\r\n]", rest + part.decode("utf-8", "replace"))
            for found in filter(None, map(_PROGRESS.match, [*lines, rest])):
                report(int(found[1]), int(found[2]))


def _last_error(log: Path) -> str:
    """The last line of the output that says what was wrong: the server's last refusal, or else the last line at all."""
    lines = [line.strip() for line in re.split(r"[\r\n]", log.read_text(encoding="utf-8", errors="replace"))]
    said = [line for line in lines if line and not _PROGRESS.match(line)]
    refusals = [line for line in said if "API request failed" in line]
    return [*(said or ["it has printed nothing"]), *refusals][-1]


def newest_results(folder: Path) -> Mapping[str, object]:
    """The results that lm-eval has written into a folder.

    Raises:
        RuntimeError: There are none.
    """
    for path in sorted(folder.rglob("results_*.json"), reverse=True):
        try:
            return as_mapping(parse_json(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise RuntimeError(f"{path} is no JSON object: {error}") from error
    raise RuntimeError(f"{NAME} has written no results into {folder}; its output is in {folder / 'log.txt'}")
