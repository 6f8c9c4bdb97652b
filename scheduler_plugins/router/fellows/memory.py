# SPDX-License-Identifier: Apache-2.0
"""Memory that the keeper writes and its workers read. It has no name, so nothing is left when the processes end."""

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
    """Where another process finds a piece of memory."""

    pid: int
    fd: int
    name: str
    words: int


class SharedWords:
    """64-bit words, all zero at first. `close` lets nobody attach any more; who has attached keeps them."""

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
    """Map another process's memory. Raises OSError: it is gone."""
    flags = os.O_RDWR if write else os.O_RDONLY
    fd = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", flags | os.O_CLOEXEC)
    try:
        # The number may have been given to something else meanwhile.
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{ref.name}"):
            raise FileNotFoundError(f"{ref.name}: this memory is gone")
        access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
        return mmap.mmap(fd, ref.words * WORD_BYTES, access=access)
    finally:
        os.close(fd)


def words_in(mapped: mmap.mmap) -> NDArray[np.uint64]:
    """The words of mapped memory, which stays mapped as long as they are used."""
    return np.frombuffer(mapped, np.uint64)
