# SPDX-License-Identifier: Apache-2.0
"""Writes to the catalog, one function for each step. Each runs within a transaction and touches no file."""

import sqlite3
import time
from collections.abc import Iterable
from typing import NamedTuple

from pd_connector.pool.store.base import Refusal
from pd_connector.pool.store.entry import Entry, entry_of
from pd_connector.pool.store.folder import charge_of

MEMORY_TIER, DISK_TIER = 0, 1
STALE_S = 60.0
"""How long a complete part waits for the other parts of its chunk."""
CHUNK = "SELECT used FROM chunks WHERE tier = ? AND key = ?"


class RefusedError(Exception):
    """A part is not taken."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


class Part(NamedTuple):
    """A part that is to be written."""

    tier: int
    key: bytes
    parent: bytes
    part: str
    parts: int
    nbytes: int
    tenant: str
    writer: str
    owner: str
    """The process that writes it (`process_lock.py`)."""
    name: str
    """The name of its file."""


class Evicted(NamedTuple):
    """A chunk whose files are to be removed."""

    tier: int
    key: bytes
    text: str
    """The text of its entry."""

    @classmethod
    def of(cls, tier: int, key: object, text: object) -> "Evicted":
        """An entry from a row of the catalog. Raises TypeError if the row is corrupt: a transaction makes a new catalog
        then."""
        if not isinstance(key, bytes) or not isinstance(text, str) or not isinstance(tier, int):
            raise TypeError(f"chunk {key!r} of tier {tier!r} with the entry {text!r}")
        return cls(tier, key, text)

    @property
    def entry(self) -> Entry | None:
        return entry_of(self.text)


def now_s() -> float:
    """Seconds since the machine's start, the same in every process, whatever its clock says."""
    return time.monotonic()


def clock(catalog: sqlite3.Connection) -> int:
    """The next value of the clock of uses."""
    catalog.execute("UPDATE counters SET value = value + 1 WHERE name = 'clock'")
    return number_in(catalog, "SELECT value FROM counters WHERE name = 'clock'")


def touch(catalog: sqlite3.Connection, keys: Iterable[bytes]) -> None:
    """These chunks were used now, together."""
    used = clock(catalog)
    catalog.executemany("UPDATE chunks SET used = ? WHERE key = ?", [(used, key) for key in keys])


def write_leaving(catalog: sqlite3.Connection, evicted: Iterable[Evicted], owner: str) -> None:
    """Write down chunks whose files are to be removed by a process."""
    rows = [(*chunk, owner, now_s()) for chunk in evicted]
    catalog.executemany("INSERT OR REPLACE INTO leaving VALUES (?, ?, ?, ?, ?)", rows)


def complete(catalog: sqlite3.Connection, part: Part) -> Entry | str:
    """Note that a part is whole. Returns its chunk's entry if the chunk is whole now.

    Returns:
        Otherwise "waiting", if other parts are still missing, or "" if the catalog no longer knows the part.
    """
    place = (part.tier, part.key)
    updated = catalog.execute(
        "UPDATE files SET whole = 1, since = ?, writer = ? WHERE tier = ? AND name = ?",
        (now_s(), part.writer, part.tier, part.name),
    )
    if not updated.rowcount or catalog.execute(CHUNK, place).fetchone():
        return ""
    # Rows without a writer are those of parts that were found when the catalog was rebuilt.
    rows = catalog.execute(
        "SELECT part, name, size, bytes FROM files WHERE tier = ? AND key = ? AND whole = 1 "
        "AND writer IN (?, '') ORDER BY part",
        (*place, part.writer),
    ).fetchall()
    if len(rows) < part.parts:
        return "waiting"
    names, files, sizes, charges = zip(*rows, strict=True)
    stamps = tuple(file.rpartition(".")[2] for file in files)
    entry = Entry(part.parent, part.tenant, names, stamps, sizes)
    catalog.execute("DELETE FROM files WHERE tier = ? AND key = ?", (part.tier, part.key))
    insert(
        catalog,
        part.tier,
        part.key,
        entry,
        sum(charges),
        _used_elsewhere(catalog, part) or clock(catalog),
    )
    return entry


def _used_elsewhere(catalog: sqlite3.Connection, part: Part) -> int:
    """Time of the chunk's last use in the other tier; 0 if that tier does not have it."""
    row = catalog.execute(CHUNK, (1 - part.tier, part.key))
    return int((row.fetchone() or (0,))[0])


def insert(
    catalog: sqlite3.Connection, tier: int, key: bytes, entry: Entry, charge: int, used: int
) -> None:
    """Write down a whole chunk."""
    catalog.execute(
        "INSERT INTO chunks VALUES (?1, ?2, ?3, ?4, ?5, ?6, (SELECT count(*) FROM chunks WHERE tier = ?1 AND parent = ?2), "
        "?1 = 0 AND EXISTS (SELECT 1 FROM chunks WHERE tier = 1 AND key = ?2), ?7)",
        (tier, key, entry.parent, entry.tenant, charge, used, entry.text()),
    )


def insert_if_missing(catalog: sqlite3.Connection, tier: int, key: bytes, entry: Entry) -> None:
    """Write down a whole chunk, unless it is there, or is being removed."""
    place = (tier, key)
    leaves = catalog.execute(
        "SELECT 1 FROM leaving WHERE tier = ? AND key = ? AND entry = ?", (*place, entry.text())
    ).fetchone()
    if leaves or catalog.execute(CHUNK, place).fetchone():
        return
    # A new catalog may have found its files before its entry.
    rows = [(tier, name) for name in entry.files(key)]
    catalog.executemany("DELETE FROM files WHERE tier = ? AND name = ?", rows)
    insert(catalog, tier, key, entry, sum(map(charge_of, entry.sizes)), 0)


def removed(catalog: sqlite3.Connection, gone: Iterable[Part | Evicted]) -> None:
    """These files are removed."""
    for what in gone:
        if isinstance(what, Part):
            catalog.execute("DELETE FROM files WHERE tier = ? AND name = ?", (what.tier, what.name))
        else:
            for table in ("chunks", "leaving"):
                catalog.execute(
                    f"DELETE FROM {table} WHERE tier = ? AND key = ? AND entry = ?", what
                )


def number_in(catalog: sqlite3.Connection, query: str, *values: object) -> int:
    """The first number of the answer."""
    return int(catalog.execute(query, values).fetchone()[0])
