"""Nothing that a program does escapes from the sandbox, or costs more than allowed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.unit.rewards.calls import ROOT
from tests.unit.rewards.sandbox.boxes import boxes

from leaderless.base.values import Json
from leaderless.config.rewards import RewardsConfig
from leaderless.rewards.registry import check_rewards, make_rewards
from leaderless.rewards.sandbox import sandboxes, seccomp
from leaderless.rewards.sandbox.jail import Script
from leaderless.rewards.sandbox.kernel_limits import Layers, ask_layers, is_supported
from leaderless.rewards.sandbox.messages import ProgramEnd, SandboxLimits
from leaderless.rewards.sandbox.sandboxes import BubblewrapSandbox, Sandbox, choose_sandbox
from leaderless.rewards.sandbox.seccomp import BOUND, PLAIN

PROGRAM = (Path(__file__).parent / "break_outs.py").read_text(encoding="utf-8")
LIMITS = SandboxLimits(
    test_timeout_s=20.0,
    memory_mib=256,
    max_processes=4,
    max_files=16,
    max_file_bytes=2**16,
    max_output_bytes=2**14,
)
PATIENCE_S = 30.0
"""Other processes may use the same cores."""
SECRET = "what-nobody-may-read-4711"
FILES = (
    *("read", "list_folder", "write", "append", "delete", "move_in", "make_folder"),
    *("truncate", "change_mode", "change_owner", "change_time", "change_attribute", "link", "link_symbolically"),
)
"""Attempts on files of the run, each on the run's folder itself or on a file in it."""
CALLS = (
    *("make_device", "make_socket_file", "execute", "hidden_folder", "memory_file"),
    *("tcp", "udp", "ipv6", "unix", "abstract", "netlink", "pair"),
    *("kill_parent", "kill_grader", "kill_all", "kill_group", "open_process", "signal_by_file", "limit_parent"),
    *("own_session", "own_group", "own_namespace", "cloned_namespace", "control_process", "keyring"),
    *("clone3", "open_by_memory"),
)
"""Attempts by system calls."""
REFUSED_ANYWAY = ("read_memory", "queue_signal", "read_parent_memory", "io_uring", "raise_limit")
"""Attempts that may fail even without the two layers, because the program has no capabilities."""
UNSAFE_TO_SUCCEED = ("trace_parent",)
"""Attempts that must not be made without the layers, because they would stop the supervisor."""

pytestmark = pytest.mark.skipif(
    not is_supported() or bool(ask_layers().missing()), reason="this machine's kernel lacks a layer of the sandbox"
)


needs_bubblewrap = pytest.mark.skipif(
    bool(BubblewrapSandbox().refusal(allow_weaker=True)), reason=f"{BubblewrapSandbox().refusal(allow_weaker=True)}"
)


