"""Files in the place of memory: they have no name, so that they are gone with the process that made them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO
from weakref import WeakSet

from leaderless.base.errors import RecipeError

FOLDER_KEY = "run.offload_folder"
"""Setting that names the folder of such files."""
_MAPPED: WeakSet[MappedFile] = WeakSet()


class ScratchFile:
    """A file without a name, of which parts are written and read."""

    def __init__(self, folder: Path, num_bytes: int = 0) -> None:
        """Make a file in a folder, which is made if it is missing, with room for some bytes.

        Raises:
            RecipeError: Nothing can be written there, or there is too little room.
        """
        self.file: IO[bytes] = _opened(folder)
        self._folder = folder
        if num_bytes:
            try:
                os.posix_fallocate(self.file.fileno(), 0, num_bytes)
            except OSError as error:
                raise self._failed(error, num_bytes) from error

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes at an offset.

        Raises:
            RecipeError: There is too little room.
        """
        try:
            while len(data):
                written = os.pwrite(self.file.fileno(), data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise self._failed(error, len(data)) from error

    def read(self, into: memoryview, offset: int) -> None:
        """Read bytes from an offset, as many as there is memory for."""
        while len(into):
            count = os.preadv(self.file.fileno(), [into], offset)
            if not count:
                raise RuntimeError(f"a file in {self._folder} ends at byte {offset}, before what was written to it")
            into, offset = into[count:], offset + count

    def _failed(self, error: OSError, num_bytes: int) -> RecipeError:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            return RecipeError.at(FOLDER_KEY, f"{self._folder} cannot be written to: {error.strerror}; {REMEDY}")
        return too_small(self._folder, num_bytes)


REMEDY = "name a folder on another disk, or leave out what is offloaded to the disk"


def too_small(folder: Path, num_bytes: int) -> RecipeError:
    """The error for a folder without room for some bytes more."""
    free = free_bytes(folder)
    return RecipeError.at(
        FOLDER_KEY,
        f"{folder} has {free / 2**30:.2f} GiB of room, and {num_bytes / 2**30:.2f} GiB more are needed there: {REMEDY}",
    )


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written to a folder, which may not exist yet."""
    found = os.statvfs(next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists()))
    return found.f_bavail * found.f_frsize


def check_folder(folder: Path) -> None:
    """Refuse a folder in which no file can be made.

    Raises:
        RecipeError: Nothing can be written there.
    """
    _opened(folder).close()


def _opened(folder: Path) -> IO[bytes]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder, prefix="offload-", buffering=0)
    except OSError as error:
        reason = f"{folder} cannot be written to: {error.strerror}; {REMEDY}"
        raise RecipeError.at(FOLDER_KEY, reason) from error


class MappedFile(ScratchFile):
    """A file whose content is memory of the process, as far as there is room for it.

    Attributes:
        memory: All of it, at first zeros.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """Make a file in a folder with room for at least one byte."""
        super().__init__(folder, max(1, num_bytes))
        self.memory = mmap.mmap(self.file.fileno(), max(1, num_bytes))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        _MAPPED.add(self)

    def advise(self, address: int, num_bytes: int, option: int) -> None:
        """Say how some of the memory will be used; whole pages only, inward where they are released."""
        first, last = address - self.address, address - self.address + num_bytes
        if option == mmap.MADV_DONTNEED:
            first, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
        else:
            first = first // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            with suppress(OSError):  # a kernel that does not know the option; nothing depends on it but memory and time
                self.memory.madvise(option, first, last - first)


def release_pages(address: int, num_bytes: int) -> None:
    """Let the system take back memory, if it is that of a file; what was written to it stays in the file."""
    _advise(address, num_bytes, mmap.MADV_DONTNEED)


def expect_pages(address: int, num_bytes: int) -> None:
    """Have the system read ahead memory that is that of a file."""
    _advise(address, num_bytes, mmap.MADV_WILLNEED)


def _advise(address: int, num_bytes: int, option: int) -> None:
    for one in _MAPPED:
        if one.address <= address < one.address + len(one.memory):
            one.advise(address, num_bytes, option)
