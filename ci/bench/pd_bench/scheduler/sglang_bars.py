# SPDX-License-Identifier: Apache-2.0
"""The policies compared in SGLang, and the bar: the best of SGLang's own policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from pd_bench.report import Comparison
from pd_bench.sample import Sample
from pd_bench.scheduler.replay import Outcome

FCFS, OURS = "fcfs", "srjf_calibrated"
THEIRS = (FCFS, "lpm", "hrrn", "shortest-prefill-first")
POLICIES = (*THEIRS, OURS)
BARRED_LOAD = 0.9
"""At this load the bar of our mean time to the first token is the smallest mean of SGLang's policies."""


def comparisons(
    load: float, outcomes: Mapping[tuple[str, float], Sequence[Outcome]]
) -> list[Comparison]:
    """Mean, tail and hits of one load against each of theirs.

    Args:
        outcomes: by policy and load, one outcome for each run.
    """

    def sample(name: str, field: str) -> Sample:
        return Sample(tuple(getattr(outcome, field) for outcome in outcomes[name, load]))

    best = min(THEIRS, key=lambda name: sample(name, "mean_s").median)
    return [
        Comparison(
            field.removesuffix("_s"),
            {"load": load, "against": name},
            sample(OURS, field),
            sample(name, field),
            unit,
            1.0 if (field, name, load) == ("mean_s", best, BARRED_LOAD) else None,
        )
        for name, (field, unit) in product(THEIRS, (("mean_s", "s"), ("p99_s", "s"), ("hit", "")))
    ]
