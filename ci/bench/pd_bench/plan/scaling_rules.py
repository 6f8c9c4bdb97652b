# SPDX-License-Identifier: Apache-2.0
"""What `slo` is compared with: a rule that knows the future, and Dynamo's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, inf
from typing import ClassVar

from scheduler_plugins.cost.closed import engines_for_answers, engines_for_prompts
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Fleet, RolePolicy, Scale
from scheduler_plugins.router.roles.group import Group, groups

INTERVAL_S = 180.0
"""Dynamo's planner decides once in this time."""
LATE, DEVIATIONS = 0.02, 3.0
"""As of `slo`: the oracle differs by what it knows."""


class Oracle(RolePolicy):
    """Knows the rate at each time, and the mean request. Has the engines for the highest rate until one that is asked for
    now would serve."""

    scales: ClassVar[bool] = True

    def __init__(
        self, per_s: Callable[[float], float], prompt_s: float, squares: float, answer: float
    ) -> None:
        """`prompt_s`: seconds of the mean prompt; `squares`: see `late_part`; `answer`: mean tokens."""
        self._per_s = per_s
        self._prompt_s, self._squares, self._answer = prompt_s, squares, answer

    def decide(self, fleet: Fleet, now_s: float) -> Sequence[Scale]:
        steps = range(0, int(fleet.start_s) + 10, 10)
        per_s = max(self._per_s(now_s + step) for step in steps)
        scales = list[Scale]()
        for group in groups(fleet, now_s):
            wait_s = group.promises[0] - self._prompt_s
            prefill = engines_for_prompts(
                per_s * self._prompt_s, self._prompt_s, self._squares, wait_s, LATE, 99
            )
            seen = group.seen(600.0)
            context = seen.tokens / max(1.0, seen.arrivals) + self._answer / 2
            busy = per_s * self._answer * group.token_s(context)
            decode = engines_for_answers(busy, group.largest_batch(context), DEVIATIONS)
            cause = f"{per_s:.2f} requests a second"
            scales.append(Scale(group.name, Role.PREFILL, prefill, cause))
            scales.append(Scale(group.name, Role.DECODE, ceil(decode), cause))
        return scales


class Dynamo(RolePolicy):
    """The rule of Dynamo's SLA planner, from its documentation: each interval, engines for the load of the one before.

    Prefill: tokens a second / tokens a second of an engine, times actual / expected time to the first token, which can
    only lower it. Decode: tokens a second / those of an engine at the promised time per token, divided by actual /
    expected. What waits is not seen. Nothing is decided while engines start.
    """

    scales: ClassVar[bool] = True

    def __init__(self) -> None:
        self._at_s = -inf
        self._last: list[Scale] = []

    def decide(self, fleet: Fleet, now_s: float) -> Sequence[Scale]:
        if now_s - self._at_s >= INTERVAL_S and not fleet.coming:
            self._at_s = now_s
            self._last = [
                scale for group in groups(fleet, now_s) for scale in _dynamo(group)
            ] or self._last
        return self._last


def _dynamo(group: Group) -> list[Scale]:
    seen, each = group.seen(INTERVAL_S), group.mix(INTERVAL_S)
    if each is None or not seen.answers or not group.decode:
        return []
    per_s, costs = seen.arrivals / max(1.0, seen.seconds), group.costs
    ttft_s, tpot_s = group.promises
    actual_s = seen.ttft_ratios / max(1.0, seen.ttft_promised) * ttft_s
    prefill = per_s * each.prefill * min(1.0, actual_s / each.prefill)
    answer = seen.answered / seen.answers
    context = seen.tokens / seen.arrivals + answer / 2
    batch = group.decoding() / len(group.decode) * group.largest_batch(context)
    expected_s = costs.d0 + (costs.d1 + costs.d2 * context) * batch
    correction = seen.tpot_ratio * tpot_s / expected_s
    room = group.largest_batch(context)
    fits = (tpot_s / max(1e-9, correction) - costs.d0) / (costs.d1 + costs.d2 * context)
    held = max(1.0, min(room, fits))
    step_s = costs.d0 + (costs.d1 + costs.d2 * context) * held
    decode = per_s * answer * step_s / held
    cause = f"{per_s:.2f} requests a second"
    return [
        Scale(group.name, Role.PREFILL, max(1, ceil(prefill)), cause),
        Scale(group.name, Role.DECODE, max(1, ceil(decode)), cause),
    ]
