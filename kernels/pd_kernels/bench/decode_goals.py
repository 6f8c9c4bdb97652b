# SPDX-License-Identifier: Apache-2.0
"""What is hoped for over all batches together: geometric means, which no bar is held to."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import geometric_mean

from pd_kernels.bench.report import FAILED, Comparison, duration

GOALS = {
    ("paged_decode / FlexAttention", "ragged"): "1.3x geometric mean",
    ("paged_decode / FlashInfer", "ragged"): "1.15x",
    ("paged_decode / FlashInfer", "uniform"): "1.0x",
}
"""Of a comparison and its kind of lengths: how many times faster than the baseline."""


def geometric_means(
    rows: Sequence[Comparison], lengths: Mapping[str, Callable[[random.Random], list[int]]]
) -> Iterator[Comparison]:
    """Of our times and the baseline's, a row for each goal that was measured.

    Args:
        lengths: of the batches that the rows name.
    """
    for (name, kind), goal in GOALS.items():
        there = [
            row
            for row in rows
            if row.name == name
            and FAILED not in row.params
            and kind_of(lengths[str(row.params["lengths"])](random.Random(1))) == kind
        ]
        if there:
            ours_s = geometric_mean(row.ours for row in there) / 1e6
            theirs_s = geometric_mean(row.baseline for row in there) / 1e6
            params = {"lengths": f"{kind}, {len(there)} batches", "goal": goal}
            yield duration(f"mean of {name}", params, ours_s, theirs_s, None)


def kind_of(lengths: Sequence[int]) -> str:
    return "uniform" if len(set(lengths)) == 1 else "ragged"
