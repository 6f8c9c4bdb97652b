# SPDX-License-Identifier: Apache-2.0
"""An engine's KV traffic, by its metrics: KV that it sent, received and kept between two reads of `/metrics`.

| name | what it is |
|---|---|
| `Reading` | the totals of one read |
| `FromProducer` | what a decode engine got from one rank of a prefill engine |
| `Traffic` | one engine's rates and states, for the live page |
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from pd_connector.errors import Cause
from pd_connector.remedies import FAILING_GAUGE, samples_in
from scheduler_plugins.router.recent_history import Moved

_WANTED = (
    b"pd_connector:",
    b"vllm:kv_cache_usage_perc",
    b"vllm:cache_config_info",
    b"sglang:token_usage",
)
_MOST_NAMES = 64
"""Most codecs and ranks of an engine. There are fewer, unless the engine is broken."""
_MOST_PRODUCERS = 256
"""Most ranks of prefill engines that are read of a decode engine, which names fewer unless it is broken."""
_OF_POOL = ("pool_hits", "pool_saves", "pool_misses")
_SESSIONS = "sessions/"
_UNSAVED = ("full", "quota", "unwell", "failed")
"""Causes of `pool_saves` that an operator can do something about."""
_USED = re.compile(
    r"^(?:vllm:kv_cache_usage_perc|sglang:token_usage)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE
)
_PAGES = re.compile(r'^vllm:cache_config_info\{[^}]*\bnum_gpu_blocks="(\d{1,12})"', re.MULTILINE)


class FromProducer(NamedTuple):
    """KV that a decode engine got from one rank of a prefill engine since its start."""

    nbytes: float = 0.0
    chunks: float = 0.0
    early_chunks: float = 0.0  # those that came while their prompt was computed
    transfers: float = 0.0  # that have ended, without those that were aborted
    failed: float = 0.0  # those of them that did not arrive
    codecs: Mapping[str, float] = {}  # bytes by codec
    bytes_s: float = 0.0  # mean since the look before


class Reading(NamedTuple):
    """The totals of one look, summed over an engine's ranks."""

    at_s: float  # on the event loop's clock
    totals: Mapping[str, float]
    """Counters and gauges by name; counters of `pool_saves` by cause, of `asked_transfers` by codec and of `sessions` by transport, as `name/label`."""
    cache_used: float | None  # share of its pages in use, of the fullest rank; None: not reported
    pages: int  # 0: not reported
    producers: Mapping[str, FromProducer] = {}  # by host and control port


class Traffic(NamedTuple):
    """One engine's KV traffic at the last read. Rates are means since the previous read."""

    sent_bytes_s: float = 0.0
    received_bytes_s: float = 0.0
    pool_bytes_s: float = 0.0  # loaded from the KV pool
    cache_used: float | None = None  # share of its pages in use; None: not reported
    pages: int = 0  # 0: not reported
    leased_pages: float = 0.0  # kept for consumers
    distrusted: float = 0.0  # producers that an audit found wrong
    failing: float = 0.0  # ranks without KV for a minute
    unsaved: str = ""  # why the pool did not take chunks since the look before; empty: it did
    pool_stalls: float = (
        0.0  # look-ups and loads that the pool did not answer since the look before
    )
    uses_pool: bool = False  # whether it has asked a pool, or saved into one, since its start
    transports: tuple[str, ...] = ()  # of the sessions that it hands KV over in, most first
    producers: Mapping[
        str, FromProducer
    ] = {}  # by host and control port of a prefill engine's rank


def kv_lines(raw: bytes) -> str:
    """The few lines of an engine's `/metrics` about KV. vLLM has thousands of other lines, which would be slow to
    parse."""
    return b"\n".join(line for line in raw.split(b"\n") if line.startswith(_WANTED)).decode(
        "utf-8", "replace"
    )


