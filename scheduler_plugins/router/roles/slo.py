# SPDX-License-Identifier: Apache-2.0
"""`slo`: gives each side as many engines as the expected requests need to keep their promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, exp, inf, sqrt
from typing import ClassVar, NamedTuple

from scheduler_plugins.cost.closed import (
    engines_for_answers,
    engines_for_prompts,
    mean_wait_s,
)
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Fleet, Move, RolePolicy, Scale
from scheduler_plugins.router.roles.group import Group, groups

BIN_S = 10
TREND_S = 600.0
SURE = 2.0
"""A slope counts from this many standard errors on. A smaller one is noise, and would move the rate to and fro."""
JUMP_S, JUMP = 60, 4.0
"""If the last minute is this many standard errors off the trend, the trend is over, and the last minute counts alone."""
MIX_S = 600.0
"""The mean request is taken over this time, in seconds."""
SPARE, MARGIN = 0.2, 0.15
"""An engine is stopped only if the others have this part of their time to spare, and would be enough for this much more
load. The second keeps a constant load from starting and stopping an engine to and fro."""
LATE = 0.02
"""Part of the prompts that may come late by the closed form. It leaves room for what the form does not know."""
DEVIATIONS = 3.0
"""Standard deviations of the number of sequences for which decode engines have room."""
QUEUE_S = 60.0
"""What waits beyond the promise is worked off within this time after new engines have come."""
LEAST, MOST = 0.5, 2.0
"""Bounds of the corrections. Beyond them the costs are wrong, and want measuring."""
SLOWLY_S = 300.0
"""Time constant of the corrections."""
OVER_S = 60.0
"""Actual times are taken over this time, in seconds."""
ENOUGH = 20.0
"""Fewer first tokens or answers than this correct nothing."""
MOST_ENGINES = 10_000


class _Load(NamedTuple):
    """What is expected of a group's requests."""

    per_s: float
    prompt_s: float  # seconds of prefill for one request, corrected
    squares: float  # mean of the squared prompt seconds, divided by the square of the mean
    answer_s: float  # seconds of a full decode engine for one request, corrected
    batch: float  # sequences of a full engine


@dataclass
class _Correction:
    """Actual seconds divided by those that the costs predict, for each side of a group."""

    prefill: float = 1.0
    decode: float = 1.0
    at_s: float = -inf


class Slo(RolePolicy):
    """Starts engines before the promises break, and stops those that are not needed.

    1. Requests a second at the time when an engine that is requested now would serve: the trend of the last ten
       minutes, or the mean of earlier days at that minute, if that is more.
    2. Engines of that load: seconds of prefill and of decode for the mean request, by the costs, corrected by actual /
       expected time to the first token and time per token.
    3. Room for bursts: prefill gets engines until at most `LATE` of the prompts would wait too long, decode until their
       batches hold a Poisson number of sequences.
    4. Engines for prompts that already wait beyond the promise, unless the present engines finish them before new
    engines come.

    A side is made smaller only if the others have `SPARE` of their time left. Source of 1 and 2: Dynamo's SLA planner,
    whose correction ignores waiting prompts.
    """

    scales: ClassVar[bool] = True

    def __init__(self) -> None:
        self._corrections: dict[str, _Correction] = {}

    def decide(self, fleet: Fleet, now_s: float) -> Sequence[Move | Scale]:
        proposals = list[Move | Scale]()
        for group in groups(fleet, now_s):
            proposals += self._sides(group, fleet, now_s)
        return proposals

    def _sides(self, group: Group, fleet: Fleet, now_s: float) -> list[Scale]:
        counts = group.history.arrivals(now_s, TREND_S, group.name, BIN_S)
        ahead_s = trend(counts, fleet.start_s)
        per_s = max(ahead_s, fleet.usual_per_s.get(group.name, 0.0))
        load = self._load(group, per_s, now_s)
        if load is None:
            quiet = bool(counts) and not any(counts) and len(counts) * BIN_S >= QUEUE_S
            if not quiet:
                return []  # nothing is known yet
            load = _Load(0.0, 0.0, 1.0, 0.0, 1.0)
        come = {
            coming.role: coming.engines for coming in fleet.coming if coming.group == group.name
        }
        correction = self._corrections.get(group.name, _Correction())
        text = (
            f"{load.per_s:.2f} requests a second in {fleet.start_s:.0f} s; one takes {load.prompt_s:.3f} s of prefill "
            f"({correction.prefill:.2f} of expected) and {load.answer_s:.3f} s of decode ({correction.decode:.2f})"
        )
        scales = list[Scale]()
        for role, serving in ((Role.PREFILL, group.prefill), (Role.DECODE, group.decode)):
            present = len(serving) + come.get(role, 0)
            waits = self._waits(group, role, load, fleet.start_s)
            need = _engines(group, role, load) + waits
            kept = max(
                _engines(group, role, load._replace(per_s=load.per_s * (1 + MARGIN))),
                ceil(_busy(role, load) / (1 - SPARE)),
            )
            kept += waits
            engines = need if need > present else min(present, kept)
            more = f", {waits} of them for what waits" if waits else ""
            scales.append(Scale(group.name, role, engines, f"{text}; {need} needed{more}"))
        return scales

    def _load(self, group: Group, per_s: float, now_s: float) -> _Load | None:
        each, seen = group.mix(MIX_S), group.seen(MIX_S)
        if each is None or not each.prefill:
            return None
        self._correct(group, now_s)
        correction = self._corrections[group.name]
        squares = seen.squares * seen.prefills / max(1.0, seen.uncached) ** 2
        prompt, answer = seen.tokens / seen.arrivals, seen.answered / max(1.0, seen.answers)
        batch = group.largest_batch(prompt + answer / 2)
        return _Load(
            per_s,
            each.prefill * correction.prefill,
            max(1.0, squares),
            each.decode * correction.decode,
            batch,
        )

    def _waits(self, group: Group, role: Role, load: _Load, start_s: float) -> int:
        """Engines for prompts that still wait beyond the promise after the present engines have worked for
        `start_s`."""
        if role is Role.PREFILL:
            serving = len(group.prefill)
            late_s = (max(0.0, group.prefill_pressure() - 1) if serving else 0.0) * serving
            late_s *= group.promises[0]
        else:
            serving = len(group.decode)
            late_s = max(0.0, group.decoding() - serving) * load.answer_s * load.batch
        late_s -= max(0.0, serving - _busy(role, load)) * start_s
        return ceil(late_s / QUEUE_S) if late_s > 0 else 0

    def _correct(self, group: Group, now_s: float) -> None:
        """Correct the costs by actual and expected times. Nothing is corrected while prompts wait beyond their promise:
        times then show a lack of engines, not the cost of a request."""
        correction = self._corrections.setdefault(group.name, _Correction(at_s=now_s))
        weight = 1 - exp(-max(0.0, now_s - correction.at_s) / SLOWLY_S)
        correction.at_s = now_s
        seen, each, costs = group.seen(OVER_S), group.mix(OVER_S), group.costs
        if each is None or group.prefill_pressure() > 1 or group.decode_pressure() > 1:
            return
        per_s = seen.arrivals / max(1.0, seen.seconds)
        ttft_s, tpot_s = group.promises
        if seen.ttft_promised >= ENOUGH and group.prefill:
            actual_s = seen.ttft_ratios / seen.ttft_promised * ttft_s - costs.d0
            squares = seen.squares * seen.prefills / max(1.0, seen.uncached) ** 2
            factor = _factor(actual_s, per_s, each.prefill, squares, len(group.prefill))
            correction.prefill += weight * (factor - correction.prefill)
        if seen.tpot_promised >= ENOUGH and group.decode:
            context = seen.tokens / seen.arrivals + seen.answered / max(1.0, seen.answers) / 2
            more_s = costs.d1 + costs.d2 * context
            per_engine = per_s * seen.answered / max(1.0, seen.answers) / len(group.decode)
            step_s = costs.d0 / max(0.1, 1 - per_engine * more_s)
            factor = seen.tpot_ratio * tpot_s / max(1e-9, step_s)
            correction.decode += weight * (min(MOST, max(LEAST, factor)) - correction.decode)


