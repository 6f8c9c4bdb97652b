# SPDX-License-Identifier: Apache-2.0
"""`pressure`: an engine moves to the side that is near its promise, if the other side can spare it. The default."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Move
from scheduler_plugins.router.roles.group import Group, GroupPolicy, Work

HIGH = 0.8
"""A side with more pressure than this needs help. No side gives an engine that would bring it above this."""
TURN = 0.95
"""The side that got the last engine gives one back only if the other side has more pressure than this. Between `HIGH` and
this no promise is missed, and near the right ratio the two sides would take turns."""
TOGETHER_S = 1.0
"""Engines that got their roles within this time got them from the settings: none of them came last."""
MISSED_S, MISSED, LEAST_SEEN = 60.0, 0.07, 20.0
"""A group that misses or refuses the part `MISSED` of its requests within `MISSED_S` is under a pressure of 1. So help
comes from 0.8 * 0.07 = 5.6 % on, when over half of the tenth is used up that a goal of 90 % in time allows. A part of
fewer than `LEAST_SEEN` requests counts as of that many: one late request must not move an engine. Chosen in the
simulator, as `LOADS_S` is (docs/benchmarks/roles-sim.md)."""
LOADS_S = (20.0, 40.0)
"""A move must suit the load of each of these times. The short one knows a shift, the long one outlasts a burst."""


class Pressure(GroupPolicy):
    """Compares how near each side is to its promise.

    Pressure of prefill is the mean queue in seconds, the front's included, divided by the promised TTFT. Pressure of
    decode is the larger of time per token divided by the promised TPOT, and KV in use divided by the room. Promises
    missed in the last minute are pressure on the side with more mean work for each engine. If a side is above `HIGH`, the
    emptiest engine of the other side moves to it, under three conditions:

    1. The other side stays below `HIGH` with one engine less. Otherwise it would need the engine back.
    2. If the last move brought an engine to the side that would give one, the other side is above `TURN`. Otherwise both
       would take turns near the right ratio.
    3. The load of the last `LOADS_S` seconds is spread more evenly after the move. Otherwise the pressure is a burst,
       and the engine would go back.

    Without known costs of decode steps, only the first two conditions hold.
    """

    def move(self, group: Group) -> Move | None:
        p, d = group.prefill_pressure(), group.decode_pressure()
        works = [group.work(seconds) for seconds in LOADS_S]
        sides = len(group.prefill), len(group.decode)
        missed, mean = _missed(group), group.mean_work(LOADS_S[-1])
        reason = ""
        if max(p, d) <= HIGH and mean is not None and missed / MISSED > HIGH:
            reason = f"{missed:.0%} of the last minute's requests were late or refused; "
            # Both are means. The sequences of a moment would make decode answer for a minute of late prompts.
            if mean.prefill / max(1, sides[0]) >= mean.decode / max(1, sides[1]):
                p = max(p, missed / MISSED)
            else:
                d = max(d, missed / MISSED)
        if max(p, d) <= HIGH:
            return None
        if p >= d:
            source, target, left = Role.DECODE, Role.PREFILL, group.decode_pressure(fewer=1)
        else:
            source, target, left = Role.PREFILL, Role.DECODE, group.prefill_pressure(fewer=1)
        mover = group.mover(source, target)
        if max(p, d) <= TURN and _got_last(group, source):
            return None
        if (
            mover is None
            or left > HIGH
            or not all(_evens_out(work, sides, source) for work in works)
        ):
            return None
        pressures = f"{reason}prefill {p:.2f}, decode {d:.2f} of the promise (limit {HIGH})"
        load = _load(works, sides)
        return Move(
            mover.name, target, f"{pressures}; {source} has {left:.2f} with one engine less; {load}"
        )


def _got_last(group: Group, side: Role) -> bool:
    """Whether the last engine of the group that changed its role came to this side."""
    last = max(group.members, key=lambda member: member.since_s)
    first_s = min(member.since_s for member in group.members)
    return last.since_s - first_s > TOGETHER_S and last.on(side)


def _missed(group: Group) -> float:
    """Part of the last requests that were refused or came late."""
    seen = group.seen(MISSED_S)
    late = seen.ttft_missed + seen.refusals
    return max(late / max(LEAST_SEEN, seen.ttft_promised + seen.refusals), seen.tpot_missed_share)


def _evens_out(work: Work | None, sides: tuple[int, int], source: Role) -> bool:
    """Whether the fuller side is less full after an engine has left `source`."""
    if work is None:
        return True
    p, d = sides
    step = 1 if source is Role.DECODE else -1
    return work.fullest(p + step, d - step) < work.fullest(p, d)


def _load(works: Sequence[Work | None], sides: tuple[int, int]) -> str:
    """The load of each of `LOADS_S`, in words."""
    parts = [
        f"{work.prefill:.1f} and {work.decode:.1f} ({seconds:.0f} s)"
        for work, seconds in zip(works, LOADS_S, strict=True)
        if work is not None
    ]
    if not parts:
        return "the load is not known"
    return f"{sides[0]} prefill and {sides[1]} decode engines have work for {', '.join(parts)}"
