# SPDX-License-Identifier: Apache-2.0
"""`ratio`: P/D-Serve's balance of stage rates."""

from __future__ import annotations

from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Move
from scheduler_plugins.router.roles.group import Group, GroupPolicy

MIX_S = (60.0, 180.0, 600.0)
"""The mix of requests is that of the first of these times with `ENOUGH` answers."""
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
        return _move(group)


def _move(group: Group) -> Move | None:
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