def _factor(actual_s: float, per_s: float, each_s: float, squares: float, engines: int) -> float:
    """The factor of a prompt's seconds that makes the predicted mean time to the first token equal to the actual
    mean."""
    low, high = LEAST, MOST
    for _ in range(20):
        middle = (low + high) / 2
        longer_s = middle * each_s
        expected_s = longer_s + mean_wait_s(engines, per_s * longer_s, longer_s, squares)
        low, high = (middle, high) if expected_s < actual_s else (low, middle)
    return (low + high) / 2


def _busy(role: Role, load: _Load) -> float:
    """Engines that the load keeps busy."""
    return load.per_s * (load.prompt_s if role is Role.PREFILL else load.answer_s)


def _engines(group: Group, role: Role, load: _Load) -> int:
    """Engines that keep the promise under this load; 0: no request comes."""
    if not load.per_s:
        return 0
    if role is Role.DECODE:
        return ceil(engines_for_answers(_busy(role, load), load.batch, DEVIATIONS))
    longest_s = group.promises[0] - load.prompt_s
    wait_s = max(group.promises[0] / 4, longest_s)
    return engines_for_prompts(
        _busy(role, load), load.prompt_s, load.squares, wait_s, LATE, MOST_ENGINES
    )


def trend(counts: Sequence[float], ahead_s: float) -> float:
    """Requests a second, `ahead_s` seconds from now, by a straight line through the counts of the last minutes.

    Args:
        counts: requests of each `BIN_S` seconds, oldest first; empty: none came.
    """
    bins = len(counts)
    if bins < 2:
        return sum(counts) / max(1, bins) / BIN_S
    mean = sum(counts) / bins
    # Requests come in bursts: their counts spread more than those of a Poisson process. Differences leave the trend out.
    steps = sum((after - before) ** 2 for before, after in pairwise(counts)) / (2 * (bins - 1))
    burst = max(1.0, steps / max(mean, 1e-9))
    middle, squares = (bins - 1) / 2, bins * (bins**2 - 1) / 12
    slope = sum((n - middle) * count for n, count in enumerate(counts)) / squares
    if abs(slope) < SURE * sqrt(burst * mean / squares):
        slope = 0.0
    last = JUMP_S // BIN_S
    line = max(0.0, mean + slope * (bins - 1 - middle))
    expected, came = line * last, sum(counts[-last:])
    if bins >= last and abs(came - expected) > JUMP * sqrt(burst * max(1.0, expected)):
        return came / JUMP_S
    return max(0.0, line + slope * (0.5 + ahead_s / BIN_S)) / BIN_S
