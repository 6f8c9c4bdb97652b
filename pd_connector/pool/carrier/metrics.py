# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of a carrier, by cause. They are read from its status when Prometheus asks."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pd_connector.errors import Miss
from pd_connector.pool.carrier.messages import Status

PREFIX = "pd_connector:carrier_"

_PUTS = {
    "put": "put",
    "there": "there",
    "refused": "not_put",
    "too_large": "too_large",
    "damaged": "put_damaged",
    "gone": "gone",
    "failed": "failed",
    "left_out": "left_out",
}
"""Label `cause` of `puts`: the name of the carrier's count."""
_BRINGS = {
    "brought": "brought",
    "here": "here",
    **{
        cause.value: f"not_brought_{cause}"
        for cause in (Miss.DAMAGED, Miss.EVICTED, Miss.LATE, Miss.REFUSED)
    },
}
"""Label `cause` of `brings`: the name of the carrier's count."""
_FINDS = {"found": "finds_found", "none": "finds_none", "silent": "silent_finds"}
"""Label `cause` of `finds`: the name of the carrier's count."""
_BY_CAUSE = {
    "puts": (
        "Chunks that this host has saved, by what became of them: `put`; `there` already; `refused` by the far store, three times in 36 s; `too_large` for it; `damaged` here; `gone` from this host before; `failed` (see the log); `left_out`, because too many waited.",
        _PUTS,
    ),
    "brings": (
        "Chunks that engines asked for: `brought`; `here` already; `damaged`: altered, or cut; `evicted` from the far store; `late`: it did not answer in time; `refused` by this host's pool.",
        _BRINGS,
    ),
    "finds": (
        "Look-ups of prompts: chunks were `found`, or `none`, or the far store was `silent`.",
        _FINDS,
    ),
}
_COUNTERS = {
    "found_chunks": ("Chunks that look-ups found in the far store.", "found"),
    "put_bytes": ("Bytes that were put, with their seal.", "put_bytes"),
    "brought_bytes": ("Bytes that were brought, with their seal.", "brought_bytes"),
    "losses": (
        "Times the far store had lost objects, so that the whole pool of this host was put again where it lacked chunks.",
        "begun_again",
    ),
    "client_restarts": (
        "Times a client of the far store was killed because the store did not answer in time, or refused.",
        "client_restarts",
    ),
    "errors": ("Unexpected errors of the carrier's threads, which go on; see the log.", "errors"),
}
"""The name of the carrier's count, after the help."""


class CarrierMetrics(Collector):
    """What a carrier has done, for a registry of prometheus_client.

    Args:
        status: returns the carrier's status. Can be called by any thread.
    """

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """All metrics; counts that are still zero included."""
        status = self._status()
        counts = status.counts
        up = GaugeMetricFamily(
            f"{PREFIX}far_up", "1 while the far store can be used, else 0: engines compute then."
        )
        up.add_metric([], 0.0 if status.problem else 1.0)
        since = GaugeMetricFamily(
            f"{PREFIX}far_since_seconds", "Unix time since when `far_up` has this value."
        )
        since.add_metric([], status.since_s)
        waiting = GaugeMetricFamily(f"{PREFIX}waiting_chunks", "Chunks that wait to be put.")
        waiting.add_metric([], status.waiting)
        bringing = GaugeMetricFamily(
            f"{PREFIX}bringing_chunks", "Chunks that engines asked for and that are on their way."
        )
        bringing.add_metric([], status.bringing)
        yield from (up, since, waiting, bringing)
        for name, (text, causes) in _BY_CAUSE.items():
            by_cause = CounterMetricFamily(f"{PREFIX}{name}", text, labels=["cause"])
            for cause, counted in causes.items():
                by_cause.add_metric([cause], counts.get(counted, 0))
            yield by_cause
        for name, (text, counted) in _COUNTERS.items():
            counter = CounterMetricFamily(f"{PREFIX}{name}", text)
            counter.add_metric([], counts.get(counted, 0))
            yield counter
