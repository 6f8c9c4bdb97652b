# SPDX-License-Identifier: Apache-2.0
"""A store's journal and status, from the catalog."""

import sqlite3
from collections.abc import Sequence

from pd_connector.pool.store.base import (
    DISK,
    MEMORY,
    Event,
    Journal,
    StoreStatus,
    TierStatus,
    Unwritable,
)
from pd_connector.pool.store.catalog import Catalog, CatalogError
from pd_connector.pool.store.catalog_ops import now_s
from pd_connector.pool.store.folder import Folder
from pd_connector.pool.store.troubles import unwritable

PAGE_EVENTS = 8192
MOST_GONE = 1 << 16
"""Chunks that are gone and still in the journal. If there are more, the oldest half is forgotten."""
_NAMES = (MEMORY, DISK, "")
"""Names of tiers by number; -1 is none."""


def page_of(catalog: sqlite3.Connection, after: int) -> Journal:
    """A page of the journal. While a caller reads the whole journal, `next` is negative, so that the journal's limited
    reach cannot interrupt it."""
    (floor,) = catalog.execute("SELECT value FROM counters WHERE name = 'journal_floor'").fetchone()
    (last,) = catalog.execute("SELECT seq FROM sqlite_sequence WHERE name = 'journal'").fetchone()
    reading_whole = after <= 0 or not floor <= after <= last
    start = -after if after <= 0 else 0 if reading_whole else after
    whole = reading_whole and not floor < start <= last
    rows = catalog.execute(
        "SELECT number, key, tier FROM journal WHERE number > ? ORDER BY number LIMIT ?",
        (0 if whole else start, PAGE_EVENTS),
    ).fetchall()
    more = len(rows) == PAGE_EVENTS
    reached = rows[-1][0] if rows else last
    events = [Event(number, bytes(memoryview(key)), _NAMES[tier]) for number, key, tier in rows]
    return Journal(events, -reached if reading_whole and more else reached, whole, more)


def trim(catalog: sqlite3.Connection) -> None:
    """Forget chunks that have been gone longest."""
    (gone,) = catalog.execute("SELECT count(*) FROM journal WHERE tier = -1").fetchone()
    if gone > MOST_GONE:
        (floor,) = catalog.execute(
            "SELECT number FROM journal WHERE tier = -1 ORDER BY number LIMIT 1 OFFSET ?",
            (gone // 2,),
        ).fetchone()
        catalog.execute("DELETE FROM journal WHERE tier = -1 AND number <= ?", (floor,))
        catalog.execute("UPDATE counters SET value = ? WHERE name = 'journal_floor'", (floor,))


_WAIT_S = 1.0
"""How long a command waits for the catalog, in seconds. No request waits for it."""


def status_of(
    catalog: Catalog, folders: Sequence[Folder], budgets: Sequence[int], engines: int
) -> StoreStatus:
    """Used room according to the catalog. If the catalog cannot be read: according to the folders, without tenants."""
    try:
        with catalog.transaction(reading=True, wait_s=_WAIT_S) as connection:
            return _status_in(connection, engines, catalog.problem, unwritable(folders[0]))
    except CatalogError as error:
        tiers = []
        for folder, budget in zip(folders, budgets, strict=True):
            entries = [entry for key in folder.entered() if (entry := folder.entry(key))]
            held = sum(sum(entry.sizes) for entry in entries)
            tiers.append(
                TierStatus(folder.name, str(folder.path.parent), budget, held, len(entries), {})
            )
        return StoreStatus(tiers, 0, 0, engines, str(error), unwritable(folders[0]))


def _status_in(
    catalog: sqlite3.Connection, engines: int, problem: str, refusing: list[Unwritable]
) -> StoreStatus:
    tiers = [
        TierStatus(_NAMES[tier], path, budget, nbytes, chunks, dict(
            catalog.execute("SELECT tenant, bytes FROM usage WHERE tier = ? ORDER BY bytes DESC", (tier,))
        ))
        for tier, path, budget, nbytes, chunks in catalog.execute(
            "SELECT tier, path, budget, bytes, chunks FROM tiers ORDER BY tier"
        ).fetchall()
    ]  # fmt: skip
    (writing,) = catalog.execute("SELECT count(*) FROM files").fetchone()
    (pinned,) = catalog.execute(
        "SELECT count(DISTINCT key) FROM pins WHERE until > ?", (now_s(),)
    ).fetchone()
    return StoreStatus(tiers, writing, pinned, engines, problem, refusing)
