# SPDX-License-Identifier: Apache-2.0
"""Which memory folder and which disk folder are one pool: each names the other in a file that the processes of the pool lock.

Containers with separate /dev/shm have separate catalogs, which would not know each other's chunks on a shared disk.
Engines with one /dev/shm have one catalog, which knows only one disk.
"""

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import NamedTuple

from pd_connector.errors import ConfigError
from pd_connector.pool.store.folder import Folder, unusable
from pd_connector.pool.store.process_lock import forgets_in_child

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
_TAKES_S = 5.0
"""The longest wait for a process that claims the same folder. It takes microseconds, unless it loses its processor."""
_RENEWED_S = 2.0
"""The longest wait for another process to see that the folder of this path was removed, and created again."""
_MOST_NAME = 8192


def identity_of(folder: Folder) -> str:
    """An id of this folder. A folder with the same path on another host, or in a container, has another id."""
    status = os.fstat(folder.root)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {status.st_dev} {status.st_ino}"


class _TakenError(Exception):
    """Another process uses this folder together with a third folder. The error's text is the path of the third
    folder."""


class _Claim(NamedTuple):
    """A file of one folder that names the other one."""

    folder: Folder
    file: str
    other: Folder

    def take(self) -> int:
        """A descriptor that holds the file. Raises OSError or _TakenError."""
        lock = os.open(self.file, _FLAGS, 0o600, dir_fd=self.folder.root)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.write(lock)
            shared, until = _share(lock), time.monotonic() + _RENEWED_S
            while True:
                identity, _, path = os.pread(lock, _MOST_NAME, 0).decode().partition(" at ")
                if shared and identity == identity_of(self.other):
                    break
                if path != str(self.other.path.parent) or time.monotonic() > until:
                    raise _TakenError(path)
                time.sleep(0.02)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def write(self, lock: int) -> None:
        """Name the other folder."""
        name = f"{identity_of(self.other)} at {self.other.path.parent}".encode()
        os.pwrite(lock, name, 0)
        os.ftruncate(lock, len(name))


class TierLocks:
    """Held by a process that uses both folders.

    Raises:
        ConfigError: another process uses one of them together with another folder.
    """

    def __init__(self, memory: Folder, disk: Folder) -> None:
        self._tier_locks = (_Claim(disk, "pool", memory), _Claim(memory, "disk", disk))
        self._locks: list[int] = []
        path = disk.path.parent
        try:
            for claim in self._tier_locks:
                self._locks.append(claim.take())
        except _TakenError as error:
            said = (
                f"{path}: this host's pool keeps its chunks in {error} already: name the same folder in all engines, or end those "
                "that use the other one (config key pool.dir)"
                if self._locks
                else f"{path}: the pool of a container with its own /dev/shm uses this folder: let the containers share one "
                "(Docker: --ipc), or name a folder for each (config key pool.dir)"
            )
            self.close()
            raise ConfigError(said) from None
        except OSError as error:
            self.close()
            raise unusable(path, error, "pool.dir") from error
        forgets_in_child(self)

    def renew(self) -> None:
        """A folder was removed, and created again: write the other folder's path into it again."""
        for number, claim in enumerate(self._tier_locks):
            with contextlib.suppress(OSError):
                lock = os.open(claim.file, _FLAGS, 0o600, dir_fd=claim.folder.root)
                before, self._locks[number] = self._locks[number], lock
                os.close(before)  # last: a child that another thread forks meanwhile closes all
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                claim.write(lock)

    def close(self) -> None:
        """Let other folders be used."""
        while self._locks:
            os.close(self._locks.pop())

    def forget_in_child(self) -> None:
        """A child of this process does not use the folders, and must not hold them when its parent has ended."""
        self.close()


def _share(lock: int) -> bool:
    """Hold a lock shared with other processes. A process that starts at the same time holds it exclusively while it
    writes its claim. Returns whether that process released the lock in time."""
    until = time.monotonic() + _TAKES_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        time.sleep(0.001)
    return False
