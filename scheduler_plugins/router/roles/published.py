# SPDX-License-Identifier: Apache-2.0
"""Role policies as published, and `fixed`, the control in comparisons."""

from __future__ import annotations

from typing import ClassVar

from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Fleet, Member, Move, RolePolicy
from scheduler_plugins.router.roles.group import Group, GroupPolicy

FULL, FREE = 0.8, 0.4
"""A side above `FULL` of its promise overflows. Below `FREE` it needs no help."""


class Mixed(GroupPolicy):
    """Overflow makes an engine of the other side serve both sides. When the overflow is gone, it goes home.

    A side overflows above `FULL` of its promise. The emptiest engine of the other side then gets role `both`. It gets
    its home role again when the side that it helps is below `FREE`. Source: Splitwise, mixed pool.
    """

    def move(self, group: Group) -> Move | None:
        p, d = group.prefill_pressure(), group.decode_pressure()
        pressures = f"prefill {p:.2f}, decode {d:.2f} of the promise"
        if max(p, d) > FULL:
            source = Role.DECODE if p >= d else Role.PREFILL
            mover = group.mover(source, Role.BOTH)
            return (
                None if mover is None else Move(mover.name, Role.BOTH, f"{pressures}; it overflows")
            )
        for member in group.members:
            if member.role is Role.BOTH and member.home is not Role.BOTH and _free(member, p, d):
                return Move(member.name, member.home, f"{pressures}; no help is needed")
        return None


def _free(member: Member, p: float, d: float) -> bool:
    """Whether a mixed engine can go home."""
    helped = d if member.home is Role.PREFILL else p
    return member.home in member.may and helped < FREE


MIX_S = (60.0, 180.0, 600.0)
"""Windows, tried in order: the first one with `ENOUGH` answers gives the mix of requests."""
ENOUGH = 200
GAIN = 0.15
"""A move must lower the utilisation of the fuller side by this part."""


class Ratio(GroupPolicy):
    """Divides the engines of a group as its work is divided.

    Work of a request is `T_p` seconds of prefill, and `T_d = tokens * step / batch` seconds of decode, at the largest
    batch that keeps the promised TPOT and the room for KV. The best division has the smallest utilisation of the fuller
    side. Source: P/D-Serve, `nP:nD = T_p:T_d`.
    """

    def move(self, group: Group) -> Move | None:
        enough = [seconds for seconds in MIX_S if group.seen(seconds).answers >= ENOUGH]
        work = group.mix(enough[0]) if enough else None
        if work is None:
            return None
        p, d = len(group.prefill), len(group.decode)
        best = min(range(1, p + d), key=lambda k: work.fullest(k, p + d - k), default=p)
        if best == p or work.fullest(best, p + d - best) > (1 - GAIN) * work.fullest(p, d):
            return None
        source, target = (Role.DECODE, Role.PREFILL) if best > p else (Role.PREFILL, Role.DECODE)
        mover = group.mover(source, target)
        if mover is None:
            return None
        cause = (
            f"a request takes {work.prefill:.3f} s of prefill and {work.decode:.3f} s of decode; "
            f"{best}:{p + d - best} fits it better than {p}:{d}"
        )
        return Move(mover.name, target, cause)


IDLE, BUSY = 0.1, 0.7
"""A side below `IDLE` gives an engine to a side above `BUSY`."""
OVER_S = 60.0


class Tetri(GroupPolicy):
    """Flips an engine of a side that used under 10 % of its capacity in the last minute, if the other used over 70 %.

    Capacity is work per time at the largest batch that keeps the promises. By busy time, an engine that decodes one
    sequence is fully busy, and never flips. TetriInfer's second level moves queued requests away from an engine before
    it is a hot spot. Here the route policy `on_demand` does it: requests wait in the router and not at engines, so
    nothing has to move. Source: TetriInfer, instance flip.
    """

    route: ClassVar[str] = "on_demand"

    def move(self, group: Group) -> Move | None:
        work = group.work(OVER_S)
        if work is None:
            return None
        p = work.prefill / max(1, len(group.prefill))
        d = work.decode / max(1, len(group.decode))
        if p < IDLE and d > BUSY:
            source, target = Role.PREFILL, Role.DECODE
        elif d < IDLE and p > BUSY:
            source, target = Role.DECODE, Role.PREFILL
        else:
            return None
        mover = group.mover(source, target)
        if mover is None:
            return None
        cause = f"prefill used {p:.0%} and decode {d:.0%} of its capacity in {OVER_S:.0f} s"
        return Move(mover.name, target, cause)


class Fixed(RolePolicy):
    """Never proposes a move. The controller still repairs a side whose engines are all dead."""

    def decide(self, fleet: Fleet, now_s: float) -> list[Move]:
        return []
