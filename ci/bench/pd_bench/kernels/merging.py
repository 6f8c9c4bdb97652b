# SPDX-License-Identifier: Apache-2.0
"""Speed of `merge_partials`, beside attention over the sequences whose shards are merged."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pd_bench.kernels import decode_cases
from pd_bench.kernels.decode_cases import Heads, PagedSet
from pd_bench.kernels.report import Comparison, Param, duration
from pd_bench.kernels.timing import copies
from pd_kernels.attention import merge_partials

SHARDS = (2, 8)
MERGE_BAR = 0.01

Calls = list[Callable[[], Any]]


def measure_merging(
    heads: Heads,
    params: dict[str, Param],
    make_sets: Callable[[], list[PagedSet]],
    calls_of: Callable[[list[PagedSet]], tuple[Calls, Any]],
    seconds: Callable[[Calls, int], float],
    replays: int,
) -> Iterator[Comparison]:
    """Yield the rows: the merge of shards beside the attention that they share.

    Args:
        make_sets: batches of sequences that are long enough to spread over several instances.
        calls_of: calls that attend to the whole sequences.
        seconds: times calls, given the number of replays.
    """
    sets = make_sets()
    batch = len(sets[0].lengths)
    whole_s = seconds(calls_of(sets)[0], replays)
    del sets
    for shards in SHARDS:
        merge_s = seconds(_merge_calls(heads, batch, shards), replays)
        shown = params | {"shards": shards}
        yield duration("merge_partials / paged_decode", shown, merge_s, whole_s, MERGE_BAR)


def _merge_calls(heads: Heads, batch: int, shards: int) -> Calls:
    shape, device = (batch, heads.query, heads.dim), decode_cases.DEVICE
    read = shards * batch * heads.query * heads.dim * 4

    def call() -> Callable[[], Any]:
        outs = torch.randn(shards, *shape, device=device)
        lses = torch.randn(shards, *shape[:-1], device=device)
        out = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return functools.partial(merge_partials, outs, lses, out)

    return [call() for _ in range(copies(read))]
