# SPDX-License-Identifier: Apache-2.0
"""A store in folders of this host: memory (a tmpfs), and below it, if set, a disk.

All processes of one user that name the same folders share what is there, its budgets and its books. The folders say what is
there (`folder.py`), the books plan (`books.py`, `ledger.py`), and a thread of each process copies between the tiers and
removes what dead processes left (`keeper.py`).
"""

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pd_connector.errors import Miss, PoolError
from pd_connector.pool.store.alive import Alive, claim
from pd_connector.pool.store.base import (
    DISK,
    MEMORY,
    Found,
    Journal,
    Refusal,
    Store,
    StoreStatus,
    Why,
)
from pd_connector.pool.store.books import Books, BooksError
from pd_connector.pool.store.entry import Entry, check_part, entry_of, file_name, head_of
from pd_connector.pool.store.folder import Folder, charge_of
from pd_connector.pool.store.keeper import Keeper
from pd_connector.pool.store.ledger import (
    DISK_TIER,
    MEMORY_TIER,
    Evicted,
    Part,
    RefusedError,
    complete,
    make_room,
    now_s,
    pin,
    removed,
    reserve,
    touch,
    write_leaving,
)
from pd_connector.pool.store.parts import LocalReading, LocalWriting
from pd_connector.pool.store.reports import page_of, status_of

_PUBLISHES_S = 0.5
"""How long a part that is whole waits for the books."""
_TOUCHED_AT_ONCE = 256
"""Chunks whose use is written down in one transaction, which takes 4 us for each."""
_MOST_UNTOLD = 4096
"""Look-ups whose use is still to be written down. Of more, the oldest are forgotten."""


class Space(NamedTuple):
    """A tier that is to be used."""

    path: Path
    budget: int
    """Bytes, for all processes of the host together."""
    chosen: bool = True
    """Whether the budget was set, and not found by default. What was set holds against defaults of other engines."""