class Programs:
    """A program that executes one command per call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def attempt(self, running: Script, name: str) -> tuple[bool, Json]:
        """Whether an attempt succeeded, and its result."""
        secret = self._folder / "secret"
        secret.write_text(SECRET, encoding="utf-8")
        arguments = {
            "list_folder": str(self._folder),
            "make_folder": str(self._folder / "new"),
            "kill_grader": str(os.getpid()),
            "read_memory": f"/proc/{os.getpid()}/mem",
        }
        ended = do(running, name, arguments.get(name, str(secret)))
        assert (ended.cause, ended.code) == ("exited", 0), ended
        is_done, value = json.loads(ended.output)
        if name == "make_folder" and is_done:
            (self._folder / "new").rmdir()
        return is_done, value


def do(running: Script, name: str, argument: str = "") -> ProgramEnd:
    return running.run(f"{name} {argument}\n", time.monotonic() + PATIENCE_S)


def do_once(name: str, argument: str = "", **limits: float) -> ProgramEnd:
    with start(**limits) as running:
        return do(running, name, argument)


def start(program: str = PROGRAM, **limits: float) -> Script:
    return Script(Sandbox(), program, LIMITS._replace(**limits))


def value_of(ended: ProgramEnd) -> Json:
    is_done, value = json.loads(ended.output)
    assert is_done, ended
    return value


def scratch_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("leaderless-program-*"))


def wait_until_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process of a program is left"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Other tests run programs at the same time.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("scratch")))
    folders, children = scratch_folders(), set(psutil.Process().children(recursive=True))
    yield
    assert scratch_folders() <= folders
    assert set(psutil.Process().children(recursive=True)) <= children


@pytest.mark.parametrize("box", boxes())
def test_programs_reach_no_file_process_or_network(box: Sandbox, tmp_path: Path) -> None:
    programs = Programs(tmp_path)
    refused = {"EACCES", "EPERM", "ENOSYS", "AssertionError", "ValueError"}
    with Script(box, PROGRAM, LIMITS) as running:
        for name in (*FILES, *CALLS, *REFUSED_ANYWAY, *UNSAFE_TO_SUCCEED):
            is_done, value = programs.attempt(running, name)
            assert not is_done, (name, value)
            assert value in refused | ({"ENOENT", "EROFS"} if box.name == "bubblewrap" else set()), (name, value)
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@needs_bubblewrap
def test_bubblewrap_needs_no_landlock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "ask_layers", lambda: ask_layers()._replace(landlock=0))
    assert choose_sandbox("auto").name == "bubblewrap"
    programs = Programs(tmp_path)
    with Script(choose_sandbox("auto"), PROGRAM, LIMITS) as running:
        for name in FILES:
            is_done, value = programs.attempt(running, name)
            assert not is_done, (name, value)
        for path in ("/etc/passwd", "/home", str(tmp_path)):
            assert json.loads(do(running, "list_folder", path).output) == [False, "ENOENT"]
        assert value_of(do(running, "ordinary")) == "text [0, 1, 4] 0.25"
        assert json.loads(do(running, "import_grader", str(ROOT / "src")).output) == [False, "ModuleNotFoundError"]
        for path in ("/mine", "/dev/shm/mine", os.__file__):
            assert json.loads(do(running, "write", path).output)[0] is False


@needs_bubblewrap
def test_programs_in_bubblewrap_are_limited_as_elsewhere() -> None:
    with Script(BubblewrapSandbox(), PROGRAM, LIMITS._replace(test_timeout_s=1.0)) as running:
        assert json.loads(do(running, "fill_memory").output) == [False, "MemoryError"]
        assert value_of(do(running, "thread_bomb")) == LIMITS.max_processes
        assert do(running, "fork_bomb").cause == "timeout"
        assert do(running, "flood", "1").cause == "output"
        assert value_of(do(running, "many_files")) == LIMITS.max_files


@needs_bubblewrap
def test_a_bubblewrap_that_may_not_make_namespaces_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setattr(sandboxes, "find_bubblewrap", lambda: str(broken))
    for cached in (sandboxes.bubblewrap_refusal, sandboxes._enclosure):
        cached.cache_clear()
    with pytest.raises(RuntimeError, match=r"cannot use bubblewrap \(No permissions .*max_user_namespaces"):
        choose_sandbox("bubblewrap", allow_weaker=True)
    for cached in (sandboxes.bubblewrap_refusal, sandboxes._enclosure):
        cached.cache_clear()


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/proc/self/environ", "/proc/{pid}/environ", "/proc/{pid}/maps", "{home}"]
)
def test_what_is_readable_is_the_interpreter(path: str) -> None:
    path = path.format(pid=os.getpid(), home=Path.home())
    assert json.loads(do_once("list_folder" if Path(path).is_dir() else "read", path).output) == [False, "EACCES"]
    assert list(Path(path).iterdir()) if Path(path).is_dir() else Path(path).read_bytes()


def test_packages_beside_the_interpreter_are_out_of_reach() -> None:
    assert json.loads(do_once("import_grader", str(ROOT / "src")).output) == [False, "ModuleNotFoundError"]
    readable, listable = sandboxes.interpreter_paths()
    assert not [path for path in readable if Path(path).name in {"site-packages", "dist-packages"}]
    assert all(Path(path, "os.py").exists() for path in listable)


def test_each_layer_is_what_keeps_programs_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempts are real: each succeeds when the layers that prevent it are removed."""
    programs = Programs(tmp_path)
    monkeypatch.setattr(sandboxes, "ask_layers", lambda: ask_layers()._replace(landlock=0))
    with start() as running:
        for name in ("read", "list_folder", "write", "append", "delete", "move_in", "make_folder"):
            assert programs.attempt(running, name)[0], name
    monkeypatch.setattr(sandboxes, "ask_layers", lambda: Layers(0, has_filter=False, has_listener=False))
    with start() as running:
        for name in (*FILES, *CALLS):
            assert programs.attempt(running, name)[0], name


