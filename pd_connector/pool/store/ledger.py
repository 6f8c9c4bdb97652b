# SPDX-License-Identifier: Apache-2.0
"""What is written into the books, one function a step. Each runs within a transaction and touches no file."""

import sqlite3
import time
from collections.abc import Iterable
from typing import NamedTuple

from pd_connector.pool.store.base import Refusal, Why
from pd_connector.pool.store.entry import Entry, entry_of
from pd_connector.pool.store.folder import charge_of

MEMORY_TIER, DISK_TIER = 0, 1
STALE_S = 60.0
"""A part that is whole waits this long for the others of its chunk."""
_LOOKED_AT = 64
"""Chunks that are looked at, from the one that was used longest ago, for one that may be evicted."""
_CANDIDATES = 8
"""Chains that are looked at for what is to be copied next: other processes may be copying the first ones."""
_CLIMBED = 256

_CHUNK = "SELECT used FROM chunks WHERE tier = ? AND key = ?"
_USAGE = "SELECT bytes FROM usage WHERE tier = ? AND tenant = ?"
_ENDS = "SELECT key, entry, bytes, tenant, copied FROM chunks WHERE tier = ? AND children = 0"


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
    """The process that writes it (`alive.py`)."""
    name: str
    """Of its file."""


class Evicted(NamedTuple):
    """A chunk whose files are to be removed."""

    tier: int
    key: bytes
    text: str
    """Of its entry."""

    @property
    def entry(self) -> Entry | None:
        return entry_of(self.text)


def now_s() -> float:
    """Seconds since the machine's start, the same in every process, whatever its clock says."""
    return time.monotonic()


def clock(books: sqlite3.Connection) -> int:
    """The next value of the clock of uses."""
    books.execute("UPDATE counters SET value = value + 1 WHERE name = 'clock'")
    return _one(books, "SELECT value FROM counters WHERE name = 'clock'")


def touch(books: sqlite3.Connection, keys: Iterable[bytes]) -> None:
    """These chunks were used now, together."""
    used = clock(books)
    rows = [(used, tier, key) for key in keys for tier in (MEMORY_TIER, DISK_TIER)]
    books.executemany("UPDATE chunks SET used = ? WHERE tier = ? AND key = ?", rows)


def reserve(books: sqlite3.Connection, part: Part) -> list[Evicted]:
    """Write down a part that is to be written; returns the chunks that make room for it.

    Raises:
        RefusedError: the transaction must be undone.
    """
    if books.execute(_CHUNK, (part.tier, part.key)).fetchone():
        raise RefusedError(Refusal(Why.EXISTS, "the chunk is there"))
    for writer, name, parts in books.execute(
        "SELECT writer, part, parts FROM files WHERE tier = ? AND key = ?", (part.tier, part.key)
    ):
        if (writer, parts) != (part.writer, part.parts) or name == part.part:
            text = f"part {name} of {parts} is being written by {writer!r}"
            raise RefusedError(Refusal(Why.BEING_WRITTEN, text))
    need = charge_of(part.nbytes)
    evicted = make_room(books, part.tier, need, part.tenant)
    books.execute(
        "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?)",
        (part.tier, part.name, part.key, part.part, part.parts, part.writer, part.tenant, need, part.nbytes, part.owner, now_s()),
    )  # fmt: skip
    write_leaving(books, evicted, part.owner)
    return evicted


def write_leaving(books: sqlite3.Connection, evicted: Iterable[Evicted], owner: str) -> None:
    """Write down chunks whose files are to be removed by a process."""
    rows = [(*chunk, owner, now_s()) for chunk in evicted]
    books.executemany("INSERT OR REPLACE INTO leaving VALUES (?, ?, ?, ?, ?)", rows)


