# SPDX-License-Identifier: Apache-2.0
"""KV by pair of engines, as decode engines count it, for the live page."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.traffic import FromProducer

MOST_SHOWN = 32
"""Most rows: the busiest pairs. A page with all pairs of a large deployment would say less."""


def pairs(engines: Iterable[BackendEngine]) -> list[dict[str, Any]]:
    """A row for each pair that has moved KV, the busiest first. Rates are of now, shares since the decode engine's
    start. A prefill engine that is not known here goes by the address that the decode engine knows."""
    listed = list(engines)
    urls = {
        peer.source.label: engine.url
        for engine in listed
        for address in engine.addresses
        for peer in address.peers
    }
    by_pair: dict[tuple[str, str], list[FromProducer]] = defaultdict(list)
    for engine in listed:
        for producer, got in engine.traffic.producers.items():
            by_pair[urls.get(producer, producer), engine.url].append(got)
    rows = [row_of(prefill, decode, parts) for (prefill, decode), parts in by_pair.items()]
    rows.sort(key=lambda row: (-row["bytes_s"], -row["transfers"], row["prefill"], row["decode"]))
    return rows[:MOST_SHOWN]


def row_of(prefill: str, decode: str, parts: list[FromProducer]) -> dict[str, Any]:
    """The sums over a prefill engine's ranks."""
    codecs: dict[str, float] = defaultdict(float)
    for part in parts:
        for codec, nbytes in part.codecs.items():
            codecs[codec] += nbytes

    def total(name: str) -> float:
        return float(sum(getattr(part, name) for part in parts))

    return {
        "prefill": prefill,
        "decode": decode,
        "bytes_s": round(total("bytes_s")),
        "codecs": dict(codecs),
        "chunks": total("chunks"),
        "early_chunks": total("early_chunks"),
        "transfers": total("transfers"),
        "failed": total("failed"),
    }
