"""Numbers of the system calls that a confined program may make, fully or within bounds. Imports nothing.

All others are refused, so what a newer kernel adds is refused too.
"""

from __future__ import annotations


def _table(*groups: str) -> dict[str, tuple[int, int | None]]:
    """Numbers by name, from entries of name, number on x86-64 and number on 64-bit ARM, which lacks some."""
    entries = (entry.split() for group in groups for entry in group.split(", "))
    return {name: (int(x86), None if arm == "-" else int(arm)) for name, x86, arm in entries}


PLAIN = _table(
    # Reading and writing what is open.
    "read 0 63, readv 19 65, pread64 17 67, write 1 64, writev 20 66, pwrite64 18 68, lseek 8 62, fsync 74 82, "
    "fdatasync 75 83, ftruncate 77 46, flock 73 32, close 3 57, sendmsg 46 211",
    # Names, folders and attributes of files.
    "access 21 -, faccessat 269 48, faccessat2 439 439, stat 4 -, lstat 6 -, fstat 5 80, newfstatat 262 79, "
    "statx 332 291, readlink 89 -, readlinkat 267 78, getdents 78 -, getdents64 217 61, rename 82 -, renameat 264 38, "
    "renameat2 316 276, rmdir 84 -, unlink 87 -, unlinkat 263 35, chdir 80 49, fchdir 81 50, getcwd 79 17",
    # Descriptors, pipes and waiting for them.
    "dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, "
    "pselect6 270 72, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19",
    # Memory.
    "brk 12 214, mmap 9 222, mprotect 10 226, mremap 25 216, munmap 11 215, madvise 28 233, membarrier 324 283",
    # Threads, and the end of processes.
    "futex 202 98, set_robust_list 273 99, rseq 334 293, sched_getaffinity 204 123, sched_yield 24 124, exit 60 93, "
    "exit_group 231 94, wait4 61 260, waitid 247 95",
    # Signals and timers.
    "alarm 37 -, pause 34 -, getitimer 36 102, setitimer 38 103, sigaltstack 131 132, restart_syscall 219 128, "
    "rt_sigaction 13 134, rt_sigpending 127 136, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigsuspend 130 133, "
    "rt_sigtimedwait 128 137",
    # Time.
    "time 201 -, times 100 153, gettimeofday 96 169, clock_getres 229 114, clock_gettime 228 113, "
    "clock_nanosleep 230 115, nanosleep 35 101",
    # What a process may know of itself and the machine.
    "getpid 39 172, getppid 110 173, gettid 186 178, getpgid 121 155, getpgrp 111 -, getsid 124 156, getuid 102 174, "
    "geteuid 107 175, getresuid 118 148, getgid 104 176, getegid 108 177, getresgid 120 150, getgroups 115 158, "
    "getrlimit 97 163, getrusage 98 165, getrandom 318 278, sysinfo 99 179, uname 63 160",
)
"""Allowed with any arguments."""

BOUND = _table(
    "clone 56 220, clone3 435 435, creat 85 -, fcntl 72 25, fork 57 -, ioctl 16 29, kill 62 129, mkdir 83 -, "
    "mkdirat 258 34, open 2 -, openat 257 56, openat2 437 437, prlimit64 302 261, tgkill 234 131, vfork 58 -",
)
"""Judged by their arguments, or counted."""
