# SPDX-License-Identifier: Apache-2.0
"""One `/metrics` for all workers of a router. Each worker writes its metrics to a file every second, and reads the
others' files when it is asked.

When a worker has ended, the supervisor renames its file (`note_end`). Its successor goes on with the counters in it,
because a counter must not fall.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.peer_routers.worker_place import WorkerPlace
from scheduler_plugins.router.recent_history import Beat

logger = logging.getLogger(__name__)

EVERY_S = 1.0
LARGEST = (
    "pd_router:engine_up",
    "pd_router:engines_wanted",
    "pd_router:fellows",
    "pd_router:kv_event_lag_seconds",
    "pd_router:kv_events_connected",
    "pd_router:prefill_addressable",
    "pd_router:promise_margin",
)
"""Metrics that each worker finds out by itself. The largest number is shown, and not the sum."""

_Key = tuple[str, tuple[tuple[str, str], ...]]


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A number of a metric."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A metric with its numbers."""

    name: str
    documentation: str
    kind: str
    samples: tuple[Sample, ...]


class _Written(msgspec.Struct, frozen=True, array_like=True):
    """What a worker leaves for the others, and for its successor."""

    families: tuple[Family, ...]
    beats: tuple[Beat, ...]


class AllMetrics:
    """The metrics of all workers of a router, as one of them shows them."""

    def __init__(self, metrics: Metrics, place: WorkerPlace) -> None:
        """Go on where this worker's predecessor ended."""
        self._metrics = metrics
        self._path, self._folder = _path(place.folder, place.number), place.folder
        self._others = [n for n in range(place.workers) if n != place.number]
        self._before: tuple[Family, ...] = ()
        if (left := _read(_ended(place.folder, place.number))) is not None:
            self._before = _counters(left.families)
            metrics.pulse.use(left.beats)
        metrics.worker_restarts.inc(place.again)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write the file every second inside the block, and at its end."""
        self._metrics.workers.set(1)
        self._write(self._families())
        task = asyncio.create_task(self._keep_writing(), name="write metrics for other workers")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._write(self._families())

    async def _keep_writing(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            self._write(self._families())

    def render(self) -> bytes:
        """The metrics of all workers in Prometheus' text format. This worker's metrics are also written to its file at
        once, so that another worker never shows a lower counter later."""
        own = self._families()
        self._write(own)
        parts = [own]
        for number in self._others:
            if (written := _read(_path(self._folder, number))) is not None:
                parts.append(written.families)
            elif (written := _read(_ended(self._folder, number))) is not None:
                parts.append(_counters(written.families))
        return generate_latest(_Merged(merged(parts)))

    def _families(self) -> tuple[Family, ...]:
        return merged([self._before, families_of(self._metrics.registry)])

    def _write(self, families: tuple[Family, ...]) -> None:
        written = _Written(families, self._metrics.pulse.beats(time.monotonic()))
        fresh = self._path.with_suffix(".new")
        try:
            fresh.write_bytes(msgspec.msgpack.encode(written))
            fresh.replace(self._path)
        except OSError as error:
            logger.warning("%s: other workers do not see these metrics: %s", self._path, error)


def note_end(folder: Path, number: int) -> None:
    """A worker has ended: keep only the counters of its file."""
    with suppress(FileNotFoundError):
        _path(folder, number).replace(_ended(folder, number))


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number}.metrics"


def _ended(folder: Path, number: int) -> Path:
    return folder / f"{number}.ended"


def _read(path: Path) -> _Written | None:
    """What a worker has written; None: nothing yet."""
    try:
        return _DECODER.decode(path.read_bytes())
    except FileNotFoundError:
        return None


def families_of(registry: CollectorRegistry) -> tuple[Family, ...]:
    """The metrics of this process."""
    return tuple(
        Family(
            family.name,
            family.documentation,
            family.type,
            tuple(Sample(s.name, dict(s.labels), s.value) for s in family.samples),
        )
        for family in registry.collect()
    )


def merged(parts: Iterable[Sequence[Family]]) -> tuple[Family, ...]:
    """The metrics of several processes as one."""
    families_by_name: dict[str, Family] = {}
    sums: dict[str, dict[_Key, float]] = {}
    for families in parts:
        for family in families:
            families_by_name.setdefault(family.name, family)
            values = sums.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                if sample.name.endswith("_created"):
                    values[key] = min(values.get(key, sample.value), sample.value)
                elif family.name in LARGEST:
                    values[key] = max(values.get(key, sample.value), sample.value)
                else:
                    values[key] = values.get(key, 0.0) + sample.value
    return tuple(
        Family(
            name,
            family.documentation,
            family.kind,
            tuple(
                Sample(sample, dict(labels), value)
                for (sample, labels), value in sums[name].items()
            ),
        )
        for name, family in families_by_name.items()
    )


def _counters(families: Sequence[Family]) -> tuple[Family, ...]:
    """The counters of a process that has ended."""
    return tuple(family for family in families if family.kind in ("counter", "histogram"))


class _Merged(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric


_DECODER = msgspec.msgpack.Decoder(_Written)