def read(metrics: str, now_s: float) -> Reading:
    """Read the answer of an engine's `/metrics`."""
    totals = defaultdict[str, float](float)
    producers: dict[str, FromProducer] = {}
    for name, labels, value in samples_in(metrics):
        if producer := labels.get("producer"):
            if producer in producers or len(producers) < _MOST_PRODUCERS:
                totals_before = producers.get(producer, FromProducer())
                producers[producer] = _with(totals_before, name, labels, value)
            continue
        totals[name] += value
        if label := labels.get("cause") or labels.get("codec") or labels.get("transport"):
            totals[f"{name}/{label}"] += value
    used = [min(1.0, max(0.0, float(value))) for value in _USED.findall(metrics)]
    pages = sum(int(count) for count in _PAGES.findall(metrics)[:_MOST_NAMES])
    return Reading(now_s, totals, max(used, default=None), pages, producers)


def _with(
    producer: FromProducer, name: str, labels: Mapping[str, str], value: float
) -> FromProducer:
    """The record of a producer, updated by one sample of the decode engine."""
    match name:
        case "pair_bytes":
            codec = labels.get("codec", "")
            if len(producer.codecs) >= _MOST_NAMES and codec not in producer.codecs:
                return producer
            codecs = {**producer.codecs, codec: producer.codecs.get(codec, 0.0) + value}
            return producer._replace(nbytes=producer.nbytes + value, codecs=codecs)
        case "pair_chunks":
            early = value if labels.get("prompt") == "computing" else 0.0
            return producer._replace(
                chunks=producer.chunks + value, early_chunks=producer.early_chunks + early
            )
        case "pair_transfers" if labels.get("result") != Cause.ABORTED:
            failed = 0.0 if labels.get("result") == "received" else value
            return producer._replace(
                transfers=producer.transfers + value, failed=producer.failed + failed
            )
    return producer


def between(before: Reading | None, now: Reading) -> tuple[Traffic, Moved]:
    """The traffic since the previous read; empty if `now` is the first read of the engine."""
    earlier = before or now
    seconds = now.at_s - earlier.at_s
    # A lower total: the engine has restarted, and counts from zero.
    new = defaultdict[str, float](float)
    for name, total in now.totals.items():
        total_before = earlier.totals.get(name, 0.0)
        new[name] = total - total_before if total >= total_before else total

    def rate(name: str) -> float:
        return new[name] / seconds if seconds > 0 else 0.0

    producers = {
        name: producer._replace(bytes_s=_grown(earlier.producers.get(name), producer) / seconds)
        for name, producer in now.producers.items()
        if seconds > 0
    }
    traffic = Traffic(
        sent_bytes_s=rate("sent_bytes"),
        received_bytes_s=rate("received_bytes"),
        pool_bytes_s=rate("pool_loaded_bytes"),
        cache_used=now.cache_used,
        pages=now.pages,
        leased_pages=now.totals.get("leased_pages", 0.0),
        distrusted=now.totals.get("distrusted_producers", 0.0),
        failing=now.totals.get(FAILING_GAUGE, 0.0),
        unsaved=next((cause for cause in _UNSAVED if new[f"pool_saves/{cause}"] > 0), ""),
        pool_stalls=new["pool_misses/late"] + new["pool_misses/stalled"],
        uses_pool=any(now.totals.get(name, 0.0) > 0 for name in _OF_POOL),
        transports=_transports(now.totals),
        producers=producers or dict(now.producers),
    )
    codec_counters = [name for name in new if name.startswith("asked_transfers/") and new[name] > 0]
    codecs = {name.partition("/")[2]: new[name] for name in codec_counters[:_MOST_NAMES]}
    moved = Moved(
        seconds,
        new["received_bytes"],
        new["sent_chunks"],
        new["early_chunks"],
        new["pool_hits"],
        codecs,
    )
    return traffic, moved


def _transports(totals: Mapping[str, float]) -> tuple[str, ...]:
    """The transports of an engine's sessions, those with the most sessions first."""
    counts = {name: count for name, count in totals.items() if name.startswith(_SESSIONS)}
    most = sorted((name for name in counts if counts[name] > 0), key=lambda name: -counts[name])
    return tuple(name.removeprefix(_SESSIONS) for name in most[:_MOST_NAMES])


def _grown(before: FromProducer | None, now: FromProducer) -> float:
    """Bytes since the previous read. If the total has fallen, the decode engine has restarted, and the new total
    counts."""
    bytes_before = before.nbytes if before else 0.0
    return now.nbytes - bytes_before if now.nbytes >= bytes_before else now.nbytes
