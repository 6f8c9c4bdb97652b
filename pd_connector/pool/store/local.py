# SPDX-License-Identifier: Apache-2.0
"""A store in folders of this host: memory (a tmpfs), and below it, if set, a disk.

All processes of one user that name the same folders share their chunks, budgets and catalog. The folders say what is there
(`folder.py`), the catalog plans (`catalog.py`, `catalog_ops.py`, `eviction.py`), and a thread of each process copies between the
tiers and removes what dead processes left (`tier_maintenance.py`).
"""

import contextlib
import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from pd_connector.errors import Miss, PoolError
from pd_connector.pool.store.base import (
    DISK,
    Chunk,
    Found,
    Journal,
    Refusal,
    Store,
    StoreStatus,
    Why,
)
from pd_connector.pool.store.catalog import CatalogError
from pd_connector.pool.store.catalog_ops import DISK_TIER, MEMORY_TIER, now_s
from pd_connector.pool.store.entry import check_part, entry_of, head_of
from pd_connector.pool.store.eviction import Kept, pin
from pd_connector.pool.store.folder import Folder, charge_of
from pd_connector.pool.store.parts import LocalReading, LocalWriting
from pd_connector.pool.store.reports import page_of, status_of
from pd_connector.pool.store.tier_lock import identity_of
from pd_connector.pool.store.tier_maintenance import TierMaintenance
from pd_connector.pool.store.tier_storage import Space, TierStorage


