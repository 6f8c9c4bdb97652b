# SPDX-License-Identifier: Apache-2.0
"""`arrow`: Arrow's flips by promises, with a margin."""

from __future__ import annotations

from typing import ClassVar

from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Move
from scheduler_plugins.router.roles.group import Group, GroupPolicy, decode_part

MARGIN = 0.8
"""A promise counts as missed above this part of it."""
SPARE = 0.4
"""A side gives an engine only if it stays below this part of its promise. Else a burst at both sides moves engines to
and fro."""


class Arrow(GroupPolicy):
    """Flips an engine when a whole side misses its promise.

    If no decode engine keeps `MARGIN` of the promised TPOT (or of its room), and prefill keeps `SPARE` of the promised
    TTFT with one engine less, the least loaded prefill engine goes to decode. If prefill does not keep it, and decode
    does with one engine less, decode is consolidated: its emptiest engine goes to prefill. The route policy `arrow`
    belongs to it. Source: Arrow; xllm-service's `SLO_AWARE` has the first engine instead of the least loaded, no
    margin, and waits until a decode engine is empty.
    """

    route: ClassVar[str] = "arrow"

    def move(self, group: Group) -> Move | None:
        _, tpot_s = group.promises
        p = group.prefill_pressure()
        d = min((decode_part(member, tpot_s) for member in group.decode), default=0.0)
        if d > MARGIN:
            left = group.prefill_pressure(fewer=1)
            if left > SPARE or (mover := group.mover(Role.PREFILL, Role.DECODE)) is None:
                return None
            cause = f"the best decode engine at {d:.2f} of its promise; prefill keeps {left:.2f} with one less"
            return Move(mover.name, Role.DECODE, cause)
        left = group.decode_pressure(fewer=1)
        if p <= MARGIN or left > SPARE or (mover := group.mover(Role.DECODE, Role.PREFILL)) is None:
            return None
        cause = f"prefill at {p:.2f} of its promise; decode keeps {left:.2f} with one less"
        return Move(mover.name, Role.PREFILL, cause)
