# SPDX-License-Identifier: Apache-2.0
"""Counts, observations and gauges of one rank, on their way from the agent's thread to the engine's metrics."""

import threading
from collections import defaultdict
from typing import NamedTuple

Labels = tuple[tuple[str, str], ...]


class Snapshot(NamedTuple):
    """Counts and observations since the last snapshot; gauges as they are now."""

    counts: dict[tuple[str, Labels], float]
    observations: dict[str, list[float]]
    gauges: dict[str, float]


class Telemetry:
    """Counts, observations and gauges. One thread writes them, another thread takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, Labels], float] = defaultdict(float)
        self._observations: dict[str, list[float]] = defaultdict(list)
        self._gauges: dict[str, float] = {}
        self._changed = False

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        with self._lock:
            self._counts[name, tuple(sorted(labels.items()))] += amount

    def observe(self, name: str, value: float) -> None:
        with self._lock:
            self._observations[name].append(value)

    def gauge(self, **values: float) -> None:
        with self._lock:
            self._changed |= any(self._gauges.get(name) != v for name, v in values.items())
            self._gauges.update(values)

    def gauges(self) -> dict[str, float]:
        with self._lock:
            return dict(self._gauges)

    def take(self) -> Snapshot | None:
        """Everything since the last call; None if nothing has changed."""
        with self._lock:
            if not (self._counts or self._observations or self._changed):
                return None
            snapshot = Snapshot(dict(self._counts), dict(self._observations), dict(self._gauges))
            self._counts.clear()
            self._observations.clear()
            self._changed = False
            return snapshot