class LocalStore(Store):
    """Chunks in folders of this host. Make it after the last fork: a child of its process cannot save.

    Args:
        memory: a folder in a tmpfs.
        disk: a folder for what does not fit into memory.
        visits: only look, read and remove, as commands do: the budgets that engines have set stay, and no thread starts.

    Raises:
        ConfigError: a folder cannot be used.
    """

    def __init__(self, memory: Space, disk: Space | None = None, *, visits: bool = False) -> None:
        self._tier_storage = TierStorage(memory, disk)
        self._folders, self._catalog = self._tier_storage.folders, self._tier_storage.catalog
        self.maintenance = TierMaintenance(self._tier_storage)
        if not visits:
            self.maintenance.start()

    # Looking up

    def find(self, keys: Sequence[bytes]) -> list[Found | None]:
        chunks: list[Found | None] = []
        for key in keys:
            for folder in self._folders:
                if (text := folder.text(key)) and (head := head_of(text)):
                    chunks.append(Found(folder.name, head.parts, head.nbytes))
                    break
            else:
                break
        if chunks:
            self._tier_storage.used.append(keys[: len(chunks)])
        return chunks + [None] * (len(keys) - len(chunks))

    def pin(self, keys: Sequence[bytes], for_s: float, holder: str = "", tenants: int = 1) -> int:
        kept: list[Kept] = []
        there, last = 0, ""
        for key in keys:
            if not (chunk := self._whole(key)):
                break
            if chunk.tier != last:
                kept.append(Kept([], 0))
            kept[-1] = Kept(kept[-1].keys, kept[-1].nbytes + chunk.nbytes)
            kept[-1].keys.append(key)
            there, last = there + 1, chunk.tier
        with contextlib.suppress(CatalogError), self._catalog.transaction() as catalog:
            whose, shared = (holder, tenants) if holder else (self._tier_storage.alive.name, 0)
            pin(catalog, kept, now_s() + for_s, whose, shared)
        return there

    def _whole(self, key: bytes) -> Found | None:
        """A chunk with all its files."""
        for folder in self._folders:
            if text := folder.text(key):
                entry = entry_of(text)
                if entry is not None and folder.is_whole(key, entry):
                    return Found(folder.name, entry.parts, sum(map(charge_of, entry.sizes)))
                self._tier_storage.forget(folder, key, text)
        return None

    def unpin(self, keys: Sequence[bytes]) -> None:
        rows = [(key, self._tier_storage.alive.name) for key in keys]
        with contextlib.suppress(CatalogError), self._catalog.transaction() as catalog:
            catalog.executemany("DELETE FROM pins WHERE key = ? AND holder = ?", rows)

    def was_stored(self, key: bytes) -> bool:
        # Look-ups call this: it must not wait for the catalog.
        with (
            contextlib.suppress(CatalogError),
            self._catalog.transaction(reading=True, wait_s=0.0) as catalog,
        ):
            rows = catalog.execute("SELECT 1 FROM journal WHERE key = ? AND tier = -1", (key,))
            return rows.fetchone() is not None
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
        if self._is_on_disk(key):
            return Refusal(Why.EXISTS, "the chunk is on the disk")
        return self._tier_storage.begin_in(
            MEMORY_TIER, key, parent, part, parts, nbytes, tenant, writer
        )

    def _is_on_disk(self, key: bytes) -> bool:
        """Whether the disk has a chunk. If its entry was altered, it is made again."""
        if len(self._folders) < 2 or not (text := self._folders[DISK_TIER].text(key)):
            return False
        if entry_of(text) is not None:
            return True
        with contextlib.suppress(CatalogError, OSError):
            return self._tier_storage.mend(DISK_TIER, key)
        return False

    # Loading

    def bring(self, key: bytes) -> Found | None:
        (match,) = self.find([key])
        return match

    def read(self, key: bytes, part: str) -> LocalReading:
        problem = PoolError(Miss.EVICTED, f"chunk {key.hex()} is not there")
        for folder in self._folders:
            for _ in range(
                2
            ):  # it may be evicted and stored again between the look at the entry and the file
                text = folder.text(key)
                entry = entry_of(text)
                if entry is None or part not in entry.parts:
                    break
                try:
                    descriptor = folder.open_part(key, entry, part)
                except PoolError as error:
                    if error.cause is not Miss.DAMAGED:
                        raise
                    if folder.text(key) == text:
                        self._tier_storage.forget(folder, key, text)
                        problem = error
                    continue
                size = entry.sizes[entry.parts.index(part)]
                return LocalReading(
                    descriptor, size, folder.name, partial(self._was_read, folder, key)
                )
        raise problem

    def _was_read(self, folder: Folder, key: bytes) -> None:
        if folder.name == DISK:
            self.maintenance.promote(key)

    # Keeping

    def remove(self, keys: Sequence[bytes]) -> int:
        there = 0
        for key in keys:
            texts = [(folder, text) for folder in self._folders if (text := folder.text(key))]
            for folder, text in texts:
                self._tier_storage.forget(folder, key, text)
            there += bool(texts)
        return there

    def chunks(self, keys: Iterable[bytes] | None = None) -> Iterator[Chunk]:
        if keys is None:
            for folder in self._folders:
                for key in folder.entered():
                    if chunk := self._chunk_in(folder, key):
                        yield chunk
            return
        for key in keys:
            chunks = (self._chunk_in(folder, key) for folder in self._folders)
            if chunk := next(filter(None, chunks), None):
                yield chunk

    def _chunk_in(self, folder: Folder, key: bytes) -> Chunk | None:
        if (entry := folder.entry(key)) is None:
            return None
        size = sum(entry.sizes)
        return Chunk(key, folder.name, entry.parent, entry.tenant, entry.parts, size)

    def journal(self, after: int) -> Journal:
        try:
            with self._catalog.transaction(reading=True) as catalog:
                return page_of(catalog, after)
        except CatalogError as error:
            raise PoolError(Miss.REFUSED, f"the journal cannot be read: {error}") from error

    def keys(self) -> list[bytes]:
        return list(dict.fromkeys(key for folder in self._folders for key in folder.entered()))

    @property
    def id(self) -> str:
        name = identity_of(self._folders[MEMORY_TIER])
        return hashlib.blake2b(name.encode(), digest_size=16, person=b"pd-pool-store").hexdigest()

    def advertise(self, about: bytes) -> None:
        self._tier_storage.alive.advertise(about)

    def advertised(self) -> list[bytes]:
        return self._tier_storage.alive.advertised()

    def take_failures(self) -> Mapping[tuple[str, str], int]:
        return self._tier_storage.troubles.take()

    def status(self) -> StoreStatus:
        alive = self._tier_storage.alive
        engines = 1 + sum(alive.is_alive(name) for name in alive.names() if name != alive.name)
        return status_of(
            self._catalog,
            self._folders,
            [space.budget for space in self._tier_storage.spaces],
            engines,
        )

    def restore_folders(self) -> None:
        """Reopen folders that were removed and created again. For stores made with `visits`. Raises ConfigError."""
        self.maintenance.restore_folders()

    def close(self) -> None:
        if self.maintenance.stop():
            self._tier_storage.close()
        else:  # not before its thread ends: it would use descriptors whose numbers are other files' by then
            threading.Thread(target=self._close_later, name="pd-pool-close", daemon=True).start()

    def _close_later(self) -> None:
        self.maintenance.join()
        self._tier_storage.close()
