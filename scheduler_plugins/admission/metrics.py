# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the classes, in the registry that vLLM's `/metrics` shows.

They are plain metrics with values, not collectors, because with several API servers (prometheus_client's multiprocess
mode) only plain metrics are seen. On each request for `/metrics`, the figures of the engine's board are copied into
gauges.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from prometheus_client import Counter, Gauge, Histogram

from scheduler_plugins.admission.post import TTFT_BUCKETS_S, Posted
from scheduler_plugins.admission.post import Histogram as Times


class AdmissionMetrics:
    """All metrics. There is one object per process, see `metrics`."""

    def __init__(self) -> None:
        self.admitted = Counter("pd_scheduler:admitted", "Requests let in, by class.", ["qos"])
        self.rejected = Counter(
            "pd_scheduler:rejected",
            "Requests answered with 429, by class and by the promise that would have been broken.",
            ["qos", "cause"],
        )
        self.unseen = Counter(
            "pd_scheduler:admitted_without_report",
            "Requests of a class with an SLO let in because the engine's load was not known.",
            ["qos"],
        )
        self.predicted_ttft_s = Histogram(
            "pd_scheduler:admission_predicted_ttft_seconds",
            "Time to the first token predicted on arrival, of admitted requests that got one.",
            ["qos"],
            buckets=TTFT_BUCKETS_S,
        )
        self.ttft_s = Histogram(
            "pd_scheduler:admission_ttft_seconds",
            "Time from arrival to the first token sent to the client, of the same requests.",
            ["qos"],
            buckets=TTFT_BUCKETS_S,
        )
        self._waiting = _gauge("waiting", "Requests that wait in the engine.")
        self._tokens = _gauge("waiting_tokens", "Prompt tokens that wait in the engine.")
        self._work_s = _gauge("waiting_work_seconds", "Predicted time to prefill what waits.")
        self._predicted = _BoardTimes("engine_predicted_ttft", "TTFT predicted by the scheduler")
        self._ttft = _BoardTimes("engine_ttft", "TTFT in the engine")

    def show(self, posts: Sequence[Posted]) -> None:
        """Copy the figures of the engine cores, summed over the data-parallel ranks."""
        for qos in {qos for posted in posts for qos in posted.report.classes}:
            loads = [post.report.classes[qos] for post in posts if qos in post.report.classes]
            self._waiting.labels(qos).set(sum(load.waiting for load in loads))
            self._tokens.labels(qos).set(sum(load.tokens for load in loads))
            self._work_s.labels(qos).set(sum(sum(load.work_s) for load in loads))
        for qos in {qos for posted in posts for qos in posted.classes}:
            records = [post.classes[qos] for post in posts if qos in post.classes]
            self._predicted.show(qos, _together([record.predicted_ttft for record in records]))
            self._ttft.show(qos, _together([record.ttft for record in records]))


class _BoardTimes:
    """A histogram of another process, in the form that Prometheus reads."""

    def __init__(self, name: str, words: str) -> None:
        name, words = f"{name}_seconds", f"{words}, requests that had a first token"
        self._buckets = _gauge(f"{name}_bucket", f"{words}: counts up to a bound.", "le")
        self._sum = _gauge(f"{name}_sum", f"{words}: added up.")
        self._count = _gauge(f"{name}_count", f"{words}: counted.")

    def show(self, qos: str, times: Times) -> None:
        totals = list(accumulate(times.counts))
        bounds = [*(f"{bound:g}" for bound in TTFT_BUCKETS_S), "+Inf"]
        for bound, total in zip(bounds, totals, strict=True):
            self._buckets.labels(qos, bound).set(total)
        self._sum.labels(qos).set(times.sum_s)
        self._count.labels(qos).set(totals[-1])


def _together(several: Sequence[Times]) -> Times:
    counts = [sum(bucket) for bucket in zip(*(times.counts for times in several), strict=True)]
    return Times(counts, sum(times.sum_s for times in several))


def _gauge(name: str, words: str, *labels: str) -> Gauge:
    names = ["qos", *labels]
    return Gauge(f"pd_scheduler:{name}", words, names, multiprocess_mode="mostrecent")


@cache
def metrics() -> AdmissionMetrics:
    """This process's metrics."""
    return AdmissionMetrics()
