# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of a process that lends memory. They are read when Prometheus asks."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pd_connector.pool.lending.lender import Lender

PREFIX = "pd_connector:lender_"


class LenderMetrics(Collector):
    """What is lent, and what recalls have done, for a registry of prometheus_client."""

    def __init__(self, lender: Lender) -> None:
        self._lender = lender

    def collect(self) -> Iterator[Metric]:
        """All metrics; counts that are still zero included."""
        recalled = self._lender.recalled
        lent = GaugeMetricFamily(f"{PREFIX}lent_bytes", "Memory that is lent now.")
        lent.add_metric([], self._lender.nbytes)
        recalls = CounterMetricFamily(f"{PREFIX}recalls", "Recalls of lent memory that have ended.")
        recalls.add_metric([], self._lender.recalls)
        unknown = CounterMetricFamily(
            f"{PREFIX}unknown_recalls",
            "Recalls during which the master did not answer: how many objects are lost is not known.",
        )
        unknown.add_metric([], self._lender.unknown_recalls)
        nbytes = CounterMetricFamily(
            f"{PREFIX}recalled_bytes", "Memory that recalls have given back to this host."
        )
        nbytes.add_metric([], recalled.nbytes)
        objects = CounterMetricFamily(
            f"{PREFIX}recalled_objects",
            "Objects in recalled memory: `moved` to other nodes, `copied` because they were in use, or `lost`.",
            labels=["cause"],
        )
        for cause in ("moved", "copied", "lost"):
            objects.add_metric([cause], getattr(recalled, cause))
        yield from (lent, recalls, unknown, nbytes, objects)
