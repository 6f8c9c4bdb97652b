# SPDX-License-Identifier: Apache-2.0
"""Which processes use a store: each locks a file of its own. The kernel frees the lock when the process dies.

Process ids would say nothing to a container with ids of its own. A process that was stopped still holds its lock.
"""

import contextlib
import fcntl
import os
import secrets
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol

from pd_connector.pool.store.folder import PASSING, Folder, private_folder, reopened, unusable

_TAKE = fcntl.LOCK_EX | fcntl.LOCK_NB
_SHARE = fcntl.LOCK_SH | fcntl.LOCK_NB
_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
ADVERTISED_BYTES = 4096
"""Most bytes that a process advertises."""
_READS = 8
"""Most repeated reads of what a process advertises: it writes a few times in a second."""


class ProcessLock:
    """This process's own lock, and checks of other processes' locks.

    Attributes:
        name: name of this process, in names of files and in the catalog.
    """

    def __init__(self, folder: Folder) -> None:
        self._path = folder.path / "writers"
        self._folder = private_folder(self._path, "pool")
        self.name, self._lock, self._advertised = "", -1, b""
        self._turn = threading.Lock()  # of `_advertised` and its place in the file
        try:
            while self._lock < 0:
                self.name = f"{os.getpid():x}x{secrets.token_hex(4)}"
                self._lock = self._taken(self.name)
        except OSError as error:
            os.close(self._folder)
            raise unusable(self._path, error, "pool.memory") from error
        forgets_in_child(self)

    def _taken(self, name: str) -> int:
        """A descriptor that holds the lock of this name; -1 if another process, which looks for dead processes, took it
        first."""
        lock = os.open(name, _FLAGS, 0o600, dir_fd=self._folder)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, _TAKE)
            if os.fstat(lock).st_nlink:
                return lock
        os.close(lock)
        return -1

    @property
    def is_held(self) -> bool:
        """Whether this process holds its lock: not after `close`, and not in a child of the process that took it."""
        return self._lock >= 0

    @property
    def is_seen(self) -> bool:
        """Whether others find this process's lock. A child of the process has none."""
        try:
            return not self.is_held or os.path.samestat(
                os.lstat(self._path / self.name), os.fstat(self._lock)
            )
        except OSError:
            return False

    def renew(self) -> None:
        """Take the lock again: its file, or a folder above it, was removed."""
        fresh = private_folder(self._path, "pool")
        os.dup2(fresh, self._folder, inheritable=False)
        os.close(fresh)
        if (lock := self._taken(self.name)) >= 0:
            with self._turn:  # what another thread advertises meanwhile is newer
                os.dup2(lock, self._lock, inheritable=False)
                os.close(lock)
                self._write()

    def advertise(self, about: bytes) -> None:
        """Publish a text about this process while it lives. The text is padded to a fixed length, so that no reader
        finds the end of an earlier text."""
        if self.is_held:  # a child of this process may have the lock of a thread that it lacks
            with self._turn:
                self._advertised = about
                self._write()

    def _write(self) -> None:
        about = self._advertised
        if about and len(about) <= ADVERTISED_BYTES:
            with contextlib.suppress(OSError):  # the file system is full
                os.pwrite(self._lock, about.ljust(ADVERTISED_BYTES), 0)

    def advertised(self) -> list[bytes]:
        """What living processes advertise."""
        published = []
        for name in self.names():
            with contextlib.suppress(OSError):
                # Without waiting: the name could be a pipe's.
                lock = os.open(name, _LOOK, dir_fd=self._folder)
                try:
                    if (about := _settled(lock)) and self.is_alive(name):
                        published.append(about)
                finally:
                    os.close(lock)
        return published

    def names(self) -> list[str]:
        """All processes, alive or dead."""
        with contextlib.suppress(OSError), reopened(self._folder) as listed:
            return os.listdir(listed)
        return []

    def is_alive(self, name: str) -> bool:
        """Whether the process of this name has not ended."""
        try:
            lock = os.open(name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=self._folder)
        except OSError as error:
            return error.errno in PASSING  # else it would lose its pins
        try:
            fcntl.flock(
                lock, _SHARE
            )  # two that look at once do not take each other for the process
        except OSError:
            return True
        finally:
            os.close(lock)
        return False

    @contextlib.contextmanager
    def dead(self) -> Iterator[list[str]]:
        """A context that yields the processes that have ended. Their lock files are removed if the block ends without
        an exception."""
        ended: list[str] = []
        with contextlib.ExitStack() as held:
            for name in self.names():
                if name == self.name:
                    continue
                with contextlib.suppress(OSError):
                    lock = os.open(name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=self._folder)
                    held.callback(os.close, lock)
                    fcntl.flock(lock, _TAKE)
                    ended.append(name)
            yield ended
            for name in ended:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._folder)

    def close(self, *, settled: bool = True) -> None:
        """This process no longer uses the store.

        Args:
            settled: whether the catalog has recorded the end of this process. If not, its name stays, and other
                processes clean up as for a dead process.
        """
        if self._lock < 0:
            return
        with contextlib.suppress(OSError):
            if settled:
                os.unlink(self.name, dir_fd=self._folder)
        self._release()
        os.close(self._folder)

    def forget_in_child(self) -> None:
        """A child of this process does not use the store, and must not keep its parent's lock when the parent dies."""
        self._release()

    def _release(self) -> None:
        lock, self._lock = self._lock, -1  # first: another thread may fork meanwhile
        if lock >= 0:
            os.close(lock)


def _settled(lock: int) -> bytes:
    """A process's advertised text, without the padding. It is read until two reads agree, because the process may be
    writing it. Raises OSError."""
    about = os.pread(lock, ADVERTISED_BYTES, 0)
    for _ in range(_READS):
        before, about = about, os.pread(lock, ADVERTISED_BYTES, 0)
        if about == before:
            break
    return about.strip()


class _Held(Protocol):
    def forget_in_child(self) -> None: ...


_held: "weakref.WeakSet[_Held]" = weakref.WeakSet()


def forgets_in_child(holder: _Held) -> None:
    """Call this object's `forget_in_child` in each child of this process, as long as the object is used."""
    _held.add(holder)


def _forget_all() -> None:
    for holder in list(_held):
        holder.forget_in_child()


os.register_at_fork(after_in_child=_forget_all)
