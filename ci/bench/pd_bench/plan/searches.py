# SPDX-License-Identifier: Apache-2.0
"""The planner's search beside others, with what each took."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pd_bench.report import BenchError
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.planner.bound import Bounds, Workload
from scheduler_plugins.planner.front import front
from scheduler_plugins.planner.goodput import WINDOWS, Judge, Promise, windows_of
from scheduler_plugins.planner.inventory import Inventory
from scheduler_plugins.planner.mix import Mix, fits, mix_of
from scheduler_plugins.planner.plan import SEARCHES
from scheduler_plugins.planner.search import Candidate, best_of
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.sim.trace import at_rate

TPOT_S = 0.05
LEAST_TTFT_S, OF_LONG_PROMPT = 0.5, 2.0
EACH = 200


class TooShortError(BenchError):
    """Windows in which every rate is in time."""


def promise_of(inventory: Inventory, requests: Sequence[Waiting]) -> Promise:
    """The promise of a trace: half a second to the first token, or twice the time that the first kind of engine takes for
    a prompt that is longer than nine of ten."""
    lengths = sorted(request.tokens for request in requests)
    costs = next(iter(inventory.kinds.values())).costs
    long_s = costs.prefill_s(lengths[len(lengths) * 9 // 10])
    return Promise(round(max(LEAST_TTFT_S, OF_LONG_PROMPT * long_s), 2), TPOT_S)


def mixed(traces: Sequence[Sequence[Waiting]]) -> list[Waiting]:
    """Traces at the same time, each with the same number of requests at the same mean rate. They share no prefix."""
    fewest = min(len(requests) for requests in traces)
    played = [
        replace(
            request,
            id=f"{n}/{request.id}",
            block_hashes=[(n, block) for block in request.block_hashes],
        )
        for n, requests in enumerate(traces)
        for request in at_rate(requests[:fewest], 1.0, seed=n)
    ]
    return sorted(played, key=lambda request: request.arrival_s)


class Searched(NamedTuple):
    """What a search found, and what it took."""

    best: Candidate | None
    runs: int
    simulated: int  # requests

    @property
    def per_s(self) -> float:
        return self.best.per_s if self.best else 0.0


class Halves(NamedTuple):
    """Rates in the second half of a trace of fleets that were chosen in the first."""

    ours: float
    exhaustive: float


def every_mix(inventory: Inventory) -> list[Mix]:
    """Every mix of prefill and decode engines that uses all GPUs."""
    fillings: list[Counter[tuple[str, Role]]] = [Counter()]
    for device in inventory.devices:
        fillings = [
            total + part
            for total in fillings
            for part in _fillings(inventory, device, inventory.gpus(device))
        ]
    mixes = {mix_of(counts) for counts in fillings}
    return [mix for mix in mixes if fits(mix, inventory)]


def _fillings(
    inventory: Inventory, device: str, gpus: int, first: int = 0
) -> Iterator[Counter[tuple[str, Role]]]:
    """Every way to fill these GPUs."""
    engines = [
        (kind, role) for kind in inventory.of(device) for role in (Role.PREFILL, Role.DECODE)
    ]
    if gpus == 0:
        yield Counter()
    for n in range(first, len(engines)):
        size = inventory.kinds[engines[n][0]].gpus
        if size <= gpus:
            for rest in _fillings(inventory, device, gpus - size, n):
                yield rest + Counter({engines[n]: 1})


def long_enough(
    inventory: Inventory, requests: Sequence[Waiting], promise: Promise, name: str, each: int = EACH
) -> tuple[Searched, int]:
    """A search with windows of `each` requests, doubled until the highest rate can be told; and their size then."""
    while True:
        try:
            return searched(inventory, requests, each, promise, name), each
        except TooShortError:
            if each >= len(requests) // WINDOWS:
                raise
            each *= 2


def searched(
    inventory: Inventory, requests: Sequence[Waiting], each: int, promise: Promise, name: str
) -> Searched:
    """One of the planner's searches, or `exhaustive`.

    Raises:
        TooShortError: the best fleet keeps the promise at every rate that windows of this size can tell.
    """
    bounds = Bounds(inventory, Workload.of(requests, promise.tpot_s))
    judge = Judge(windows_of(requests, each), promise)
    judge.first_per_s = max(0.1, bounds.of(front(bounds)[0]) / 8)
    if name == "exhaustive":
        mixes = sorted(every_mix(inventory), key=lambda mix: (-bounds.of(mix), mix))
        best = best_of(mixes, judge, inventory)
    else:
        best = SEARCHES[name](judge, bounds)
    if best is not None and best.unit_per_s > 0.97 * judge.most_per_s:
        raise TooShortError(
            f"{best.name} keeps the promise at {best.unit_per_s:.1f} a second, where a window of {each} requests is too short "
            "to tell; give a longer trace"
        )
    return Searched(best, judge.runs, judge.simulated)


def on_the_other_half(
    inventory: Inventory, requests: Sequence[Waiting], each: int, promise: Promise
) -> tuple[Halves, list[Searched]]:
    """Plan with the first half, ours and exhaustively, and judge both in the second."""
    half = len(requests) // 2
    judge = Judge(windows_of(requests[half:], each), promise)
    plans = [
        searched(inventory, requests[:half], each, promise, name)
        for name in ("planner", "exhaustive")
    ]
    ours, theirs = (judge.goodput(plan.best.fleet) if plan.best else 0.0 for plan in plans)
    return Halves(ours, theirs), plans


def front_cpu_s(inventory: Inventory, requests: Sequence[Waiting]) -> tuple[float, int]:
    """CPU seconds of the front, and its mixes."""
    bounds = Bounds(inventory, Workload.of(requests, TPOT_S))
    begun_s = time.process_time()
    mixes = front(bounds)
    return time.process_time() - begun_s, len(mixes)
