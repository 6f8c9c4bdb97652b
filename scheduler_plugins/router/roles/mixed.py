# SPDX-License-Identifier: Apache-2.0
"""`mixed`: Splitwise's mixed pool."""

from __future__ import annotations

from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Member, Move
from scheduler_plugins.router.roles.group import Group, GroupPolicy

FULL, FREE = 0.8, 0.4
"""A side above `FULL` of its promise overflows. Below `FREE` it needs no help."""


class Mixed(GroupPolicy):
    """Overflow makes an engine of the other side serve both sides. When the overflow is gone, it goes home.

    A side overflows above `FULL` of its promise. The emptiest engine of the other side then gets role `both`. It gets
    its home role again when the side that it helps is below `FREE`. Source: Splitwise, mixed pool.
    """

    def move(self, group: Group) -> Move | None:
        return _move(group)


def _move(group: Group) -> Move | None:
    p, d = group.prefill_pressure(), group.decode_pressure()
    told = f"prefill {p:.2f}, decode {d:.2f} of the promise"
    if max(p, d) > FULL:
        source = Role.DECODE if p >= d else Role.PREFILL
        mover = group.mover(source, Role.BOTH)
        return None if mover is None else Move(mover.name, Role.BOTH, f"{told}; it overflows")
    for one in group.members:
        if one.role is Role.BOTH and one.home is not Role.BOTH and _free(one, p, d):
            return Move(one.name, one.home, f"{told}; no help is needed")
    return None


def _free(member: Member, p: float, d: float) -> bool:
    """Whether a mixed engine can go home."""
    helped = d if member.home is Role.PREFILL else p
    return member.home in member.may and helped < FREE