def test_without_a_listener_nothing_may_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "ask_layers", lambda: ask_layers()._replace(has_listener=False))
    assert json.loads(do_once("write", "mine").output) == [False, "EPERM"]
    assert json.loads(do_once("clone3").output) == [False, "ENOSYS"]
    assert value_of(do_once("thread_bomb")) == 0


def test_calls_of_another_architecture_end_the_program() -> None:
    if os.uname().machine == "x86_64":
        assert do_once("other_architecture").code == -31


@pytest.mark.parametrize("name", ["loop", "sleep"])
def test_programs_that_do_not_end_are_ended(name: str) -> None:
    with start(test_timeout_s=0.2) as running:
        begin = time.monotonic()
        assert do(running, name).cause == "timeout"
        assert time.monotonic() - begin < PATIENCE_S
        assert value_of(do(running, "files_here")) == []


def test_a_run_ends_at_its_deadline() -> None:
    with start() as running:
        assert running.run("sleep \n", time.monotonic() + 0.1).cause == "timeout"


def test_memory_is_limited() -> None:
    assert json.loads(do_once("fill_memory", memory_mib=128).output) == [False, "MemoryError"]


def test_processes_are_limited_and_end_with_their_program() -> None:
    ended = do_once("fork_bomb", test_timeout_s=1.0)
    assert ended.cause == "timeout"
    pids = {int(line.rpartition(" ")[2]) for line in ended.output.splitlines()}
    assert len(pids) == LIMITS.max_processes + 1
    wait_until_gone(pids)


def test_threads_count_as_processes() -> None:
    assert value_of(do_once("thread_bomb")) == LIMITS.max_processes
    assert value_of(do_once("thread_bomb", max_processes=0)) == 0


def test_a_process_left_behind_ends_with_its_program() -> None:
    ended = do_once("daemon")
    assert ended.cause == "exited"
    wait_until_gone({int(ended.output.splitlines()[0])})


@pytest.mark.parametrize("stream", ["1", "2"])
def test_output_is_limited(stream: str) -> None:
    ended = do_once("flood", stream)
    assert ended.cause == "output"
    assert len(ended.output) <= LIMITS.max_output_bytes + 1
    assert do_once("flood_and_leave", str(LIMITS.max_output_bytes + 1)).cause == "output"
    assert do_once("flood_and_leave", str(LIMITS.max_output_bytes - 100)).cause == "exited"


def test_files_are_limited_in_size_and_number() -> None:
    with start() as running:
        assert value_of(do(running, "huge_file")) == LIMITS.max_file_bytes
        assert value_of(do(running, "many_files")) == LIMITS.max_files
        assert json.loads(do(running, "deep_folders").output) == [False, "EDQUOT"]
        assert value_of(do(running, "files_here")) == []
        assert value_of(do(running, "files_here")) == [], "each run has a folder of its own"


def test_programs_inherit_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    with start() as running:
        assert value_of(do(running, "environment")) == {}
        assert value_of(do(running, "open_descriptors")) == [0, 1, 2]


def test_ordinary_programs_run() -> None:
    assert value_of(do_once("ordinary")) == "text [0, 1, 4] 0.25"


def test_sets_have_the_same_order_in_every_run() -> None:
    outputs = set()
    for _ in range(2):
        with start("print(list({'a', 'b', 'c', 'd', 'e', 'f', 'g'}))") as running:
            outputs |= {running.run("", time.monotonic() + PATIENCE_S).output for _ in range(2)}
    assert len(outputs) == 1


