"""Programs that try to break out of the sandbox; test_sandbox.py runs this file inside and names one of them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def system_call(on_x86: int, on_arm: int, *arguments: object) -> int:
    return checked(libc.syscall(on_x86 if platform.machine() == "x86_64" else on_arm, *arguments))


def in_child(attempt: Callable[[], object]) -> None:
    """Session leaders can do less than their children."""
    if os.fork() == 0:
        try:
            attempt()
        except OSError:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, "refused"


# Files.


def read(path: str) -> str:
    return Path(path).read_text()


def read_memory(path: str) -> None:
    open(path, "rb").close()


def list_folder(path: str) -> list[str]:
    return os.listdir(path)


def write(path: str) -> None:
    Path(path).write_text("x")


def append(path: str) -> None:
    with open(path, "r+") as file:
        file.write("x")


def delete(path: str) -> None:
    os.unlink(path)


def move_in(path: str) -> None:
    os.rename(path, "mine")


def make_folder(path: str) -> None:
    os.mkdir(path)


def truncate(path: str) -> None:
    os.truncate(path, 0)


def change_mode(path: str) -> None:
    os.chmod(path, 0o777)


def change_owner(path: str) -> None:
    os.chown(path, os.getuid(), os.getgid())


def change_time(path: str) -> None:
    os.utime(path)


def change_attribute(path: str) -> None:
    os.setxattr(path, "user.x", b"x")


def link(path: str) -> None:
    os.link(path, "mine")


def link_symbolically(path: str) -> None:
    os.symlink(path, "mine")


def make_device(path: str) -> None:
    os.mkfifo("mine")


def make_socket_file(path: str) -> None:
    os.mknod("mine", 0o140600)


def execute(path: str) -> None:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def hidden_folder(path: str) -> None:
    os.mkdir("mine", 0o300)


def memory_file(path: str) -> None:
    os.memfd_create("mine")


# Network.


def tcp(path: str) -> None:
    socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def udp(path: str) -> None:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def ipv6(path: str) -> None:
    socket.socket(socket.AF_INET6, socket.SOCK_STREAM)


def unix(path: str) -> None:
    socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def abstract(path: str) -> None:
    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).bind("\0leaderless-break-out")


def netlink(path: str) -> None:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)


def pair(path: str) -> None:
    socket.socketpair()


# Other processes; the harmless signal 0 needs the same permission as all others.


def kill_parent(path: str) -> None:
    os.kill(os.getppid(), 0)


def kill_grader(path: str) -> None:
    os.kill(int(path), 0)


def kill_all(path: str) -> None:
    os.kill(-1, 0)


def kill_group(path: str) -> None:
    os.killpg(os.getpgid(os.getppid()), 0)


def queue_signal(path: str) -> None:
    system_call(129, 138, os.getppid(), 0, ctypes.create_string_buffer(128))


def open_process(path: str) -> None:
    os.pidfd_open(os.getppid())


def signal_by_file(path: str) -> None:
    reader, _ = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETOWN, os.getppid())


def trace_parent(path: str) -> None:
    checked(libc.ptrace(16, os.getppid(), None, None))


def read_parent_memory(path: str) -> None:
    buffer = ctypes.create_string_buffer(16)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 16)
    checked(libc.process_vm_readv(os.getppid(), vector, 1, vector, 1, 0))


def limit_parent(path: str) -> None:
    libc.prlimit.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    checked(libc.prlimit(os.getppid(), 7, None, ctypes.create_string_buffer(16)))


def own_session(path: str) -> None:
    in_child(os.setsid)


def own_group(path: str) -> None:
    in_child(lambda: os.setpgid(0, 0))


# The kernel.


def own_namespace(path: str) -> None:
    checked(libc.unshare(0x10000000))


def cloned_namespace(path: str) -> None:
    if system_call(56, 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        os._exit(0)


def control_process(path: str) -> None:
    checked(libc.prctl(4, 1, 0, 0, 0))


def keyring(path: str) -> None:
    system_call(250, 219, 0, -3, 1)


def io_uring(path: str) -> None:
    system_call(425, 425, 1, ctypes.create_string_buffer(120))


def clone3(path: str) -> None:
    arguments = (ctypes.c_uint64 * 8)(0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
    if system_call(435, 435, arguments, 64) == 0:
        os._exit(0)


def open_by_memory(path: str) -> None:
    how = (ctypes.c_uint64 * 3)(os.O_CREAT | os.O_WRONLY, 0o600, 0)
    system_call(437, 437, -100, b"mine", how, 24)


def raise_limit(path: str) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))


def other_architecture(path: str) -> None:
    """Make a call as a 32-bit program, whose system calls have other numbers: `int 0x80` for getpid."""
    import mmap

    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("b814000000 cd80 c3"))
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    ctypes.CFUNCTYPE(ctypes.c_int)(address)()


# Amounts.


def loop(path: str) -> None:
    while True:
        pass


def sleep(path: str) -> None:
    while True:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            try:
                signal.signal(number, signal.SIG_IGN)
            except OSError:
                pass
        time.sleep(1000)


def sleep_a_little(path: str) -> None:
    time.sleep(1)


def fill_memory(path: str) -> None:
    kept = []
    while True:
        kept.append(bytearray(2**20))


def fork_bomb(path: str) -> None:
    refused = 0
    while True:
        try:
            os.fork()
        except OSError:
            refused += 1
            if refused == 1:
                sys.stdout.write(f"refused in {os.getpid()}\n")
                sys.stdout.flush()


def thread_bomb(path: str) -> int:
    stop = threading.Event()
    threads = 0
    try:
        while True:
            threading.Thread(target=stop.wait, daemon=True).start()
            threads += 1
    except RuntimeError:
        return threads


def daemon(path: str) -> None:
    if os.fork() == 0:
        try:
            os.setsid()
        except OSError:
            pass
        if os.fork() == 0:
            sys.stdout.write(f"{os.getpid()}\n")
            sys.stdout.flush()
            while True:
                time.sleep(1000)
        os._exit(0)
    os.wait()
    time.sleep(0.05)


def flood(path: str) -> None:
    while True:
        os.write(int(path), b"x" * 4096)


def flood_and_leave(path: str) -> None:
    os.write(1, b"x" * int(path))


def huge_file(path: str) -> int:
    size = 0
    try:
        with open("mine", "wb", buffering=0) as file:
            while True:
                size += file.write(b"x" * 1024)
    except OSError as error:
        assert error.errno == errno.EFBIG
    return size


def many_files(path: str) -> int:
    try:
        for number in range(10_000):
            if number % 2:
                os.mkdir(f"folder-{number}")
            else:
                Path(f"file-{number}").touch()
    except OSError as error:
        assert error.errno == errno.EDQUOT
        return number
    return 10_000


def deep_folders(path: str) -> None:
    while True:
        os.mkdir("x" * 250)
        os.chdir("x" * 250)


def open_descriptors(path: str) -> list[int]:
    found = []
    for number in range(1000):
        try:
            os.fstat(number)
            found.append(number)
        except OSError:
            pass
    return found


def environment(path: str) -> dict[str, str]:
    return dict(os.environ)


def files_here(path: str) -> list[str]:
    found = os.listdir()
    Path("left behind").touch()
    return found


def import_grader(path: str) -> None:
    sys.path.append(path)
    import leaderless.rewards.code_reward  # noqa: F401


def ordinary(path: str) -> str:
    """Ordinary things that programs do must still work."""
    import collections
    import decimal
    import heapq
    import sqlite3
    import tempfile
    import zoneinfo
    from concurrent.futures import ThreadPoolExecutor

    Path("a").mkdir()
    Path("a/b").write_text("text")
    Path("a/b").rename("c")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        Path(folder, "x").touch()
    with ThreadPoolExecutor(2) as pool:
        squares = list(pool.map(lambda x: x * x, range(3)))
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.raise_signal(signal.SIGALRM)
    assert zoneinfo.ZoneInfo("Europe/Paris").key == "Europe/Paris"
    assert sqlite3.connect(":memory:").execute("select 7").fetchone() == (7,)
    assert heapq.nsmallest(1, [3, 1]) == [1]
    assert collections.Counter("aa") == {"a": 2}
    return f"{Path('c').read_text()} {squares} {decimal.Decimal(1) / 4}"


if __name__ == "__main__":
    name, _, argument = input().partition(" ")
    try:
        print(json.dumps([True, globals()[name](argument)]))
    except (OSError, AssertionError, ImportError, MemoryError, ValueError) as failure:
        print(json.dumps([False, errno.errorcode.get(getattr(failure, "errno", None), type(failure).__name__)]))
