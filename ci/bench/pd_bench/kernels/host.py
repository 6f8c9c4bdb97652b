# SPDX-License-Identifier: Apache-2.0
"""The host's time for an eager call, with and without `Tuning.direct_launch`."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pd_bench.kernels import decode_cases
from pd_bench.kernels.decode_cases import Heads, latent_set, paged_set
from pd_bench.kernels.report import Comparison, Param, duration
from pd_kernels.attention import mla_decode, paged_decode, plan_mla_decode, plan_paged_decode
from pd_kernels.attention.mla_call import LATENT
from pd_kernels.tuning import tuned

NAME = "host of a call"
LENGTHS = [64] * 8
"""A batch so small that the GPU finishes before the host has made the next call."""

BAR_S = 25e-6
ROUNDS = 30
CALLS = 40
"""Calls of a round. A stream has room for far more, so no call waits for the GPU."""

Calls = Sequence[Callable[[], Any]]
Layers = tuple[Calls, Sequence[torch.Tensor]]
"""Calls with one plan, like the layers of a model, and the tensors that they write."""


def paged_layers(heads: Heads) -> Layers:
    """Two layers' calls of `paged_decode`, the same each time."""
    torch.manual_seed(1)
    sets = [paged_set(LENGTHS, heads, 16, torch.bfloat16) for _ in range(2)]
    plan = plan_paged_decode(sets[0].query, sets[0].keys).fill(sets[0].lengths)
    outs = [torch.empty_like(given.query) for given in sets]
    pairs = zip(sets, outs, strict=True)
    return [functools.partial(paged_decode, *each, out=out, plan=plan) for each, out in pairs], outs


def latent_layers() -> Layers:
    """The same for `mla_decode`, with 16 heads."""
    torch.manual_seed(1)
    sets = [latent_set(LENGTHS, 16, 1) for _ in range(2)]
    plan = plan_mla_decode(sets[0].query, sets[0].cache).fill(sets[0].lengths)
    outs = [torch.empty_like(given.query[..., :LATENT]) for given in sets]
    call = functools.partial(mla_decode, scale=0.1, plan=plan)
    pairs = zip(sets, outs, strict=True)
    return [functools.partial(call, *each, out=out) for each, out in pairs], outs


def measure_host(params: dict[str, Param], make: Callable[[], Layers]) -> Iterator[Comparison]:
    """Yield the rows: both settings of `direct_launch`, then the time with it beside the bar.

    Args:
        make: of `paged_layers` and `latent_layers`.

    Raises:
        RuntimeError: the settings give different results.
    """
    took, medians = {}, {}
    for on in (False, True):
        with tuned(direct_launch=on):
            calls, outs = make()
            took[on] = host_seconds(calls)
            medians[on] = [out.clone() for out in outs]
            del calls, outs
    if not all(map(torch.equal, medians[True], medians[False])):
        raise RuntimeError("results with direct_launch differ from those without")
    yield duration("direct_launch: on / off", params, took[True], took[False], None)
    yield duration(f"{NAME} / bar", params, took[True], BAR_S, 1.0)


def host_seconds(calls: Calls) -> float:
    """Median time of a call until it returns, in seconds. The GPU is idle when a round begins."""
    times = []
    for turn in range(ROUNDS + 3):
        _wait()
        started = time.perf_counter()
        for number in range(CALLS):
            calls[number % len(calls)]()
        if turn >= 3:
            times.append((time.perf_counter() - started) / CALLS)
    _wait()
    return statistics.median(times)


def _wait() -> None:
    if decode_cases.DEVICE != "cpu":
        torch.cuda.synchronize()
