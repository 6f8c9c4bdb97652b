# SPDX-License-Identifier: Apache-2.0
"""`roles dop`: eight GPUs for prefill, as engines of equal or of unlike tensor parallelism."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pd_bench.roles.play import in_parallel
from scheduler_plugins.cost.engine_profile import EngineProfile
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.policies.registry import DEFAULT
from scheduler_plugins.sim.fleet import Fleet, Part
from scheduler_plugins.sim.simulate import COSTS, Scenario

UNIFORM = ((1,) * 8, (2,) * 4, (4,) * 2)
MIXED = ((4, 2, 2), (4, 1, 1, 1, 1))
EFFICIENCY = {1: 1.0, 2: 0.95, 4: 0.88}
"""Part of the GPUs' speed that is left at this tensor parallelism. Assumed, not measured."""
CACHE_BLOCKS = Scenario.cache_blocks
"""Blocks of the prefix cache for each GPU."""
BAR = 1.0


class Parallel(NamedTuple):
    """One run. Times are in seconds."""

    sizes: tuple[int, ...]
    policy: str
    ttft_s: float  # mean
    per_token_s: float  # mean of TTFT / prompt length, LoongServe's measure

    @property
    def name(self) -> str:
        return "+".join(f"TP{size}" for size in self.sizes) + f", {self.policy}"


def compare(requests: Sequence[Waiting], speed: float, jobs: int) -> list[Parallel]:
    """Uniform fleets with the default policy, mixed fleets with the default policy and with `dop`."""
    runs = [(requests, speed, sizes, DEFAULT) for sizes in (*UNIFORM, *MIXED)]
    runs += [(requests, speed, sizes, "dop") for sizes in MIXED]
    return in_parallel(jobs, _run, runs, lambda given, result: None)


def _run(
    requests: Sequence[Waiting], speed: float, sizes: tuple[int, ...], policy: str
) -> Parallel:
    prefill = [Part(role=Role.PREFILL, profile=_profile(size)) for size in sizes]
    decode = Part(role=Role.DECODE, profile=EngineProfile(costs=COSTS), number=4)
    scenario = Scenario(fleet=Fleet(parts=(*prefill, decode)), speed=speed)
    served = scenario.cluster(policy).run(scenario.arrivals(requests))
    return Parallel(
        sizes,
        policy,
        statistics.mean(request.ttft_s for request in served),
        statistics.mean(request.ttft_s / request.request.tokens for request in served),
    )


def _profile(size: int) -> EngineProfile:
    faster = size * EFFICIENCY[size]
    costs = replace(COSTS, a=COSTS.a / faster, b=COSTS.b / faster)
    return EngineProfile(costs=costs, gpus=size, cache_blocks=CACHE_BLOCKS * size)
