# SPDX-License-Identifier: Apache-2.0
"""The agent's metrics (`pd_connector.agent.metrics`) on SGLang's `/metrics`.

SGLang gathers what its processes count through files that prometheus_client writes
(`--enable-metrics`). Each rank fills in its own series.
"""

import threading
from functools import cache
from typing import Any

from pd_connector.agent.metrics import (
    BUCKETS_S,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELLED,
    LABELS,
    PREFIX,
    values_of,
)
from pd_connector.telemetry import Telemetry

_REFRESH_S = 1.0


@cache
def _series() -> dict[str, Any]:
    """The series of this process by name. An engine that changes its side goes on with them."""
    # Imported late: at its import it looks for the folder of SGLang's metrics.
    from prometheus_client import Counter, Gauge, Histogram

    return {
        **{name: Counter(PREFIX + name, text, ["rank"]) for name, text in COUNTERS.items()},
        **{
            name: Counter(PREFIX + name, text, ["rank", *LABELS[name]])
            for name, text in LABELLED.items()
        },
        **{
            name: Gauge(PREFIX + name, text, ["rank"], multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        },
        **{
            name: Histogram(PREFIX + name, text, ["rank"], buckets=BUCKETS_S)
            for name, text in HISTOGRAMS.items()
        },
    }


class Metrics:
    """The metric series of one rank. A separate thread updates them once a second.

    Args:
        telemetry: telemetry of the rank's agent.
        rank: number of the rank in its engine.
    """

    def __init__(self, telemetry: Telemetry, rank: int) -> None:
        self._telemetry = telemetry
        self._label = label = str(rank)
        made = _series()
        self._plain = {name: made[name].labels(label) for name in COUNTERS}
        self._labelled = {name: made[name] for name in LABELLED}
        self._gauges = {name: made[name].labels(label) for name in GAUGES}
        self._histograms = {name: made[name].labels(label) for name in HISTOGRAMS}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pd-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Move the last counts, and end. The series stay, for the next agent of the rank."""
        self._stopping.set()
        self._thread.join()
        self.refresh()

    def refresh(self) -> None:
        """Move what was counted since the last call into the series."""
        snapshot = self._telemetry.take()
        if snapshot is None:
            return
        for (name, labels), amount in snapshot.counts.items():
            if name in self._plain:
                self._plain[name].inc(amount)
            else:
                values = values_of(name, labels)
                self._labelled[name].labels(self._label, *values).inc(amount)
        for name, seconds in snapshot.observations.items():
            for value in seconds:
                self._histograms[name].observe(value)
        for name, gauge in self._gauges.items():
            gauge.set(snapshot.gauges.get(name, 0))

    def _run(self) -> None:
        while not self._stopping.wait(_REFRESH_S):
            self.refresh()
