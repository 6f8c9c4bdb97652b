# SPDX-License-Identifier: Apache-2.0
"""Tiers that cannot be written: what is logged, counted, and shown by `pd-connector pool status`.

A tier that cannot be written costs no answer. Without a word about it, its chunks would be missed for no visible reason.
"""

import contextlib
import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence

from pd_connector.pool.store.base import DISK, MEMORY, Unwritable
from pd_connector.pool.store.folder import Folder

_AGAIN_S = 300.0
"""The same trouble is logged again after this time, in seconds."""
_RETOLD_S = 10.0
"""What other processes read is written again after this time, in seconds."""
_SETTINGS = {
    MEMORY: ("pool.memory", "the variable PD_CONNECTOR_SHM"),
    DISK: ("pool.disk", "pool.dir"),
}
_FILE = "unwritable."
_MOST_BYTES = 4096
_BOOKS_BYTES = 64 << 10
"""Room that a transaction of the catalog needs, about."""
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""A folder was removed. The store's thread creates it again, and says so."""

log = logging.getLogger(__name__)


class Troubles:
    """Used by several threads.

    Args:
        folders: the tiers' folders, the memory tier's first. It also holds the reports for other processes.
    """

    def __init__(self, folders: Sequence[Folder]) -> None:
        self._folders = folders
        self._lock = threading.Lock()
        self._logged: dict[str, tuple[str, float]] = {}  # by tier: why, and when
        self._told_s: dict[str, float] = {}
        self._failures: Counter[tuple[str, str]] = Counter()

    def failed(self, folder: Folder, error: OSError) -> str:
        """A chunk could not be written to this tier. Returns what is wrong, and what to do."""
        cause, what, remedy = _explained(folder, error)
        text = f"{folder.path.parent}: {what}; {remedy}"
        if error.errno in _GONE:
            return text
        now, name = time.monotonic(), folder.name
        with self._lock:
            self._failures[name, cause] += 1
            why, logged_s = self._logged.get(name, ("", 0.0))
            if logs := why != cause or now - logged_s >= _AGAIN_S:
                self._logged[name] = cause, now
            if logs or now - self._told_s.get(name, 0.0) >= _RETOLD_S:
                self._told_s[name] = now
                self._tell(name, text)  # before another thread finds the tier well
        if logs:
            log.warning("pool: nothing is saved in the %s tier: %s", name, text)
        return text

    def look_at(self, folder: Folder) -> None:
        """The catalog could not be written. Report the tier as failed if its file system has no room for the
        catalog."""
        with contextlib.suppress(OSError):
            left = os.fstatvfs(folder.root)
            if left.f_blocks and left.f_bavail * left.f_frsize < _BOOKS_BYTES:
                self.failed(folder, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def well(self, folder: Folder) -> None:
        """A chunk was written to this tier."""
        name = folder.name
        if name not in self._logged:
            return
        with self._lock:
            if self._logged.pop(name, None) is None:
                return
            self._told_s.pop(name, None)
            with contextlib.suppress(OSError):
                os.unlink(_FILE + name, dir_fd=self._folders[0].root)
        log.info("pool: the %s tier takes chunks again (%s)", name, folder.path.parent)

    def take(self) -> dict[tuple[str, str], int]:
        """How often writing has failed since the last call, by tier and cause."""
        if not self._failures:
            return {}
        with self._lock:
            failures, self._failures = dict(self._failures), Counter()
        return failures

    def _tell(self, name: str, text: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with contextlib.suppress(OSError):
            file = os.open(_FILE + name, flags, 0o600, dir_fd=self._folders[0].root)
            try:
                os.write(file, text.encode()[:_MOST_BYTES])
            finally:
                os.close(file)


def unwritable(memory: Folder) -> list[Unwritable]:
    """The records of this host's processes about tiers that they could not write to."""
    tiers = []
    for name in memory.names(memory.root):
        if not name.startswith(_FILE):
            continue
        with contextlib.suppress(OSError):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(name, flags, dir_fd=memory.root)
            try:
                text = os.read(file, _MOST_BYTES).decode(errors="replace")
                age_s = max(0.0, time.time() - os.fstat(file).st_mtime)
            finally:
                os.close(file)
            tiers.append(Unwritable(name.removeprefix(_FILE), text, age_s))
    return tiers


def _explained(folder: Folder, error: OSError) -> tuple[str, str, str]:
    """The cause for metrics, what is wrong, and what to do."""
    budget, place = _SETTINGS[folder.name]
    elsewhere = f"or name another folder in {place}"
    match error.errno:
        case errno.ENOSPC if _no_inodes(folder):
            what = (
                "its file system has no inodes left, so no file can be made, whatever room is free"
            )
            return "no_inodes", what, f"remove files that are not needed, {elsewhere}"
        case errno.ENOSPC:
            what = "its file system has no room left, and removing older chunks does not suffice"
            return "no_room", what, f"free some, lower {budget}, {elsewhere}"
        case errno.EDQUOT:
            what = "the disk quota of this user is used up"
            return "quota", what, f"raise it, lower {budget}, {elsewhere}"
        case errno.EROFS:
            what = "its file system is mounted read-only, perhaps because the disk has failed (see dmesg)"
            return "read_only", what, f"mount it for writing, {elsewhere}"
        case errno.EACCES | errno.EPERM:
            what = f"this user may not write there ({error.strerror})"
            return "permission", what, f"give user {os.geteuid()} its folders back, {elsewhere}"
        case _:
            what = error.strerror or str(error)
            return "failed", what, f"look at the disk (dmesg), {elsewhere}"


def _no_inodes(folder: Folder) -> bool:
    try:
        left = os.fstatvfs(folder.root)
    except OSError:
        return False
    return bool(left.f_files) and not left.f_favail
