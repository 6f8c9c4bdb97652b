# SPDX-License-Identifier: Apache-2.0
"""Memory that the keeper writes and its workers read. It has no name in the file system, so nothing is left when the
processes end."""

from __future__ import annotations

import mmap
import os
import secrets

import msgspec
import numpy as np
from numpy.typing import NDArray

WORD_BYTES = 8
_NAME = "pd-router-"


class MemoryRef(msgspec.Struct, frozen=True):
    """The location of a piece of memory, for another process."""

    pid: int
    fd: int
    name: str
    words: int


class SharedWords:
    """Shared 64-bit words, all zero at first. After `close`, no process can attach; attached processes keep the
    memory."""

    def __init__(self, words: int) -> None:
        self._name = _NAME + secrets.token_hex(8)
        self._fd = os.memfd_create(self._name, os.MFD_CLOEXEC)
        os.ftruncate(self._fd, words * WORD_BYTES)
        self.map = mmap.mmap(self._fd, words * WORD_BYTES)
        self.ref = MemoryRef(os.getpid(), self._fd, self._name, words)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def attach(ref: MemoryRef, *, write: bool = False) -> mmap.mmap:
    """Map another process's memory. Raises OSError if the memory is gone."""
    flags = os.O_RDWR if write else os.O_RDONLY
    fd = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", flags | os.O_CLOEXEC)
    try:
        # The file descriptor may refer to another file by now.
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{ref.name}"):
            raise FileNotFoundError(f"{ref.name}: this memory is gone")
        access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
        return mmap.mmap(fd, ref.words * WORD_BYTES, access=access)
    finally:
        os.close(fd)


def words_in(mapped: mmap.mmap) -> NDArray[np.uint64]:
    """The words of mapped memory. The memory stays mapped while they are in use."""
    return np.frombuffer(mapped, np.uint64)
