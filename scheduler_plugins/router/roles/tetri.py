# SPDX-License-Identifier: Apache-2.0
"""`tetri`: TetriInfer's flip of an idle engine."""

from __future__ import annotations

from typing import ClassVar

from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Move
from scheduler_plugins.router.roles.group import Group, GroupPolicy

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
        return _move(group)


def _move(group: Group) -> Move | None:
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
