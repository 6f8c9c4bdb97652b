# SPDX-License-Identifier: Apache-2.0
"""The folders and catalog of a store, and the operations on both: adding and removing chunks.

The order of steps makes it safe to stop between any two. Coming in: the row in the catalog, the file, its bytes, the file among
the whole ones, the chunk's row, its entry. Going: the row, the entry, the files, the note that they go.
"""

import contextlib
import errno
import itertools
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pd_connector.pool.store.base import DISK, MEMORY, Refusal, Why
from pd_connector.pool.store.catalog import WAIT_S, Catalog, CatalogError
from pd_connector.pool.store.catalog_ops import (
    MEMORY_TIER,
    Evicted,
    Part,
    RefusedError,
    complete,
    insert_if_missing,
    removed,
    touch,
    write_leaving,
)
from pd_connector.pool.store.entry import Entry, entry_of, file_name
from pd_connector.pool.store.eviction import make_room, reserve
from pd_connector.pool.store.folder import RESERVE_BYTES, Folder
from pd_connector.pool.store.parts import LocalWriting
from pd_connector.pool.store.process_lock import ProcessLock
from pd_connector.pool.store.tier_lock import TierLocks
from pd_connector.pool.store.troubles import Troubles

_PUBLISHES_S = 0.5
"""How long a complete part waits for the catalog."""
_ROOM_HELPS = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a file system that go away when older chunks are removed."""
_TOUCHED_AT_ONCE = 256
"""Chunks whose use is written down in one transaction, which takes 4 us for each."""
_MOST_UNWRITTEN = 4096
"""Look-ups whose use is still to be written down. If there are more, the oldest are forgotten."""


class Space(NamedTuple):
    """A tier that is to be used."""

    path: Path
    budget: int
    """Bytes, for all processes of the host together."""
    chosen: bool = True
    """Whether the budget was set, and not found by default. What was set holds against defaults of other engines."""


class TierStorage:
    """The folders and catalog that the processes of a host share, opened by one process.

    Attributes:
        spaces: the tiers, the fastest first.
        folders: folders of the tiers.
        troubles: records tiers that cannot be written.
        used: keys of chunks whose use is not in the catalog yet.
        wake: set when there may be something to copy to another tier.

    Raises:
        ConfigError: a folder cannot be used.
    """

    def __init__(self, memory: Space, disk: Space | None) -> None:
        with contextlib.ExitStack() as undo:
            self.spaces = [memory] if disk is None else [memory, disk]
            self.folders = [Folder(MEMORY, memory.path, "pool.memory")]
            undo.callback(self.folders[0].close)
            if disk is not None:
                self.folders.append(Folder(DISK, disk.path, "pool.dir"))
                undo.callback(self.folders[1].close)
                self._tier_locks = TierLocks(*self.folders)
                undo.callback(self._tier_locks.close)
            self.troubles = Troubles(self.folders)
            self.alive = ProcessLock(self.folders[0])
            undo.callback(self.alive.close)
            self.catalog = Catalog(self.folders[0])
            undo.callback(self.catalog.close)
            self.used: deque[Sequence[bytes]] = deque(maxlen=_MOST_UNWRITTEN)
            self._owed: deque[Part | Evicted] = deque()
            self._flushing = threading.Lock()
            self.wake = threading.Event()
            self._stamps = itertools.count()
            self._closing = undo.pop_all()

    def renewed(self, folder: Folder) -> None:
        """A folder was removed, and created again."""
        if folder is self.folders[MEMORY_TIER]:
            self.alive.renew()
        if len(self.folders) > 1:
            self._tier_locks.renew()

    def close(self) -> None:
        """End this process's pins and parts. If the catalog cannot be written, others find the process dead, and end them."""
        self.flush()
        settled = not self._owed
        try:
            with self.catalog.transaction() as catalog:
                catalog.execute("DELETE FROM pins WHERE holder = ?", (self.alive.name,))
        except CatalogError:
            settled = False
        self.alive.close(settled=settled)
        self._closing.close()

    def begin_in(
        self,
        tier: int,
        key: bytes,
        parent: bytes,
        part: str,
        parts: int,
        nbytes: int,
        tenant: str,
        writer: str,
    ) -> LocalWriting | Refusal:
        """Reserve room for a part in one tier, whatever the other has."""
        name = file_name(key, part, self.stamp())
        what = Part(tier, key, parent, part, parts, nbytes, tenant, writer, self.alive.name, name)
        self.flush()
        try:
            self._reserve(what)
            descriptor = self._created(what)
        except (CatalogError, OSError) as error:  # a folder was removed, or is full
            self.troubles.look_at(self.folders[MEMORY_TIER])
            return Refusal(Why.UNWELL, str(error))
        except RefusedError as refused:
            return refused.refusal
        return LocalWriting(
            descriptor, nbytes, partial(self._publish, what), partial(self._cancel, what)
        )

    def stamp(self) -> str:
        """A part of a file's name that no other file has."""
        return f"{self.alive.name}-{next(self._stamps):x}"

    def _reserve(self, part: Part) -> None:
        """Raises CatalogError or RefusedError."""
        if not self.alive.is_held:
            raise CatalogError("this process was forked from that which opened the store")
        try:
            with self.catalog.transaction() as catalog:
                evicted = reserve(catalog, part)
        except RefusedError as refused:
            if refused.refusal.why is not Why.EXISTS or self.mend(part.tier, part.key):
                raise
            with self.catalog.transaction() as catalog:
                evicted = reserve(catalog, part)
        self.erase(evicted)

    def _created(self, part: Part) -> int:
        """The staged file. If the file system is full before the budget is, older chunks make room once."""
        folder = self.folders[part.tier]
        try:
            return folder.create(part.name, part.nbytes)
        except OSError as error:
            first = error
        try:
            if first.errno not in _ROOM_HELPS:
                raise first
            self._make_room(part)
            return folder.create(part.name, part.nbytes)
        except OSError as error:
            self._cancel(part)
            why = Why.FULL if error.errno in _ROOM_HELPS else Why.UNWELL
            raise RefusedError(Refusal(why, self.troubles.failed(folder, error))) from error
        except BaseException:
            self._cancel(part)
            self.troubles.failed(folder, first)
            raise

    def _make_room(self, part: Part) -> None:
        """Remove older chunks from a file system that is full. Raises CatalogError or RefusedError."""
        with self.catalog.transaction() as catalog:
            need = part.nbytes + RESERVE_BYTES // 8  # the catalog has grown as well
            evicted = make_room(catalog, part.tier, need, part.tenant, full=True)
            write_leaving(catalog, evicted, part.owner)
        self.erase(evicted)

    def mend(self, tier: int, key: bytes) -> bool:
        """Repair a chunk of the catalog; returns whether its files are there. Its process may have ended between the
        catalog's row and the entry, or between removing the files and removing the row."""
        with self.catalog.transaction(reading=True) as catalog:
            row = catalog.execute(
                "SELECT tier, key, entry FROM chunks WHERE tier = ? AND key = ?", (tier, key)
            ).fetchone()
            recorded = Evicted.of(*row) if row else None
        if recorded is None:
            return False
        folder, text = self.folders[tier], recorded.text
        if (current := folder.text(key)) == text:
            return True
        if (entry := recorded.entry) and folder.is_whole(key, entry):
            folder.enter(key, entry, self.stamp())
            return True
        if (entry := entry_of(current)) and folder.is_whole(key, entry):  # the row is wrong
            with self.catalog.transaction() as catalog:
                removed(catalog, [recorded])
                insert_if_missing(catalog, tier, key, entry)
            return True
        for each in filter(None, (text, current)):
            self.forget(folder, key, each)
        return False

    def _publish(self, part: Part) -> bool:
        folder = self.folders[part.tier]
        try:
            folder.settle(part.name)
            with self.catalog.transaction(wait_s=_PUBLISHES_S) as catalog:
                entry, name = complete(catalog, part), self.catalog.name
            if isinstance(entry, Entry):
                folder.enter(part.key, entry, self.stamp())
                if self.catalog.name != name:  # a new one was made that lacks this chunk
                    self._adopt_or_forget(part.tier, part.key)
                if len(self.folders) > 1:
                    self.wake.set()
        except OSError as error:
            self.troubles.failed(folder, error)
            return False
        except CatalogError:
            return False
        self.troubles.well(folder)
        return bool(entry)

    def _adopt_or_forget(self, tier: int, key: bytes) -> None:
        """Write down a chunk that was published into a catalog that is no longer in force. Raises CatalogError if it is lost."""
        try:
            self.adopt(tier, key, wait_s=_PUBLISHES_S)
        except CatalogError:
            self.forget(self.folders[tier], key, self.folders[tier].text(key))
            raise

    def _cancel(self, part: Part) -> None:
        self.folders[part.tier].discard(part.name)
        self._owed.append(part)
        self.flush()

    def forget(self, folder: Folder, key: bytes, text: str) -> None:
        """Remove a chunk from a folder, then from the catalog."""
        gone = Evicted(self.folders.index(folder), key, text)
        if gone.entry is None:
            folder.leave(key, text)
        else:
            folder.erase(key, gone.entry)
        self._owed.append(gone)
        self.flush()

    def adopt(self, tier: int, key: bytes, wait_s: float = WAIT_S) -> None:
        """Write down a chunk that a folder has and the catalog lacks. One that is not whole is removed. Raises CatalogError."""
        folder = self.folders[tier]
        text = folder.text(key)
        entry = entry_of(text)
        if entry is None or not folder.is_whole(key, entry):
            self.forget(folder, key, text)
        else:
            with self.catalog.transaction(wait_s=wait_s) as catalog:
                insert_if_missing(catalog, tier, key, entry)

    def erase(self, evicted: Iterable[Evicted]) -> None:
        """Remove the files of chunks that the catalog no longer has."""
        for gone in evicted:
            if gone.tier < len(self.folders):
                if gone.entry is not None:  # else `reconcile` finds its files
                    self.folders[gone.tier].erase(gone.key, gone.entry)
                self._owed.append(gone)

    def flush(self) -> None:
        """Write uses and removals of chunks to the catalog. If the catalog cannot be written, they stay for the next
        call. Waits while another thread writes, because that thread may have missed this caller's changes."""
        if (not self._owed and not self.used) or not self._flushing.acquire(timeout=WAIT_S):
            return
        owed, used = list(self._owed), self._take_used()
        try:
            with self.catalog.transaction() as catalog:
                removed(catalog, owed)
                for keys in used:
                    touch(catalog, keys)
            for _ in owed:
                self._owed.popleft()
        except CatalogError:
            room = _MOST_UNWRITTEN - len(self.used)  # else the youngest would be forgotten
            self.used.extendleft(used[: -room - 1 : -1])
        finally:
            self._flushing.release()

    def _take_used(self) -> list[Sequence[bytes]]:
        taken: list[Sequence[bytes]] = []
        with contextlib.suppress(IndexError):
            while sum(map(len, taken)) < _TOUCHED_AT_ONCE:
                taken.append(self.used.popleft())
        return taken
