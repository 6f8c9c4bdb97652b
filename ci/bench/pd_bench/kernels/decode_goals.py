# SPDX-License-Identifier: Apache-2.0
"""Goals over all batches together: geometric means, printed without a bar."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import geometric_mean

from pd_bench.kernels.report import FAILED, Comparison, duration

GOALS = {
    ("paged_decode / FlexAttention", "ragged"): "1.3x geometric mean",
    ("paged_decode / FlashInfer", "ragged"): "1.15x",
    ("paged_decode / FlashInfer", "uniform"): "1.0x",
}
"""The target speed as a multiple of the baseline's, for a comparison and a kind of lengths."""


def geometric_means(
    rows: Sequence[Comparison], lengths: Mapping[str, Callable[[random.Random], list[int]]]
) -> Iterator[Comparison]:
    """Yield a row for each goal that was measured: geometric means of our times and of the
    baseline's.

    Args:
        rows: everything that was measured.
        lengths: makes the lengths of a batch, by the batch's name.
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
