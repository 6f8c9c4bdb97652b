# SPDX-License-Identifier: Apache-2.0
"""The agent's metrics (`pd_connector.agent.metrics`) on SGLang's `/metrics`.

SGLang gathers what its processes count through files that prometheus_client writes
(`--enable-metrics`). Each rank fills in its own series.
"""

import threading

from pd_connector.agent.metrics import (
    BUCKETS_S,
    COUNTERS,
    COUNTERS_BY_CAUSE,
    COUNTERS_BY_TRANSPORT,
    GAUGES,
    HISTOGRAMS,
    LABEL,
    PREFIX,
)
from pd_connector.telemetry import Telemetry

_REFRESH_S = 1.0


class Metrics:
    """The series of one rank. A thread of their own updates them once a second.

    Args:
        telemetry: of the rank's agent.
        rank: number of the rank in its engine.
    """

    def __init__(self, telemetry: Telemetry, rank: int) -> None:
        # Imported late: at its import it looks for the folder of SGLang's metrics.
        from prometheus_client import Counter, Gauge, Histogram

        self._telemetry = telemetry
        label = str(rank)
        self._plain = {
            name: Counter(PREFIX + name, text, ["rank"]).labels(label)
            for name, text in COUNTERS.items()
        }
        self._labelled = {
            name: Counter(PREFIX + name, text, ["rank", LABEL[name]])
            for name, text in (COUNTERS_BY_CAUSE | COUNTERS_BY_TRANSPORT).items()
        }
        self._gauges = {
            name: Gauge(PREFIX + name, text, ["rank"], multiprocess_mode="mostrecent").labels(label)
            for name, text in GAUGES.items()
        }
        self._histograms = {
            name: Histogram(PREFIX + name, text, ["rank"], buckets=BUCKETS_S).labels(label)
            for name, text in HISTOGRAMS.items()
        }
        self._label = label
        self._stopping = threading.Event()
        threading.Thread(target=self._run, name="pd-metrics", daemon=True).start()

    def close(self) -> None:
        self._stopping.set()

    def refresh(self) -> None:
        """Move what was counted since the last call into the series."""
        snapshot = self._telemetry.take()
        if snapshot is None:
            return
        for (name, labels), amount in snapshot.counts.items():
            if name in self._plain:
                self._plain[name].inc(amount)
            else:
                label = dict(labels).get(LABEL[name], "")
                self._labelled[name].labels(self._label, label).inc(amount)
        for name, seconds in snapshot.observations.items():
            for value in seconds:
                self._histograms[name].observe(value)
        for name, gauge in self._gauges.items():
            gauge.set(snapshot.gauges.get(name, 0))

    def _run(self) -> None:
        while not self._stopping.wait(_REFRESH_S):
            self.refresh()
