# SPDX-License-Identifier: Apache-2.0
"""One `/metrics` for all processes of a router."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from scheduler_plugins.router.workers.messages import Family, Sample

LAST_WORD = ("pd_router:engine_up", "pd_router:prefill_addressable")
"""Metrics that describe the same thing in all processes. The keeper's numbers, which come last, are taken and not
summed."""
LARGEST = ("pd_router:promise_margin",)
"""Metrics that each process learns by itself. The largest number is shown."""

_Key = tuple[str, tuple[tuple[str, str], ...]]


def families_of(registry: CollectorRegistry) -> tuple[Family, ...]:
    """A process's metrics, as a message."""
    return tuple(
        Family(
            one.name,
            one.documentation,
            one.type,
            tuple(Sample(s.name, dict(s.labels), s.value) for s in one.samples),
        )
        for one in registry.collect()
    )


def merged(parts: Iterable[Sequence[Family]]) -> bytes:
    """The merged metrics of several processes, in Prometheus' text format. The keeper's part must be the last."""
    known: dict[str, Family] = {}
    sums: dict[str, dict[_Key, float]] = {}
    for families in parts:
        for family in families:
            known[family.name] = family
            found = sums.setdefault(family.name, {})
            if family.name in LAST_WORD:
                found.clear()
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                if sample.name.endswith("_created"):
                    found[key] = min(found.get(key, sample.value), sample.value)
                elif family.name in LARGEST:
                    found[key] = max(found.get(key, sample.value), sample.value)
                else:
                    found[key] = found.get(key, 0.0) + sample.value
    return generate_latest(_Merged(known, sums))


class _Merged(Collector):
    def __init__(self, known: dict[str, Family], sums: dict[str, dict[_Key, float]]) -> None:
        self._known = known
        self._sums = sums

    def collect(self) -> Iterator[Metric]:
        for name, family in self._known.items():
            metric = Metric(name, family.documentation, family.kind)
            for (sample, labels), value in self._sums[name].items():
                metric.add_sample(sample, dict(labels), value)
            yield metric


def counters_only(families: Sequence[Family]) -> tuple[Family, ...]:
    """The counters of a process that has ended. They are kept because a counter must not fall."""
    return tuple(one for one in families if one.kind in ("counter", "histogram"))


def added(first: Sequence[Family], second: Sequence[Family]) -> tuple[Family, ...]:
    """The summed counters of two processes that have ended."""
    sums: dict[str, dict[_Key, Sample]] = {}
    known: dict[str, Family] = {}
    for family in (*first, *second):
        known.setdefault(family.name, family)
        found = sums.setdefault(family.name, {})
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            before = found[key].value if key in found else 0.0
            found[key] = Sample(sample.name, sample.labels, before + sample.value)
    return tuple(
        Family(name, one.documentation, one.kind, tuple(sums[name].values()))
        for name, one in known.items()
    )
