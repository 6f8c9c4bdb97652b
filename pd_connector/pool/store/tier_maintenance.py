# SPDX-License-Identifier: Apache-2.0
"""The maintenance thread of a store: copies chunks between the tiers, and removes what ended processes have left.

Every process has one, and none leads the others: each step is a reservation in the catalog, or removes garbage,
which any process may do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from pd_connector.errors import ConfigError, PoolError
from pd_connector.pool.store.base import Refusal
from pd_connector.pool.store.catalog import CatalogError
from pd_connector.pool.store.catalog_ops import (
    DISK_TIER,
    MEMORY_TIER,
    STALE_S,
    Evicted,
    RefusedError,
    now_s,
    write_leaving,
)
from pd_connector.pool.store.eviction import make_room, next_uncopied
from pd_connector.pool.store.reconcile import fill, last_reconcile_counter, reconcile, sums_differ
from pd_connector.pool.store.reports import trim

if TYPE_CHECKING:
    from pd_connector.pool.store.tier_storage import TierStorage

_TURN_S = 0.25
_SWEEP_S = 2.0
_RECONCILE_EVERY_S = 600.0
"""Time between two reconciliations of the catalog with the folders, by any process of the host."""
_RECONCILE_LIMIT_S = 5.0
_LEFT_BEHIND_S = 5.0
"""Files of evicted chunks that are still to be removed after this time are removed by any process."""
_UNCOPIED_SHARE = 7 / 8
"""Above this share of the memory's budget, chunks that the disk lacks are copied to it, so that room is always made at once."""
_COPIED_IN_A_TURN = 64
_FEW_CHUNKS = 1000
"""A catalog for this number of chunks is made in a tenth of a second."""
_STOPS_S = 5.0
"""Longest wait for the thread's end, in seconds. The catalog of a large pool, or a file of a slow disk, takes longer."""
_MOST_PROMOTED = 256
"""Chunks that wait for being copied to memory. If there are more, the oldest are forgotten."""

log = logging.getLogger(__name__)