def make_room(
    books: sqlite3.Connection,
    tier: int,
    need: int,
    tenant: str | None,
    *,
    full: bool = False,
    most: int = 1024,
) -> list[Evicted]:
    """Take chunks out of the books until a tier has `need` bytes within its budget.

    Args:
        tenant: for whom; None for nobody, to meet a smaller budget.
        full: the file system has no more room, whatever the budget.
        most: chunks that are taken at most.

    Raises:
        RefusedError: what may be evicted does not suffice. The transaction must be undone.
    """
    budget, used = books.execute(
        "SELECT budget, bytes FROM tiers WHERE tier = ?", (tier,)
    ).fetchone()
    if need > budget:
        raise RefusedError(Refusal(Why.FULL, f"{need} bytes are more than the tier's {budget}"))
    budget = min(budget, used) if full else budget
    if used + need <= budget:
        return []
    evicted: list[Evicted] = []
    books.execute("DELETE FROM pins WHERE until <= ?", (now_s(),))
    pinned = {key for (key,) in books.execute("SELECT key FROM pins")}
    while used + need > budget and len(evicted) < most:
        key, text, nbytes = _victim(books, tier, budget, tenant, pinned)
        books.execute("DELETE FROM chunks WHERE tier = ? AND key = ?", (tier, key))
        evicted.append(Evicted(tier, key, text))
        used -= nbytes
    return evicted


def _victim(
    books: sqlite3.Connection, tier: int, budget: int, tenant: str | None, pinned: set[bytes]
) -> tuple[bytes, str, int]:
    """The chunk that was used longest ago among those that nothing follows, that no pin keeps and no quota protects.

    Chunks that the disk has as well go before those that would be lost.
    """
    tenants = _one(books, "SELECT count(*) FROM usage WHERE tier = ?", tier)
    if tenant is not None and not books.execute(_USAGE, (tier, tenant)).fetchone():
        tenants += 1
    quota = budget // max(1, tenants)
    copies = tier == MEMORY_TIER and _one(books, "SELECT count(*) FROM tiers") > 1
    passed: set[bytes] = set()
    while True:
        oldest = books.execute(f"{_ENDS} ORDER BY used LIMIT {_LOOKED_AT}", (tier,)).fetchall()
        allowed = []
        for key, text, nbytes, whose, copied in oldest:
            if key in pinned:
                _use_now(books, tier, key)
            elif (
                whose == tenant
                or tenant is None
                or _one(books, _USAGE, tier, whose) - nbytes >= quota
            ):
                allowed.append((not copied if copies else False, key, text, nbytes))
        if allowed:
            _, key, text, nbytes = min(allowed, key=lambda chunk: chunk[0])
            return key, text, nbytes
        looked_at = {key for key, *_ in oldest}
        if not looked_at <= pinned:
            return _victim_of_largest(books, tier, quota, tenant, pinned)
        if looked_at <= passed:
            raise RefusedError(Refusal(Why.FULL, "every chunk is pinned, or being written"))
        passed |= looked_at


def _victim_of_largest(
    books: sqlite3.Connection, tier: int, quota: int, tenant: str | None, pinned: set[bytes]
) -> tuple[bytes, str, int]:
    """The oldest chunks are those of tenants within their quota. Others have more than theirs, or this one has."""
    largest, most = books.execute(
        "SELECT tenant, bytes FROM usage WHERE tier = ? ORDER BY bytes DESC LIMIT 1", (tier,)
    ).fetchone()
    for whose in (tenant, largest):
        for key, text, nbytes, _, _ in books.execute(
            f"{_ENDS} AND tenant = ? ORDER BY used LIMIT {_LOOKED_AT}", (tier, whose)
        ).fetchall():
            if key not in pinned and (whose == tenant or most - nbytes >= quota):
                return key, text, nbytes
    text = f"all room belongs to tenants within their quota of {quota} bytes"
    raise RefusedError(Refusal(Why.QUOTA, text))


def next_uncopied(books: sqlite3.Connection) -> list[bytes]:
    """Chunks that the disk lacks, in the order in which the memory evicts them: from the end of the chain that was used
    longest ago upwards, then the next chain."""
    found: dict[bytes, None] = {}
    ends = f"{_ENDS} ORDER BY used LIMIT {_CANDIDATES}"
    for key, *_ in books.execute(ends, (MEMORY_TIER,)).fetchall():
        for _ in range(_CLIMBED):
            row = books.execute(
                "SELECT parent, copied FROM chunks WHERE tier = ? AND key = ?", (MEMORY_TIER, key)
            ).fetchone()
            if row is None:
                break
            if not row[1]:
                found[key] = None
                break
            key = row[0]
    if found:
        return list(found)
    rest = "SELECT key FROM chunks WHERE tier = 0 AND copied = 0 ORDER BY used LIMIT ?"
    return [key for (key,) in books.execute(rest, (_CANDIDATES,))]


