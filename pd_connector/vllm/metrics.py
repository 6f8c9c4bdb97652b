# SPDX-License-Identifier: Apache-2.0
"""The connector's metrics (`pd_connector.agent.metrics`) on vLLM's `/metrics`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from pd_connector.agent.metrics import (
    BUCKETS_S,
    COUNTERS,
    COUNTERS_OF_PAIRS,
    GAUGES,
    HISTOGRAMS,
    LABELLED,
    LABELS,
    PREFIX,
    UNDER_WAY,
    values_of,
)
from pd_connector.telemetry import Telemetry

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class PDStats(KVConnectorStats):
    """One step's counts, observations and gauges, as plain data that vLLM can serialise.

    `data` is `{"counts": [[name, values of its labels, amount]], "observations": {name: [seconds]},
    "gauges": {name: value of the engine, see `RankGauges`}}`. Gauges come from the scheduler, which knows those of
    every rank: with several API servers, vLLM gives the stats of a step to only one of them.
    """

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    @classmethod
    def of(
        cls, telemetry: Telemetry, gauges: Mapping[str, float] | None = None
    ) -> "PDStats | None":
        """What `telemetry` has counted since the last call, with these gauges; None if there is nothing."""
        snapshot = telemetry.take()
        counts = [
            [name, values_of(name, labels), amount]
            for (name, labels), amount in (snapshot.counts.items() if snapshot else ())
        ]
        observations = snapshot.observations if snapshot else {}
        stats = cls({"counts": counts, "observations": observations, "gauges": dict(gauges or {})})
        return None if stats.is_empty() else stats

    def reset(self) -> None:
        empty: dict[str, Any] = {"counts": [], "observations": {}, "gauges": {}}
        self.data = empty

    def aggregate(self, other: KVConnectorStats) -> "PDStats":
        self.data["counts"] += other.data["counts"]
        for name, values in other.data["observations"].items():
            self.data["observations"].setdefault(name, []).extend(values)
        self.data["gauges"].update(other.data["gauges"])
        return self

    def reduce(self) -> dict[str, int | float]:
        """The figures for vLLM's periodic log line."""
        totals: dict[str, int | float] = {}
        for name, values, amount in self.data["counts"]:
            if name in COUNTERS_OF_PAIRS:
                continue  # other counters have their sums
            key = f"{name}[{values[0]}]" if values else name
            totals[key] = totals.get(key, 0) + amount
        for name, values in self.data["observations"].items():
            totals[f"mean_{name}"] = round(sum(values) / len(values), 4)
        return totals

    def is_empty(self) -> bool:
        return not (self.data["counts"] or self.data["observations"] or self.data["gauges"])


class RankGauges:
    """The gauges of all ranks of an engine, as their workers reported them last."""

    def __init__(self) -> None:
        self._by_rank: dict[int, Mapping[str, float]] = {}
        self._changed = False

    def update(self, by_rank: Mapping[int, Mapping[str, float]]) -> None:
        """Ranks have reported their gauges."""
        self._by_rank.update(by_rank)
        self._changed |= bool(by_rank)

    def under_way(self, *, queued: bool) -> bool:
        """Whether a rank's last report says that transfers are under way.

        Args:
            queued: whether requests with transfers have not ended. vLLM makes steps for such requests itself, unless it
                is paused. So only leases of ended requests count then: otherwise a pause would last until queued
                requests have their KV.
        """
        return any(self._of_all(name) for name in (("leased_pages",) if queued else UNDER_WAY))

    def changed(self) -> dict[str, float] | None:
        """Each gauge of the engine; None if none has changed since the last call."""
        changed, self._changed = self._changed, False
        if not changed:
            return None
        names = {name: None for gauges in self._by_rank.values() for name in gauges}
        return {name: self._of_all(name) for name in names}

    def _of_all(self, name: str) -> float:
        """The sum over all ranks. A lease holds the same pages at each rank, so leased pages are those of the rank with
        the most: a sum would be more pages than the cache has. Ranks read the same weights, and the slowest counts."""
        if name == "weights_read_bytes":
            reading = [each for each in self._by_rank.values() if each.get("weights_bytes")]
            return min((each.get(name, 0.0) for each in reading), default=0.0)
        values = [gauges.get(name, 0.0) for gauges in self._by_rank.values()]
        return (
            max(values, default=0.0) if name in ("leased_pages", "weights_bytes") else sum(values)
        )


class PDPromMetrics(KVConnectorPromMetrics):
    """Registers the metrics in the process that serves `/metrics`, and feeds them."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        audits = extra.get("audit") != "off"
        counter, gauge, histogram = (metric_types[t] for t in (Counter, Gauge, Histogram))
        self._counters = {
            **{name: counter(PREFIX + name, text, labelnames) for name, text in COUNTERS.items()},
            **{
                name: counter(PREFIX + name, text, [*labelnames, *LABELS[name]])
                for name, text in LABELLED.items()
                if name != "audits" or audits  # a router looks for it before it sends an audit
            },
        }
        self._gauges = {
            name: gauge(PREFIX + name, text, labelnames, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        self._histograms = {
            name: histogram(PREFIX + name, text, labelnames, buckets=list(BUCKETS_S))
            for name, text in HISTOGRAMS.items()
        }
        for labels in per_engine_labelvalues.values():  # series exist from the start, at zero
            for name in COUNTERS:
                self._counters[name].labels(*labels)
            for metric in self._histograms.values():
                metric.labels(*labels)
            for metric in self._gauges.values():
                metric.labels(*labels).set(0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, values, amount in transfer_stats_data["counts"]:
            self._counters[name].labels(*labels, *values).inc(amount)
        for name, seconds in transfer_stats_data["observations"].items():
            for value in seconds:
                self._histograms[name].labels(*labels).observe(value)
        if gauges := transfer_stats_data["gauges"]:
            for name, metric in self._gauges.items():
                metric.labels(*labels).set(gauges.get(name, 0))
