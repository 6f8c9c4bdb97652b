# SPDX-License-Identifier: Apache-2.0
"""The CPU time of one decision about roles."""

from __future__ import annotations

import statistics
import time
from random import Random

from pd_bench.roles.fleets import OPT_13B
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Fleet, Member
from scheduler_plugins.router.roles.controller import RoleController
from scheduler_plugins.router.roles.history import KEPT_S, History
from scheduler_plugins.router.roles.registry import create
from scheduler_plugins.router.roles.scaling import Limits

ENGINES = 64
BAR_MS = 2.0
ROUNDS = 50


def decision_ms(name: str) -> float:
    """Median CPU time of a decision for 64 loaded engines with ten minutes of history, in milliseconds."""
    random, now_s = Random(0), float(KEPT_S)
    nodes = OPT_13B.scenario(ENGINES // 2, ENGINES // 2).nodes()
    for node in nodes:
        for n in range(30):
            node.load.prefill_sent(f"{n}", 1000, random.random(), now_s)
            node.load.decode_sent(f"{n}", 1000, 200)
    history = History()
    for n in range(KEPT_S * 10):
        history.arrived(n / 10, "", 1000, 2.0, 0.1)
        history.prefilled(n / 10, "", 1000, 1.0, 2.0)
        history.answered(n / 10, "", 200, 0.05, 0.1)
    able = frozenset((Role.PREFILL, Role.DECODE, Role.BOTH))
    members = [Member(node, node.role, node.role, able) for node in nodes]
    policy, sides = create(name), dict.fromkeys((Role.PREFILL, Role.DECODE), ENGINES)
    limits = Limits(dict.fromkeys(sides, 1), sides) if policy.scales else None
    controller, fleet = RoleController(policy, limits=limits), Fleet(members, history)
    took_ms = []
    for n in range(ROUNDS):
        begun_s = time.thread_time()
        controller.moves(fleet, now_s + n * 1e-3)
        took_ms.append((time.thread_time() - begun_s) * 1e3)
    return statistics.median(took_ms)
