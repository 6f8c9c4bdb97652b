# SPDX-License-Identifier: Apache-2.0
"""`fixed`: no engine changes its role. The control in comparisons."""

from __future__ import annotations

from scheduler_plugins.router.roles.base import Fleet, Move, RolePolicy


class Fixed(RolePolicy):
    """Never proposes a move. The controller still repairs a side whose engines are all dead."""

    def decide(self, fleet: Fleet, now_s: float) -> list[Move]:
        return []