def _use_now(books: sqlite3.Connection, tier: int, key: bytes) -> None:
    """A pinned chunk is not looked at again until all others were."""
    books.execute(
        "UPDATE chunks SET used = ? WHERE tier = ? AND key = ?", (clock(books), tier, key)
    )


def complete(books: sqlite3.Connection, part: Part) -> Entry | str:
    """A part is whole; returns the entry of its chunk if that is whole now.

    Returns:
        Otherwise "waiting", if other parts are still missing, or "" if the books no longer know the part.
    """
    place = (part.tier, part.key)
    told = books.execute(
        "UPDATE files SET whole = 1, since = ?, writer = ? WHERE tier = ? AND name = ?",
        (now_s(), part.writer, part.tier, part.name),
    )
    if not told.rowcount or books.execute(_CHUNK, place).fetchone():
        return ""
    # Rows without a writer are those of parts that were found when the books were made anew.
    rows = books.execute(
        "SELECT part, name, size, bytes FROM files WHERE tier = ? AND key = ? AND whole = 1 "
        "AND writer IN (?, '') ORDER BY part",
        (*place, part.writer),
    ).fetchall()
    if len(rows) < part.parts:
        return "waiting"
    names, files, sizes, charges = zip(*rows, strict=True)
    stamps = tuple(file.rpartition(".")[2] for file in files)
    entry = Entry(part.parent, part.tenant, names, stamps, sizes)
    books.execute("DELETE FROM files WHERE tier = ? AND key = ?", (part.tier, part.key))
    insert(
        books,
        part.tier,
        part.key,
        entry,
        sum(charges),
        _used_elsewhere(books, part) or clock(books),
    )
    return entry


def _used_elsewhere(books: sqlite3.Connection, part: Part) -> int:
    """When the same chunk was used in the other tier; 0 if it is not there."""
    found = books.execute(_CHUNK, (1 - part.tier, part.key))
    return int((found.fetchone() or (0,))[0])


def insert(
    books: sqlite3.Connection, tier: int, key: bytes, entry: Entry, charge: int, used: int
) -> None:
    """Write down a whole chunk."""
    books.execute(
        "INSERT INTO chunks VALUES (?1, ?2, ?3, ?4, ?5, ?6, (SELECT count(*) FROM chunks WHERE tier = ?1 AND parent = ?2), "
        "?1 = 0 AND EXISTS (SELECT 1 FROM chunks WHERE tier = 1 AND key = ?2), ?7)",
        (tier, key, entry.parent, entry.tenant, charge, used, entry.text()),
    )


def removed(books: sqlite3.Connection, gone: Iterable[Part | Evicted]) -> None:
    """These files are removed."""
    for what in gone:
        if isinstance(what, Part):
            books.execute("DELETE FROM files WHERE tier = ? AND name = ?", (what.tier, what.name))
        else:
            for table in ("chunks", "leaving"):
                books.execute(f"DELETE FROM {table} WHERE tier = ? AND key = ? AND entry = ?", what)


def pin(
    books: sqlite3.Connection,
    rows: Iterable[tuple[bytes, int]],
    until: float,
    holder: str,
    named: bool,
) -> None:
    """Pin chunks, the first ones first. Pins that outlive their process hold half of the memory tier at most.

    Args:
        rows: a key, and the bytes that its pin keeps: those of the chunk, and of the chunks before it.
    """
    room = _one(books, "SELECT budget / 2 FROM tiers WHERE tier = 0")
    held = "SELECT coalesce(sum(bytes), 0) FROM pins WHERE named AND until > ?"
    room -= _one(books, held, now_s()) if named else 0
    for key, nbytes in rows:
        room -= nbytes if named else 0
        if room < 0:
            return
        books.execute(
            "INSERT INTO pins VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET until = max(until, excluded.until)",
            (key, holder, named, until, nbytes),
        )


def _one(books: sqlite3.Connection, query: str, *values: object) -> int:
    return int(books.execute(query, values).fetchone()[0])
