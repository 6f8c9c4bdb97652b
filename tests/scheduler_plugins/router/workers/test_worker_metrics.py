# SPDX-License-Identifier: Apache-2.0
"""One `/metrics` for all processes: counts are added up, what each has learnt is not."""

from prometheus_client.parser import text_string_to_metric_families
from scheduler_plugins.router.workers.merging import families_of, merged

from scheduler_plugins.router.metrics import Metrics


def test_a_margin_is_the_largest_that_a_process_has_learnt_and_counts_are_added_up() -> None:
    parts = []
    for margin in (1.5, 2.5, 1.0):
        metrics = Metrics()
        metrics.promise_margin.labels("premium").set(margin)
        metrics.rejected.labels("premium", "ttft").inc(2)
        parts.append(families_of(metrics.registry))
    shown = {
        sample.name: sample.value
        for family in text_string_to_metric_families(merged(parts).decode())
        for sample in family.samples
    }
    assert shown["pd_router:promise_margin"] == 2.5
    assert shown["pd_router:rejected_total"] == 6
