# SPDX-License-Identifier: Apache-2.0
"""A part that is being written or read in a folder."""

import contextlib
import ctypes
import os
from collections.abc import Callable

from pd_connector.errors import Miss, PoolError
from pd_connector.pool.store.base import DISK, Reading, Writing
from pd_connector.pool.store.folder import PAGE, unreadable

_DIRECT_BYTES = 256 << 10
"""Shorter reads go through the kernel's cache."""
_DIRECT = os.O_RDONLY | os.O_DIRECT


class LocalWriting(Writing):
    """A part in a staged file.

    Args:
        descriptor: descriptor of the file. This object closes it.
        publish: called once, returns whether the part is kept.
        cancel: called once if the part is not kept.
    """

    def __init__(
        self, descriptor: int, nbytes: int, publish: Callable[[], bool], cancel: Callable[[], None]
    ) -> None:
        self.nbytes = nbytes
        self._descriptor = descriptor
        self._publish, self._cancel = publish, cancel

    def write(self, offset: int, data: memoryview) -> None:
        flat = data.cast("B") if data.format != "B" or data.ndim != 1 else data
        if offset < 0 or offset + len(flat) > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + len(flat)}: the part has {self.nbytes}")
        if self._descriptor < 0:
            raise PoolError(Miss.REFUSED, "the writing has ended")
        try:
            while flat:
                written = os.pwrite(self._descriptor, flat, offset)
                offset, flat = offset + written, flat[written:]
        except OSError as error:
            self.cancel()
            raise PoolError(Miss.REFUSED, f"a part cannot be written: {error.strerror}") from error

    def copy(self, source: int) -> None:
        """Put all bytes of another file, without passing them through this process. Raises OSError."""
        done = 0
        while done < self.nbytes:
            sent = os.sendfile(self._descriptor, source, done, self.nbytes - done)
            if not sent:
                raise OSError(f"the file ends at {done}, not at {self.nbytes}")
            done += sent

    def publish(self) -> bool:
        if not self._end():
            return False
        if self._publish():
            return True
        self._cancel()
        return False

    def cancel(self) -> None:
        if self._end():
            self._cancel()

    def _end(self) -> bool:
        """Close the file; returns whether it was open."""
        descriptor, self._descriptor = self._descriptor, -1  # first: another thread may end it, too
        if descriptor < 0:
            return False
        os.close(descriptor)
        return True

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.cancel()


class LocalReading(Reading):
    """A part in a file.

    Args:
        descriptor: descriptor of the file. This object closes it.
        ended: called once at the end.
    """

    def __init__(self, descriptor: int, nbytes: int, tier: str, ended: Callable[[], None]) -> None:
        self.nbytes, self.tier = nbytes, tier
        self.descriptor = descriptor
        self._direct: int | None = None  # the same file, past the kernel's cache
        self._ended = ended

    def into(self, buffer: memoryview, offset: int) -> None:
        flat = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        try:
            while flat:
                got = self._read(flat, offset)
                if not got:
                    raise PoolError(Miss.DAMAGED, f"the file ends before byte {offset + len(flat)}")
                offset, flat = offset + got, flat[got:]
        except OSError as error:
            raise unreadable("a part cannot be read", error) from error

    def _read(self, buffer: memoryview, offset: int) -> int:
        """Read some bytes. Much of a disk's file is read straight into the buffer, if the kernel's cache does not have it:
        through the cache it would be read in small steps, and copied."""
        if (
            self.tier != DISK
            or len(buffer) < _DIRECT_BYTES
            or offset % PAGE
            or _address(buffer) % PAGE
        ):
            return os.preadv(self.descriptor, [buffer], offset)
        with contextlib.suppress(OSError):  # not cached, or the file system cannot say so
            return os.preadv(self.descriptor, [buffer], offset, os.RWF_NOWAIT)
        whole = buffer[: len(buffer) // PAGE * PAGE]
        with contextlib.suppress(OSError):  # the file system has no direct reads
            if self._direct is None:
                self._direct = os.open(f"/proc/self/fd/{self.descriptor}", _DIRECT)
            return os.preadv(self._direct, [whole], offset)
        return os.preadv(self.descriptor, [buffer], offset)

    def close(self) -> None:
        # Taken first: another thread may close it meanwhile, and the number may be another file's already.
        direct, self._direct = self._direct, None
        descriptor, self.descriptor = self.descriptor, -1
        if direct is not None:
            os.close(direct)
        if descriptor >= 0:
            os.close(descriptor)
            self._ended()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
