# SPDX-License-Identifier: Apache-2.0
"""Compares the catalog with the folders, or makes a new catalog from them. Where they differ, the folders are right."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pd_connector.pool.store.catalog_ops import Evicted, now_s
from pd_connector.pool.store.entry import LINK, Entry, entry_of, file_of
from pd_connector.pool.store.folder import Folder, charge_of

if TYPE_CHECKING:
    from pd_connector.pool.store.tier_storage import TierStorage

_ENTRIES = "SELECT tier, key, entry FROM"


def fill(catalog: sqlite3.Connection, store: TierStorage) -> None:
    """Write all that the folders hold into an empty catalog. The new catalog counts as never reconciled, so the next
    reconciliation finds chunks that other processes published into the old catalog meanwhile."""
    for tier, (folder, space) in enumerate(zip(store.folders, store.spaces, strict=True)):
        catalog.execute(
            "INSERT INTO tiers (tier, path, budget, chosen) VALUES (?, ?, ?, ?)",
            (tier, str(folder.path.parent), space.budget, space.chosen),
        )
    for tier, folder in enumerate(store.folders):
        unclaimed = set(folder.names(folder.data, folder.staged))
        rows = []
        for rank, (key, entry) in enumerate(_whole_chunks(folder)):
            charge = sum(map(charge_of, entry.sizes))
            rows.append((tier, key, entry.parent, entry.tenant, charge, rank, 0, 0, entry.text()))
            unclaimed.difference_update(entry.files(key))
        catalog.executemany("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        catalog.execute(
            "UPDATE counters SET value = max(value, ?) WHERE name = 'clock'", (len(rows) + 1,)
        )
        for name in unclaimed:
            _write_or_discard(catalog, tier, folder, name, store)


def last_reconcile_counter(store: TierStorage) -> str:
    """Name of the counter with the time of the last reconciliation, in seconds since the machine's start, for stores with these tiers."""
    return f"stock_taken_s.{len(store.folders)}"


def _whole_chunks(folder: Folder) -> Iterator[tuple[bytes, Entry]]:
    """Whole chunks of a folder, the oldest first. Incomplete chunks are removed."""
    for key in folder.entered():
        text = folder.text(key)
        entry = entry_of(text)
        if entry is None:
            folder.leave(key, text)
        elif not folder.is_whole(key, entry):
            folder.erase(key, entry)
        else:
            yield key, entry


def _write_or_discard(
    catalog: sqlite3.Connection, tier: int, folder: Folder, name: str, store: TierStorage
) -> None:
    """Handle a file that no entry names: record it in the catalog if a living process writes it; otherwise remove
    it."""
    file, size = file_of(name), folder.size(name)
    if file is None or size < 0:
        return
    if not store.alive.is_alive(file.owner):
        folder.discard(name)
        return
    if file.part == LINK:
        return
    catalog.execute(
        "INSERT INTO files VALUES (?, ?, ?, ?, 0, '', '', ?, ?, ?, ?, ?)",
        (
            tier,
            name,
            file.key,
            file.part,
            charge_of(size),
            size,
            file.owner,
            folder.is_settled(name),
            now_s(),
        ),
    )


def reconcile(store: TierStorage) -> None:
    """Remove files that nothing names, repair missing or wrong entries of chunks, and add chunks that the catalog lacks.

    Raises:
        CatalogError: the catalog could not be read or written; it must be reconciled again.
    """
    for tier, folder in enumerate(store.folders):
        # First the names: a row is written before its file is made, and goes after it.
        names = list(folder.names(folder.data, folder.staged))
        keys = folder.entered()
        with store.catalog.transaction(reading=True) as catalog:
            rows, left = (
                [Evicted.of(*row) for row in catalog.execute(f"{_ENTRIES} {table} WHERE tier = ?", (tier,))]
                for table in ("chunks", "leaving")
            )  # fmt: skip
            files = catalog.execute("SELECT name FROM files WHERE tier = ?", (tier,)).fetchall()
        named = {name for (name,) in files}
        for chunk in [*rows, *left]:
            if entry := chunk.entry:
                named.update(entry.files(chunk.key))
        recorded = {chunk.key: chunk.text for chunk in rows}
        for key, text in recorded.items():
            if folder.text(key) != text:
                with contextlib.suppress(OSError):  # no room, or a folder in its place
                    store.mend(tier, key)
                if entry := folder.entry(key):
                    named.update(entry.files(key))
        for key in keys:
            if key not in recorded and (tier, key, folder.text(key)) not in left:
                store.adopt(tier, key)
                if entry := folder.entry(key):
                    named.update(entry.files(key))
        for name in names:
            file = file_of(name)
            if (
                file
                and name not in named
                and not (file.part == LINK and store.alive.is_alive(file.owner))
            ):
                folder.discard(name)


def sums_differ(catalog: sqlite3.Connection) -> bool:
    """Whether the sums that triggers keep differ from the sums of the rows."""
    return (
        catalog.execute(
            "SELECT 1 FROM tiers t WHERE bytes != (SELECT coalesce(sum(bytes), 0) FROM chunks WHERE tier = t.tier) "
            "+ (SELECT coalesce(sum(bytes), 0) FROM files WHERE tier = t.tier) "
            "OR uncopied != (SELECT coalesce(sum(bytes), 0) FROM chunks WHERE tier = t.tier AND NOT copied) "
            "OR bytes != (SELECT coalesce(sum(bytes), 0) FROM usage WHERE tier = t.tier)"
        ).fetchone()
        is not None
    )
