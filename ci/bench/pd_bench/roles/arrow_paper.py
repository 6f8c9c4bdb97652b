# SPDX-License-Identifier: Apache-2.0
"""`arrow_paper`: Arrow's role policy as published. It shows what the margin of `arrow` and the controller's guards are for."""

from __future__ import annotations

from typing import ClassVar

from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.base import Move
from scheduler_plugins.router.roles.group import Group, GroupPolicy


class ArrowPaper(GroupPolicy):
    """Arrow's rules verbatim, without margin; `play` runs them without guards, as they are published.

    If no decode engine keeps the promised TPOT, and prefill keeps TTFT with one engine less or has more engines than
    decode, the prefill engine with the least queue goes to decode. A decode engine without sequences goes to prefill.
    Source: xllm-service, `SLO_AWARE`.
    """

    route: ClassVar[str] = "arrow"

    def move(self, group: Group) -> Move | None:
        ttft_s, tpot_s = group.promises
        prefill, decode, now_s = group.prefill, group.decode, group.now_s
        seen = group.seen(60.0)
        prompt = round(seen.tokens / seen.arrivals) if seen.arrivals else 0
        steps_s = [
            member.view.costs.decode_step_s(member.view.batch + 1, member.view.context + prompt)
            for member in decode
        ]
        if len(prefill) > 1 and steps_s and min(steps_s) > tpot_s:
            wait_s = sum(member.view.queued_s(now_s) for member in prefill) / len(prefill)
            kept = wait_s < ttft_s * (len(prefill) - 1) / len(prefill)
            mover = group.mover(
                Role.PREFILL, Role.DECODE, lambda member: member.view.queued_s(now_s)
            )
            if mover is not None and (kept or len(decode) < len(prefill)):
                cause = f"the best decode engine has {min(steps_s):.3f} s a token"
                return Move(mover.name, Role.DECODE, cause)
        empty = [
            member for member in decode if not member.view.batch and Role.PREFILL in member.may
        ]
        if len(decode) > 1 and empty and empty[0].role is Role.DECODE:
            return Move(empty[0].name, Role.PREFILL, "it has no sequence to decode")
        return None