class TierMaintenance:
    """Maintains a store in a thread of its own, until `stop`."""

    def __init__(self, store: TierStorage) -> None:
        self._store = store
        self._promoted: deque[bytes] = deque(maxlen=_MOST_PROMOTED)
        self._wake = store.wake
        self._ends = False
        self._seen_to_s = self._swept_s = 0.0
        self._budgets_written = False
        self._complained = ""
        self._thread = threading.Thread(target=self._run, name="pd-pool-keeper", daemon=True)

    def start(self) -> None:
        """Start the thread. If the catalog is missing, it is made here for few chunks, and by the thread for many:
        look-ups need none."""
        chunks = sum(sum(1 for _ in folder.names(folder.index)) for folder in self._store.folders)
        if not self._store.catalog.damaged or chunks <= _FEW_CHUNKS:
            with contextlib.suppress(CatalogError, OSError):
                self._restore_catalog()
        self._wake.set()
        self._thread.start()

    def stop(self) -> bool:
        """End the thread. Returns whether it has ended: a turn can take longer than this waits."""
        self._ends = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_STOPS_S)
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread's end, however long it takes."""
        self._thread.join()

    def promote(self, key: bytes) -> None:
        """A chunk of the disk was used: copy it to memory."""
        if key not in self._promoted:
            self._promoted.append(key)
            self._wake.set()

    def _run(self) -> None:
        while not self._ends:
            self._wake.wait(_TURN_S)
            self._wake.clear()
            try:
                if not self._ends:
                    self.turn()
            except (CatalogError, RefusedError, PoolError, OSError) as error:
                log.debug("pool: %s", error)
            except Exception:
                log.exception("pool: the store's thread goes on after this error")

    def turn(self) -> None:
        """All that is to be done now."""
        if self._store.catalog.damaged or now_s() - self._seen_to_s > _TURN_S:
            self._seen_to_s = now_s()
            self._restore_catalog()
            self._store.flush()
        if now_s() - self._swept_s > _SWEEP_S:
            self._swept_s = now_s()
            self.sweep()
            self._meet_budgets()
            self._reconcile()
        if len(self._store.folders) > 1:
            self._copy_down()
            self._copy_up()

    def restore_folders(self) -> None:
        """Create folders again that were removed, and this process's lock. Raises ConfigError."""
        store = self._store
        for folder in store.folders:
            if not folder.is_there:
                folder.renew()
                log.warning(
                    "pool: %s, or a folder in it, was removed, and is created again", folder.path
                )
                store.catalog.damaged = "a folder was removed"
                store.renewed(folder)
        if not store.alive.is_seen:
            store.alive.renew()

    def _restore_catalog(self) -> None:
        try:
            self.restore_folders()
            self._complained = ""
        except ConfigError as error:  # a folder cannot be created again; the other tier goes on
            if str(error) != self._complained:
                self._complained = str(error)
                log.warning("pool: nothing is saved there: %s", error)
        if self._store.catalog.damaged:
            self.rebuild_catalog(self._store.catalog.damaged)
        if not self._budgets_written:
            self._write_budgets()
            self._budgets_written = True

    def rebuild_catalog(self, why: str) -> None:
        """Replace the catalog by what the folders say."""
        if self._store.catalog.rebuild(lambda catalog: fill(catalog, self._store)):
            log.info("pool: catalog rebuilt from the folders, because %s", why)
            self._budgets_written = False
            self._reconcile()

    def _write_budgets(self) -> None:
        """Write this process's budgets. A default gives way to a budget that another process was configured with."""
        store = self._store
        alone = not any(
            store.alive.is_alive(name) for name in store.alive.names() if name != store.alive.name
        )
        with store.catalog.transaction(wait_s=_TURN_S) as catalog:
            paths = dict(catalog.execute("SELECT tier, path FROM tiers").fetchall())
            for tier, (folder, space) in enumerate(zip(store.folders, store.spaces, strict=True)):
                catalog.execute(
                    "INSERT INTO tiers (tier, path, budget, chosen) VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                    "path = excluded.path, budget = excluded.budget, chosen = excluded.chosen "
                    "WHERE excluded.chosen OR NOT chosen OR ?",
                    (tier, str(folder.path.parent), space.budget, space.chosen, alone),
                )
            if alone and len(store.folders) == 1:  # the disk is no longer used
                catalog.execute("DELETE FROM chunks WHERE tier = ?", (DISK_TIER,))
                catalog.execute("DELETE FROM tiers WHERE tier = ?", (DISK_TIER,))
        if (
            alone
            and DISK_TIER in paths
            and store.folders[1:]
            and paths[DISK_TIER] != str(store.folders[DISK_TIER].path.parent)
        ):
            store.catalog.damaged = "another disk folder is used"

    def sweep(self) -> None:
        """Remove what processes have left that ended, or were stopped in the middle."""
        store = self._store
        with store.alive.dead() as dead:
            for name in dead:
                self._remove_of(name)
            if dead:
                reconcile(store)
        now = now_s()
        with store.catalog.transaction() as catalog:
            stale = (now - STALE_S,)
            parts = catalog.execute(
                "SELECT tier, name FROM files WHERE whole AND since < ?", stale
            ).fetchall()
            catalog.execute("DELETE FROM files WHERE whole AND since < ?", stale)
            catalog.execute("DELETE FROM pins WHERE until <= ?", (now,))
            rows = catalog.execute(
                "SELECT tier, key, entry FROM leaving WHERE since < ?", (now - _LEFT_BEHIND_S,)
            )
            left = [Evicted.of(*row) for row in rows]
            trim(catalog)
        for tier, name in parts:
            self._discard(tier, name)
        store.erase(left)

    def _remove_of(self, name: str) -> None:
        """Remove what one process has left that ended."""
        store = self._store
        with store.catalog.transaction() as catalog:
            unfinished = "FROM files WHERE owner = ? AND NOT whole"
            parts = catalog.execute(f"SELECT tier, name {unfinished}", (name,)).fetchall()
            catalog.execute(f"DELETE {unfinished}", (name,))
            rows = catalog.execute("SELECT tier, key, entry FROM leaving WHERE owner = ?", (name,))
            left = [Evicted.of(*row) for row in rows]
            catalog.execute("DELETE FROM pins WHERE holder = ? AND NOT named", (name,))
        for tier, file in parts:
            self._discard(tier, file)
        for folder in store.folders:
            for file in folder.names(folder.staged):
                if file.rpartition(".")[2].startswith(f"{name}-"):
                    folder.discard(file)
        store.erase(left)

    def _discard(self, tier: int, name: str) -> None:
        if tier < len(self._store.folders):
            self._store.folders[tier].discard(name)

    def _reconcile(self) -> None:
        """Compare the catalog with the folders, if no process of the host has done so lately. The process that begins has
        `_RECONCILE_LIMIT_S` for it. If it fails or ends, another process begins."""
        store = self._store
        name, write = last_reconcile_counter(store), "INSERT OR REPLACE INTO counters VALUES (?, ?)"
        with store.catalog.transaction() as catalog:
            row = catalog.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
            if row and 0 <= now_s() - row[0] < _RECONCILE_EVERY_S:
                return
            catalog.execute(write, (name, int(now_s() - _RECONCILE_EVERY_S + _RECONCILE_LIMIT_S)))
            generation = store.catalog.name
        reconcile(store)
        with store.catalog.transaction(wait_s=_TURN_S) as catalog:
            if store.catalog.name == generation:
                catalog.execute(write, (name, int(now_s())))
        with store.catalog.transaction(reading=True) as catalog:
            if sums_differ(catalog):
                store.catalog.damaged = "its sums are wrong"

    def _meet_budgets(self) -> None:
        """Evict what a smaller budget has no room for."""
        store = self._store
        for tier in range(len(store.folders)):
            with store.catalog.transaction() as catalog:
                evicted = make_room(catalog, tier, 0, None, most=_COPIED_IN_A_TURN)
                write_leaving(catalog, evicted, store.alive.name)
            store.erase(evicted)

    def is_behind(self) -> bool:
        """Whether too many chunks of the memory are not yet on the disk, so that eviction would have to wait for
        copies."""
        with self._store.catalog.transaction(reading=True) as catalog:
            row = catalog.execute(
                "SELECT uncopied, budget FROM tiers WHERE tier = ?", (MEMORY_TIER,)
            ).fetchone()
            behind = row[0] > row[1] * _UNCOPIED_SHARE
        return len(self._store.folders) > 1 and behind

    def _copy_down(self) -> None:
        """Copy to the disk what will be evicted from memory next."""
        for _ in range(_COPIED_IN_A_TURN):
            if self._ends or not self.is_behind():
                return
            with self._store.catalog.transaction(reading=True) as catalog:
                keys = next_uncopied(catalog)
            if not any(self.copy(key, DISK_TIER) for key in keys):
                return

    def _copy_up(self) -> None:
        with contextlib.suppress(IndexError):
            while not self._ends:
                self.copy(self._promoted.popleft(), MEMORY_TIER)

    def copy(self, key: bytes, tier: int) -> bool:
        """Copy a chunk from the other tier to this one; returns whether it is there now."""
        store = self._store
        source = store.folders[1 - tier]
        entry = source.entry(key)
        if entry is None:
            return False
        writer = f"copied by {store.alive.name}"
        for part, size in zip(entry.parts, entry.sizes, strict=True):
            writing = store.begin_in(
                tier, key, entry.parent, part, len(entry.parts), size, entry.tenant, writer
            )
            if isinstance(writing, Refusal):
                return False
            with writing:
                descriptor = source.open_part(key, entry, part)
                try:
                    writing.copy(descriptor)
                except OSError as error:
                    store.troubles.failed(store.folders[tier], error)
                    return False
                finally:
                    os.close(descriptor)
                if not writing.publish():
                    return False
        return True