class LocalStore(Store):
    """Chunks in folders of this host. Make it after the last fork: a child of its process cannot save.

    Args:
        memory: a folder in a tmpfs.
        disk: a folder for what does not fit into memory.

    Raises:
        ConfigError: a folder cannot be used.
    """

    def __init__(self, memory: Space, disk: Space | None = None) -> None:
        with contextlib.ExitStack() as undo:
            self.spaces = [memory] if disk is None else [memory, disk]
            self.folders = [Folder(MEMORY, memory.path, "pool.memory")]
            undo.callback(self.folders[0].close)
            if disk is not None:
                self.folders.append(Folder(DISK, disk.path, "pool.dir"))
                undo.callback(self.folders[1].close)
                undo.callback(os.close, claim(self.folders[1], self.folders[0]))
            self.alive = Alive(self.folders[0])
            undo.callback(self.alive.close)
            self.books = Books(self.folders[0])
            undo.callback(self.books.close)
            self._used: deque[Sequence[bytes]] = deque(maxlen=_MOST_UNTOLD)
            self._owed: deque[Part | Evicted] = deque()
            self._flushing = threading.Lock()
            self._stamps = itertools.count()
            self.keeper = Keeper(self)
            undo.callback(self.keeper.stop)
            self.keeper.start()
            self._closing = undo.pop_all()

    # Looking up

    def find(self, keys: Sequence[bytes]) -> list[Found | None]:
        found: list[Found | None] = []
        for key in keys:
            for folder in self.folders:
                if (text := folder.text(key)) and (head := head_of(text)):
                    found.append(Found(folder.name, head.parts, head.nbytes))
                    break
            else:
                break
        if found:
            self._used.append(keys[: len(found)])
        return found + [None] * (len(keys) - len(found))

    def pin(self, keys: Sequence[bytes], for_s: float, holder: str = "") -> int:
        ends: list[
            tuple[bytes, int]
        ] = []  # a chunk keeps those before it in its tier from being evicted
        there, nbytes, last = 0, 0, ""
        for key in keys:
            if not (found := self._whole(key)):
                break
            if ends and found.tier == last:
                ends.pop()
            else:
                nbytes = 0
            nbytes += found.nbytes
            ends.append((key, nbytes))
            there, last = there + 1, found.tier
        with contextlib.suppress(BooksError), self.books.transaction() as books:
            pin(books, ends, now_s() + for_s, holder or self.alive.name, bool(holder))
        return there

    def _whole(self, key: bytes) -> Found | None:
        """A chunk with all its files."""
        for folder in self.folders:
            if text := folder.text(key):
                entry = entry_of(text)
                if entry is not None and folder.is_whole(key, entry):
                    return Found(folder.name, entry.parts, sum(map(charge_of, entry.sizes)))
                self.forget(folder, key, text)
        return None

    def unpin(self, keys: Sequence[bytes], holder: str = "") -> None:
        rows = [(key, holder or self.alive.name) for key in keys]
        with contextlib.suppress(BooksError), self.books.transaction() as books:
            books.executemany("DELETE FROM pins WHERE key = ? AND holder = ?", rows)

    def was_stored(self, key: bytes) -> bool:
        with contextlib.suppress(BooksError), self.books.transaction(reading=True) as books:
            found = books.execute("SELECT 1 FROM journal WHERE key = ? AND tier = -1", (key,))
            return found.fetchone() is not None
        return False

    # Saving

    def begin(
        self,
        key: bytes,
        *,
        parent: bytes,
        part: str,
        parts: int,
        nbytes: int,
        tenant: str = "",
        writer: str = "",
    ) -> LocalWriting | Refusal:
        check_part(key, part, parts, nbytes, tenant)
        if len(self.folders) > 1 and self.folders[DISK_TIER].text(key):
            return Refusal(Why.EXISTS, "the chunk is on the disk")
        return self.begin_in(MEMORY_TIER, key, parent, part, parts, nbytes, tenant, writer)

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
        except BooksError as error:
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
        """Raises BooksError or RefusedError."""
        if not self.alive.is_held:
            raise BooksError("this process was forked from that which opened the store")
        try:
            with self.books.transaction() as books:
                evicted = reserve(books, part)
        except RefusedError as refused:
            if refused.refusal.why is not Why.EXISTS or self.mend(part.tier, part.key):
                raise
            with self.books.transaction() as books:
                evicted = reserve(books, part)
        self.erase(evicted)

    def _created(self, part: Part) -> int:
        """The staged file. If the file system is full before the budget is, older chunks make room once."""
        folder = self.folders[part.tier]
        try:
            return folder.create(part.name, part.nbytes)
        except OSError:
            pass
        try:
            with self.books.transaction() as books:
                evicted = make_room(books, part.tier, part.nbytes, part.tenant, full=True)
                write_leaving(books, evicted, part.owner)
            self.erase(evicted)
            return folder.create(part.name, part.nbytes)
        except OSError as error:
            self._cancel(part)
            text = f"{folder.path}: {error.strerror}"
            raise RefusedError(Refusal(Why.FULL, text)) from error
        except BaseException:
            self._cancel(part)
            raise

    def mend(self, tier: int, key: bytes) -> bool:
        """Whether a chunk of the books is there. Someone may have ended between writing it down and making its entry, or
        between removing its files and writing that down."""
        with self.books.transaction(reading=True) as books:
            row = books.execute(
                "SELECT entry FROM chunks WHERE tier = ? AND key = ?", (tier, key)
            ).fetchone()
        if row is None:
            return False
        folder, text = self.folders[tier], row[0]
        if folder.text(key) == text:
            return True
        if (entry := entry_of(text)) and folder.is_whole(key, entry):
            folder.enter(key, entry, self.stamp())
            return True
        self.forget(folder, key, text)
        return False

    def _publish(self, part: Part) -> bool:
        folder = self.folders[part.tier]
        try:
            folder.settle(part.name)
            with self.books.transaction(wait_s=_PUBLISHES_S) as books:
                entry = complete(books, part)
            if isinstance(entry, Entry):
                folder.enter(part.key, entry, self.stamp())
        except (OSError, BooksError):
            return False
        return bool(entry)

    def _cancel(self, part: Part) -> None:
        self.folders[part.tier].discard(part.name)
        self._owed.append(part)
        self.flush()

    # Loading

    def read(self, key: bytes, part: str) -> LocalReading:
        problem = PoolError(Miss.EVICTED, f"chunk {key.hex()} is not there")
        for folder in self.folders:
            for _ in range(
                2
            ):  # it may be evicted and stored anew between the look at the entry and the file
                text = folder.text(key)
                entry = entry_of(text)
                if entry is None or part not in entry.parts:
                    break
                try:
                    descriptor = folder.open_part(key, entry, part)
                except PoolError as error:
                    if folder.text(key) == text:
                        self.forget(folder, key, text)
                        problem = error
                    continue
                size = entry.sizes[entry.parts.index(part)]
                return LocalReading(
                    descriptor, size, folder.name, partial(self._was_read, folder, key)
                )
        raise problem

    def _was_read(self, folder: Folder, key: bytes) -> None:
        if folder.name == DISK:
            self.keeper.promote(key)

    # Keeping

    def remove(self, keys: Sequence[bytes]) -> int:
        there = 0
        for key in keys:
            texts = [(folder, text) for folder in self.folders if (text := folder.text(key))]
            for folder, text in texts:
                self.forget(folder, key, text)
            there += bool(texts)
        return there

    def forget(self, folder: Folder, key: bytes, text: str) -> None:
        """Remove a chunk from a folder, then from the books."""
        gone = Evicted(self.folders.index(folder), key, text)
        if gone.entry is None:
            folder.leave(key, text)
        else:
            folder.erase(key, gone.entry)
        self._owed.append(gone)
        self.flush()

    def erase(self, evicted: Iterable[Evicted]) -> None:
        """Remove the files of chunks that the books no longer have."""
        for gone in evicted:
            if gone.tier < len(self.folders) and gone.entry is not None:
                self.folders[gone.tier].erase(gone.key, gone.entry)
                self._owed.append(gone)

    def flush(self) -> None:
        """Write down what was used, and what is gone. If the books cannot be written, later."""
        if (not self._owed and not self._used) or not self._flushing.acquire(blocking=False):
            return
        try:
            owed, used = list(self._owed), self._take_used()
            with self.books.transaction() as books:
                removed(books, owed)
                for keys in used:
                    touch(books, keys)
            for _ in owed:
                self._owed.popleft()
        except BooksError:
            pass
        finally:
            self._flushing.release()

    def _take_used(self) -> list[Sequence[bytes]]:
        taken: list[Sequence[bytes]] = []
        with contextlib.suppress(IndexError):
            while sum(map(len, taken)) < _TOUCHED_AT_ONCE:
                taken.append(self._used.popleft())
        return taken

    def journal(self, after: int) -> Journal:
        try:
            with self.books.transaction(reading=True) as books:
                return page_of(books, after)
        except BooksError as error:
            raise PoolError(Miss.REFUSED, f"the journal cannot be read: {error}") from error

    def status(self) -> StoreStatus:
        engines = len(self.alive.names())
        return status_of(self.books, self.folders, [space.budget for space in self.spaces], engines)

    def close(self) -> None:
        with contextlib.suppress(BooksError), self.books.transaction() as books:
            books.execute("DELETE FROM pins WHERE holder = ?", (self.alive.name,))
        self._closing.close()
