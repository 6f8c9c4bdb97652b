# SPDX-License-Identifier: Apache-2.0
"""Numbers of engines that follow the load, beside a fixed number, in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import cos, pi
from random import Random
from typing import NamedTuple

from pd_bench.roles.fleets import FleetKind
from scheduler_plugins.cost.closed import prompt_s
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.policies.registry import DEFAULT
from scheduler_plugins.router.roles.base import RolePolicy
from scheduler_plugins.router.roles.controller import RoleController
from scheduler_plugins.router.roles.scaling import Limits
from scheduler_plugins.sim.capacity import kept
from scheduler_plugins.sim.scaling import Scaled, Starts
from scheduler_plugins.sim.served import Served

KEPT = 0.98
"""A fixed fleet is large enough if it keeps this part of the requests in time."""
ENGINES, START_S, HOUR_S = 16, 60.0, 3600.0
SECONDS = 2 * HOUR_S
LOW, HIGH = 1.0, 4.0
"""Requests a second, lowest and highest."""
TIMEOUT_S = 180.0
FLEET = FleetKind(
    name="sine",
    # An invented slow engine: 16 of them are enough for a rate of 4, so that two hours are 18,000 requests.
    costs=CostModel(a=1.6e-3, b=2e-8, c=0.02, d0=0.03, d1=0.4e-3, d2=1.2e-6, chunk_tokens=2048),
    kv_tokens=30_000,
    kv_bytes_per_token=327_680,
    ttft_s=12.0,
    tpot_s=0.1,
    engines=ENGINES,
)
Rate = Callable[[float], float]


def sine(at_s: float) -> float:
    """From `LOW` to `HIGH` and back in two hours."""
    return (LOW + HIGH) / 2 - (HIGH - LOW) / 2 * cos(2 * pi * at_s / SECONDS)


def ends(at_s: float) -> float:
    """Half an hour of a high rate, and then nothing but a request in a quarter of an hour."""
    return 3.0 if at_s < HOUR_S / 2 else 1 / (HOUR_S / 4)


def drawn(rate: Rate, seconds: float, seed: int = 0) -> list[Waiting]:
    """Poisson arrivals of prompts of 1,500 tokens and answers of 200, on average."""
    random, now_s, requests = Random(seed), 0.0, list[Waiting]()
    while (now_s := now_s + random.expovariate(HIGH)) < seconds:
        if random.random() >= rate(now_s) / HIGH:
            continue
        tokens = min(5000, max(50, int(random.lognormvariate(7.15, 0.6))))
        answer = min(800, max(2, int(random.lognormvariate(5.05, 0.7))))
        requests.append(
            Waiting(
                id=str(len(requests)),
                tokens=tokens,
                max_tokens=answer,
                arrival_s=now_s,
                block_hashes=(),
            )
        )
    return requests


class Played(NamedTuple):
    """One run."""

    kept: float  # part of the requests in time
    engine_h: float  # hours of all engines, their starts included
    scaled: Sequence[Scaled]
    cut: int  # attempts that ended because their engine did
    served: Sequence[Served]


def fixed(requests: Sequence[Waiting], prefill: int, decode: int, seconds: float) -> Played:
    """A fleet that stays as it is."""
    served = FLEET.scenario(prefill, decode).cluster(DEFAULT).run(requests)
    return Played(
        kept(served, FLEET.ttft_s, FLEET.tpot_s),
        (prefill + decode) * seconds / HOUR_S,
        (),
        0,
        served,
    )


def scaled(
    requests: Sequence[Waiting],
    policy: RolePolicy,
    seconds: float,
    *,
    prefill: int = 4,
    decode: int = 2,
    come: bool = True,
    settles: bool = True,
) -> Played:
    """A fleet whose engines start and stop.

    Args:
        prefill: engines at the beginning, as `decode`.
        come: whether engines that are started ever serve.
        settles: False: a side is made smaller at once, as rules do that have no such guard.
    """
    scenario = FLEET.scenario(prefill, decode)
    cluster = scenario.cluster(DEFAULT)
    sides = (Role.PREFILL, Role.DECODE)
    limits = Limits(dict.fromkeys(sides, 1), dict.fromkeys(sides, ENGINES), {}, TIMEOUT_S)
    if not settles:
        limits = limits._replace(settle_s=0.0)
    controller = RoleController(policy, limits=limits)
    starts = Starts(make=scenario.node, start_s=START_S, come=come)
    served = cluster.run(requests, controller=controller, starts=starts)
    scaler = cluster.roles.scaler
    assert scaler is not None
    return Played(
        kept(served, FLEET.ttft_s, FLEET.tpot_s),
        scaler.engine_s(seconds) / HOUR_S,
        scaler.scaled,
        sum(each.restarts for each in served),
        served,
    )


def smallest(requests: Sequence[Waiting], seconds: float, say: Callable[[str], None]) -> Played:
    """The smallest fixed fleet that keeps `KEPT`; of several of one size, the best."""
    best, decode_engines = None, (5, 6, 4)
    for engines in range(ENGINES, 2, -1):
        runs = list[Played]()
        for decode in decode_engines:
            if decode < engines and (not runs or runs[-1].kept < KEPT):
                runs.append(fixed(requests, engines - decode, decode, seconds))
                say(f"fixed {engines - decode}P{decode}D: {runs[-1].kept:.4f}")
        largest = max(runs, key=lambda run: run.kept)
        if largest.kept < KEPT:
            break
        best = largest
    if best is None:
        raise ValueError(f"{ENGINES} engines keep less than {KEPT:.0%} in time")
    return best


def mean_request(requests: Sequence[Waiting]) -> tuple[float, float, float]:
    """Seconds of prefill, mean of squared tokens by the square of the mean, tokens of the answer."""
    count = len(requests)
    tokens = sum(each.tokens for each in requests) / count
    squares = sum(each.tokens**2 for each in requests) / count / tokens**2
    answer = sum(each.max_tokens for each in requests) / count
    return prompt_s(FLEET.costs, tokens, squares), squares, answer
