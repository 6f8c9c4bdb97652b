# SPDX-License-Identifier: Apache-2.0
"""Decides which chunks are evicted for which: reservations, pins, quotas. Each function runs within a transaction and
touches no file.

The least recently used chunk goes first, and a child before its parent, because no look-up finds a chunk without its
parent. A tenant's quota is the budget divided by the number of tenants with chunks in the tier. A tenant within its
quota takes room from tenants above theirs, not from itself. Otherwise its new chunks would replace its own old chunks,
and it would never reach its quota beside a tenant that uses its chunks more often.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pd_connector.pool.store.base import Refusal, Why
from pd_connector.pool.store.catalog_ops import (
    CHUNK,
    MEMORY_TIER,
    Evicted,
    Part,
    RefusedError,
    clock,
    now_s,
    number_in,
    write_leaving,
)
from pd_connector.pool.store.folder import charge_of

_LOOKED_AT = 64
"""Chunks that are looked at, from the one that was used longest ago, for one that may be evicted."""
_CANDIDATES = 8
"""Chains that are looked at for what is to be copied next: other processes may be copying the first ones."""
_CLIMBED = 256


_USAGE = "SELECT bytes FROM usage WHERE tier = ? AND tenant = ?"
_ENDS = "SELECT key, entry, bytes, tenant, copied FROM chunks WHERE tier = ? AND children = 0"


def reserve(catalog: sqlite3.Connection, part: Part) -> list[Evicted]:
    """Write down a part that is to be written; returns the chunks that make room for it.

    Raises:
        RefusedError: the transaction must be undone.
    """
    if catalog.execute(CHUNK, (part.tier, part.key)).fetchone():
        raise RefusedError(Refusal(Why.EXISTS, "the chunk is there"))
    for writer, name, parts in catalog.execute(
        "SELECT writer, part, parts FROM files WHERE tier = ? AND key = ?", (part.tier, part.key)
    ):
        if (writer, parts) != (part.writer, part.parts) or name == part.part:
            text = f"part {name} of {parts} is being written by {writer!r}"
            raise RefusedError(Refusal(Why.BEING_WRITTEN, text))
    need = charge_of(part.nbytes)
    evicted = make_room(catalog, part.tier, need, part.tenant)
    catalog.execute(
        "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?)",
        (part.tier, part.name, part.key, part.part, part.parts, part.writer, part.tenant, need, part.nbytes, part.owner, now_s()),
    )  # fmt: skip
    write_leaving(catalog, evicted, part.owner)
    return evicted


def make_room(
    catalog: sqlite3.Connection,
    tier: int,
    need: int,
    tenant: str | None,
    *,
    full: bool = False,
    most: int = 1024,
) -> list[Evicted]:
    """Take chunks out of the catalog until a tier has `need` bytes within its budget.

    Args:
        tenant: for this tenant; None for no tenant, to meet a smaller budget.
        full: the file system has no more room, whatever the budget.
        most: chunks that are taken at most.

    Raises:
        RefusedError: what may be evicted does not suffice. The transaction must be undone.
    """
    budget, used = catalog.execute(
        "SELECT budget, bytes FROM tiers WHERE tier = ?", (tier,)
    ).fetchone()
    if need > budget:
        raise RefusedError(Refusal(Why.FULL, f"{need} bytes are more than the tier's {budget}"))
    budget = min(budget, used) if full else budget
    if used + need <= budget:
        return []
    evicted: list[Evicted] = []
    catalog.execute("DELETE FROM pins WHERE until <= ?", (now_s(),))
    pinned = {key for (key,) in catalog.execute("SELECT key FROM pins")}
    while used + need > budget and len(evicted) < most:
        key, text, nbytes = _victim(catalog, tier, budget, tenant, need, pinned)
        catalog.execute("DELETE FROM chunks WHERE tier = ? AND key = ?", (tier, key))
        evicted.append(Evicted.of(tier, key, text))
        used -= nbytes
    return evicted


def _victim(
    catalog: sqlite3.Connection,
    tier: int,
    budget: int,
    tenant: str | None,
    need: int,
    pinned: set[bytes],
) -> tuple[bytes, str, int]:
    """The least recently used chunk among those without a child chunk, pin or protecting quota.

    Chunks that the disk has as well go before those that would be lost.
    """
    tenants = number_in(catalog, "SELECT count(*) FROM usage WHERE tier = ?", tier)
    own = catalog.execute(_USAGE, (tier, tenant)).fetchone()
    if tenant is not None and own is None:
        tenants += 1
    quota = budget // max(1, tenants)
    exceeds = (own[0] if own else 0) + need > quota
    copies = tier == MEMORY_TIER and number_in(catalog, "SELECT count(*) FROM tiers") > 1
    passed: set[bytes] = set()
    while True:
        oldest = catalog.execute(f"{_ENDS} ORDER BY used LIMIT {_LOOKED_AT}", (tier,)).fetchall()
        allowed = []
        for key, text, nbytes, whose, copied in oldest:
            if key in pinned:
                _use_now(catalog, tier, key)
            elif tenant is None or (
                exceeds
                if whose == tenant
                else number_in(catalog, _USAGE, tier, whose) - nbytes >= quota
            ):
                allowed.append((not copied if copies else False, key, text, nbytes))
        if allowed:
            _, key, text, nbytes = min(allowed, key=lambda chunk: chunk[0])
            return key, text, nbytes
        looked_at = {key for key, *_ in oldest}
        if not looked_at <= pinned:
            return _victim_of_largest(catalog, tier, quota, tenant, exceeds)
        if looked_at <= passed:
            raise RefusedError(Refusal(Why.FULL, "every chunk is pinned, or being written"))
        passed |= looked_at


def _victim_of_largest(
    catalog: sqlite3.Connection, tier: int, quota: int, tenant: str | None, exceeds: bool
) -> tuple[bytes, str, int]:
    """A victim for the case that the oldest chunks belong to tenants within their quota. It is taken from the tenants
    above their quota, the largest first; if `tenant` itself `exceeds` its quota, from `tenant` before them."""
    above = "SELECT tenant, bytes FROM usage WHERE tier = ? AND bytes > ? ORDER BY bytes DESC"
    others = [row for row in catalog.execute(above, (tier, quota)) if row[0] != tenant]
    own = (tenant, 0)
    for whose, most in [own, *others] if exceeds else [*others, own]:
        for key, text, nbytes, _, _ in catalog.execute(
            f"{_ENDS} AND tenant = ? AND key NOT IN (SELECT key FROM pins) ORDER BY used LIMIT 1",
            (tier, whose),
        ):
            if whose == tenant or most - nbytes >= quota:
                return key, text, nbytes
    text = f"all room belongs to tenants within their quota of {quota} bytes"
    raise RefusedError(Refusal(Why.QUOTA, text))


def next_uncopied(catalog: sqlite3.Connection) -> list[bytes]:
    """Chunks that the disk lacks, in the order in which the memory evicts them: from the end of the chain that was used
    longest ago upwards, then the next chain."""
    uncopied: dict[bytes, None] = {}
    ends = f"{_ENDS} ORDER BY used LIMIT {_CANDIDATES}"
    for key, *_ in catalog.execute(ends, (MEMORY_TIER,)).fetchall():
        for _ in range(_CLIMBED):
            row = catalog.execute(
                "SELECT parent, copied FROM chunks WHERE tier = ? AND key = ?", (MEMORY_TIER, key)
            ).fetchone()
            if row is None:
                break
            if not row[1]:
                uncopied[key] = None
                break
            key = row[0]
    rest = "SELECT key FROM chunks WHERE tier = 0 AND copied = 0 ORDER BY used LIMIT ?"
    keys = uncopied or [key for (key,) in catalog.execute(rest, (_CANDIDATES,))]
    return [bytes(memoryview(key)) for key in keys]


def _use_now(catalog: sqlite3.Connection, tier: int, key: bytes) -> None:
    """A pinned chunk is not looked at again until all others were."""
    catalog.execute(
        "UPDATE chunks SET used = ? WHERE tier = ? AND key = ?", (clock(catalog), tier, key)
    )


class Kept(NamedTuple):
    """The chunks that one pin keeps: a chunk and its ancestors in its tier, because a chunk with a child is not
    evicted."""

    keys: list[bytes]
    """The chunk that is pinned is the last one."""
    nbytes: int


def pin(
    catalog: sqlite3.Connection, rows: Iterable[Kept], until: float, holder: str, tenants: int
) -> None:
    """Pin chunks, the first ones first.

    Args:
        tenants: how many share the memory tier; 0 for pins of a load, which end with their process. Pins of a tenant hold
            half of its part at most, and all together half of the tier.
    """
    catalog.execute("DELETE FROM pins WHERE until <= ?", (now_s(),))
    for keys, nbytes in _within_half(catalog, rows, until, holder, tenants) if tenants else rows:
        catalog.execute(
            "INSERT INTO pins VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET until = max(until, excluded.until)",
            (keys[-1], holder, bool(tenants), until, nbytes),
        )


def _within_half(
    catalog: sqlite3.Connection, rows: Iterable[Kept], until: float, holder: str, tenants: int
) -> Iterator[Kept]:
    """The first rows that a tenant can pin within its limit. Its earlier pins of the chunks before them are dropped:
    otherwise each turn of a conversation would count the whole prompt again. The sums are computed once, because other
    processes wait for the catalog."""
    half = number_in(catalog, "SELECT budget / 2 FROM tiers WHERE tier = 0")
    held = number_in(catalog, "SELECT coalesce(sum(bytes), 0) FROM pins WHERE named")
    mine = {
        key: (nbytes, ends)
        for key, nbytes, ends in catalog.execute(
            "SELECT key, bytes, until FROM pins WHERE named AND holder = ?", (holder,)
        )
    }
    own = sum(nbytes for nbytes, _ in mine.values())
    for row in rows:
        before = [key for key in row.keys[:-1] if key in mine and mine[key][1] <= until]
        kept, _ = mine.get(row.keys[-1], (0, until))  # a pin that is there keeps its bytes
        more = (0 if kept else row.nbytes) - sum(mine[key][0] for key in before)
        if more > 0 and (held + more > half or own + more > half // tenants):
            return
        yield row
        gone = [(key, holder) for key in before]
        catalog.executemany("DELETE FROM pins WHERE key = ? AND holder = ?", gone)
        held, own = held + more, own + more
