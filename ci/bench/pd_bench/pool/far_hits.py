# SPDX-License-Identifier: Apache-2.0
"""How much of a trace's prompts four hosts find in their far store, beside one exact LRU of its size."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pd_bench.netns import Bed
from pd_bench.pool.far import HITS, Host, Server
from pd_bench.pool.folders import own_folder
from pd_bench.pool.trace import Prompt, exact, missing, read_prompts
from pd_bench.report import BenchError, Compared, Comparison, Say
from pd_bench.sample import single
from pd_bench.serve import hosts as serve_hosts
from pd_bench.serve.hosts import MOONCAKE, REDIS, key_file, need_namespaces, need_store
from pd_connector.errors import PoolError
from pd_connector.pool.carrier.object import Packed
from pd_connector.pool.far.seal import Seal, read_keys
from pd_connector.pool.store.base import FAR, Refusal
from pd_connector.pool.store.folder import charge_of
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space
from pd_connector.tools.launch.service import log_folder

HOSTS = 4
REQUESTS, LASTS_S = 1500, 150.0
"""Requests of the trace that are played, and how long they take."""
SHARE = 0.3
"""Room of the far store, as a share of all blocks of these requests."""
ALLOWED_POINTS = {MOONCAKE: 2.0, REDIS: 5.0}
"""How far the hit rate may lie below that of an exact LRU, in percent of all blocks: Redis samples what it evicts."""
OWN_BLOCKS = 256
"""Room of a host's own pool: for a few prompts until they are put. It answers few look-ups itself."""
_BLOCK_BYTES = 16 << 10
_WEIGHED = 256
_WAITS_S = 60.0


class _Playing(NamedTuple):
    """A far store with limited room, and hosts that reach it."""

    hosts: list[Host]
    evicted: Callable[[], float]
    """Objects that the store has evicted so far."""


def measure(row: str, trace: Path, say: Say) -> Compared:
    """Requests in turn by four hosts. Each looks its blocks up, brings what the far store has, and saves the rest.

    Args:
        row: one of `HITS`.

    Raises:
        BenchError: this machine cannot run it, the file is not a trace, or the carriers do not keep up.
    """
    kind = HITS[row]
    prompts = read_prompts(trace)[:REQUESTS]
    room = int(SHARE * len({block for prompt in prompts for block in prompt}))
    with {MOONCAKE: _mooncake, REDIS: _redis}[kind](room) as (hosts, evicted):
        began_s = time.monotonic()
        cached = brought = 0
        for number, prompt in enumerate(prompts):
            time.sleep(max(0.0, began_s + number * LASTS_S / len(prompts) - time.monotonic()))
            hits, came = _played(hosts[number % len(hosts)], prompt)
            cached, brought = cached + hits, brought + came
        lasted_s, gone = time.monotonic() - began_s, int(evicted())
        counts: Counter[str] = Counter()
        for host in hosts:
            if status := host.store.carrier.status():
                counts.update(status.counts)
    total = sum(map(len, prompts))
    ours, best = 100 * cached / total, exact(prompts, room)
    say(
        f"{kind}: {len(prompts):,} requests of {total:,} blocks in {lasted_s:.0f} s: {ours:.2f} % found, an exact LRU of {room:,} "
        f"blocks {best:.2f} %; {brought:,} brought, {gone:,} evicted by the store; carriers: {dict(sorted(counts.items()))}"
    )
    if not gone:
        raise BenchError(f"{kind} has evicted nothing: its room was not what decided")
    params: dict[str, str | int | float] = {
        "store": kind,
        "hosts": len(hosts),
        "room": f"{SHARE:.0%}",
    }
    bar = (best - ALLOWED_POINTS[kind]) / best
    figure = Comparison(
        "hit rate", params, single(ours), single(best), "%", bar, more_is_better=True
    )
    return "exact LRU", [figure]


def _start(
    count: int,
    folder: Path,
    opened: contextlib.ExitStack,
    address: str,
    key: Path,
    prefix: Sequence[str] = (),
) -> list[Host]:
    hosts = []
    budget = OWN_BLOCKS * charge_of(_BLOCK_BYTES)
    for _ in range(count):
        hosts.append(Host(folder / secrets.token_hex(4), address, key, budget, prefix))
        opened.callback(hosts[-1].close)
    return hosts


@contextlib.contextmanager
def _redis(room: int) -> Iterator[_Playing]:
    with own_folder() as folder, contextlib.ExitStack() as opened:
        server = Server(folder)
        opened.callback(server.close)
        hosts = _start(HOSTS, folder, opened, server.address, key_file(folder))
        _limit(server, hosts[0], room)
        yield _Playing(hosts, lambda: server.client.info("stats")["evicted_keys"])


@contextlib.contextmanager
def _mooncake(room: int) -> Iterator[_Playing]:
    """With a master as it is shipped, and one node that lends as many bytes as this many blocks have."""
    need_store(MOONCAKE)
    need_namespaces("--far hits-mooncake")
    with own_folder() as folder, contextlib.ExitStack() as opened:
        sides = opened.enter_context(Bed()).namespaces  # its clients listen on all addresses
        key = key_file(folder)
        lent = room * _object_bytes(folder / "one", Seal(read_keys(key)))
        server = serve_hosts.Server(MOONCAKE, sides, log_folder(), lends=sides[:1], lent=lent)
        opened.callback(server.kill)
        server.start()
        yield _Playing(
            _start(HOSTS, folder, opened, server.address(sides[0]), key, sides[0].prefix),
            lambda: server.metric("master_evicted_key_count"),
        )


def _object_bytes(folder: Path, seal: Seal) -> int:
    """Bytes of a block in Mooncake: those of its object."""
    with contextlib.closing(LocalStore(Space(folder, 1 << 20))) as store:
        parent, key = (b"%032d" % block for block in range(2))
        _save(store, key, parent)
        packed = Packed(store, next(store.chunks([key])))
        packed.close()
        return seal.sealed_bytes(packed.nbytes)


def _limit(server: Server, host: Host, room: int) -> None:
    """Let Redis keep this many blocks and evict the others, least recently used first. A few are weighed for that."""
    empty = int(server.client.info("memory")["used_memory"])
    before = host.put()
    keys = [b"w%031d" % number for number in range(_WEIGHED)]
    for key in keys:
        _save(host.own, key, b"")
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
        _save(host.own, key, parent)
    return hits, came


def _save(store: LocalStore, key: bytes, parent: bytes) -> None:
    writing = store.begin(key, parent=parent, part="0", parts=1, nbytes=_BLOCK_BYTES)
    if isinstance(writing, Refusal):
        return
    with writing:
        writing.write(0, memoryview(key.ljust(_BLOCK_BYTES, b".")))
        writing.publish()