def test_exit_codes_and_what_runs_at_the_end_are_those_of_an_interpreter() -> None:
    source = """
import atexit, sys, threading, time
atexit.register(print, "at the end")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
way = input()
if way == "error":
    raise KeyError(way)
sys.exit({"none": None, "text": "text", "number": 7}[way])
"""
    with start(source) as running:
        for way, code in {"none": 0, "text": 1, "number": 7, "error": 1}.items():
            ended = running.run(way, time.monotonic() + PATIENCE_S)
            assert (ended.code, ended.output) == (code, "thread\nat the end\n"), way


def test_root_gives_up_its_rights() -> None:
    with start() as running:
        thread = threading.Thread(target=do, args=(running, "sleep_a_little"))
        thread.start()
        statuses: list[str] = []
        while thread.is_alive() and not statuses:
            for child in psutil.Process(running._supervisor.pid).children():
                text = Path(f"/proc/{child.pid}/status").read_text()
                statuses += [text] if "Seccomp:\t2" in text else []
        thread.join()
    assert "CapEff:\t0000000000000000" in statuses[0]
    assert "CapPrm:\t0000000000000000" in statuses[0]
    assert "NoNewPrivs:\t1" in statuses[0]


def test_programs_end_with_their_grader() -> None:
    source = f"""
import sys, time
from tests.unit.rewards.sandbox.test_sandbox import start
with start({"import time; print(1); time.sleep(1000)"!r}) as running:
    print(running._supervisor.pid, flush=True)
    running.run("", time.monotonic() + 1000)
"""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    folders = scratch_folders()
    with subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}, text=True
    ) as grader:
        supervisor = psutil.Process(int(grader.stdout.readline()))
        while not (children := supervisor.children(recursive=True)):
            time.sleep(0.01)
        grader.kill()
    wait_until_gone({supervisor.pid, *(child.pid for child in children)})
    assert scratch_folders() == folders


@pytest.mark.parametrize(
    ("layers", "missing"),
    [
        (Layers(0, has_filter=True, has_listener=True), ["Landlock"]),
        (Layers(7, has_filter=False, has_listener=False), ["seccomp filters", "seccomp notifications"]),
    ],
)
def test_without_a_layer_programs_are_refused_unless_allowed(
    layers: Layers, missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandboxes, "ask_layers", lambda: layers)
    monkeypatch.setattr(sandboxes, "find_bubblewrap", lambda: None)
    sandboxes.bubblewrap_refusal.cache_clear()
    config = RewardsConfig.model_validate({"code": {}})
    with pytest.raises(
        ValueError,
        match=r"reward\.code: with sandbox=builtin .*set allow_weaker=true.*sandbox=bubblewrap finds no program",
    ) as refused:
        check_rewards(config)
    assert all(name in str(refused.value) for name in [*missing, "with sandbox=bubblewrap finds no program 'bwrap'"])
    with pytest.raises(RuntimeError, match=missing[0]):
        make_rewards(config)
    weaker = RewardsConfig.model_validate({"code": {"allow_weaker": True}})
    check_rewards(weaker)
    assert set(make_rewards(weaker)) == {"code"}
    sandboxes.bubblewrap_refusal.cache_clear()


def test_other_systems_are_refused_whatever_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "is_supported", lambda: False)
    for sandbox in (Sandbox(), BubblewrapSandbox()):
        assert "Linux on x86-64 and 64-bit ARM only" in str(sandbox.refusal(allow_weaker=True))


def test_a_supervisor_that_cannot_confine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "ask_layers", lambda: ask_layers()._replace(landlock=99))
    monkeypatch.setattr(sandboxes, "interpreter_paths", lambda: (("/proc/self/mem\0",), ()))
    with pytest.raises(RuntimeError, match=r"does not work on this machine: .*cannot be confined"):
        do_once("ordinary")


def test_no_system_call_is_named_twice_or_has_the_number_of_another() -> None:
    assert not set(PLAIN) & set(BOUND)
    for machine in (0, 1):
        numbers = [numbers[machine] for numbers in (PLAIN | BOUND).values() if numbers[machine] is not None]
        assert len(numbers) == len(set(numbers))
    statements = seccomp._make_filter(1, 0)
    assert len(statements) < 4096
