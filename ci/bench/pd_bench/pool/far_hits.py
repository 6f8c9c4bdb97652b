# SPDX-License-Identifier: Apache-2.0
"""How much of a trace's prompts four hosts find in their far store, beside one exact LRU of its size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pd_bench.pool.far import Host, Server
from pd_bench.pool.trace import Prompt, exact, missing, read_prompts
from pd_bench.report import BenchError, Comparison
from pd_bench.sample import single
from pd_connector.errors import PoolError
from pd_connector.pool.store.base import FAR, Refusal
from pd_connector.pool.store.folder import charge_of

HOSTS = 4
REQUESTS, LASTS_S = 1500, 150.0
"""Requests of the trace that are played, and how long they take."""
SHARE = 0.3
"""Room of the far store, as a share of all blocks of these requests."""
ALLOWED_POINTS = 5.0
"""How far the hit rate may lie below that of an exact LRU, in percent of all blocks: Redis samples what it evicts."""
OWN_BLOCKS = 256
"""Room of a host's own pool: for a few prompts until they are put. It answers few look-ups itself."""
_BLOCK_BYTES = 16 << 10
_WEIGHED = 256
_WAITS_S = 60.0


def own_bytes() -> int:
    """Budget of a host's pool."""
    return OWN_BLOCKS * charge_of(_BLOCK_BYTES)


def measure(path: Path, server: Server, hosts: Sequence[Host], say: Any) -> Comparison:
    """Requests in turn by four hosts. Each looks its blocks up, brings what the far store has, and saves the rest.

    Raises:
        BenchError: the file is not a trace, or the carriers do not keep up.
    """
    prompts = read_prompts(path)[:REQUESTS]
    blocks = len({block for prompt in prompts for block in prompt})
    room = int(SHARE * blocks)
    _limit(server, hosts[0], room)
    began_s = time.monotonic()
    cached = brought = 0
    for number, prompt in enumerate(prompts):
        time.sleep(max(0.0, began_s + number * LASTS_S / len(prompts) - time.monotonic()))
        hits, came = _played(hosts[number % len(hosts)], prompt)
        cached, brought = cached + hits, brought + came
    total = sum(map(len, prompts))
    ours, best = 100 * cached / total, exact(prompts, room)
    evicted = int(server.client.info("stats")["evicted_keys"])
    say(
        f"{len(prompts):,} requests of {total:,} blocks in {time.monotonic() - began_s:.0f} s: {ours:.2f} % found, an exact LRU "
        f"of {room:,} blocks {best:.2f} %; {brought:,} brought, {evicted:,} evicted by Redis"
    )
    if not evicted:
        raise BenchError("Redis has evicted nothing: its room was not what decided")
    params: dict[str, str | int | float] = {"hosts": len(hosts), "room": f"{SHARE:.0%}"}
    bar = (best - ALLOWED_POINTS) / best
    return Comparison("hit rate", params, single(ours), single(best), "%", bar, more_is_better=True)


def _limit(server: Server, host: Host, room: int) -> None:
    """Let Redis keep this many blocks and evict the others, least recently used first. A few are weighed for that."""
    empty = int(server.client.info("memory")["used_memory"])
    before = host.put()
    keys = [b"w%031d" % number for number in range(_WEIGHED)]
    for key in keys:
        _save(host, key, b"")
        _wait_for(host, before)
        before += 1
    weight = (int(server.client.info("memory")["used_memory"]) - empty) / _WEIGHED
    server.client.flushall()
    server.client.config_set("maxmemory-policy", "allkeys-lru")
    server.client.config_set("maxmemory", empty + int(room * weight))
    host.own.remove(keys)


def _wait_for(host: Host, before: int) -> None:
    ends_s = time.monotonic() + _WAITS_S
    while host.put() <= before:
        if time.monotonic() > ends_s:
            raise BenchError("a chunk was not put within a minute")
        time.sleep(0.002)


def _played(host: Host, prompt: Prompt) -> tuple[int, int]:
    """Play one request. Returns the blocks that were found in a row, and how many of them came from the far store."""
    keys = [b"%032d" % block for block in prompt]
    hits = came = 0
    for key, place in zip(keys, host.store.find(keys), strict=True):
        if place is None:
            break
        if place.tier == FAR:
            try:
                if host.store.bring(key) is None:
                    break
            except PoolError:
                break
            came += 1
        hits += 1
    for parent, key in missing(keys, hits):
        _save(host, key, parent)
    return hits, came


def _save(host: Host, key: bytes, parent: bytes) -> None:
    writing = host.own.begin(key, parent=parent, part="0", parts=1, nbytes=_BLOCK_BYTES)
    if isinstance(writing, Refusal):
        return
    with writing:
        writing.write(0, memoryview(key.ljust(_BLOCK_BYTES, b".")))
        writing.publish()
