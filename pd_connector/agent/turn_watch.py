# SPDX-License-Identifier: Apache-2.0
"""When the agent's thread began its last turn, and whether it counts as hung."""

import time

GRACE_S = 1.0


class TurnWatch:
    """Written by the agent's thread, read by the engine's.

    A machine that was stopped, or moved to another host, goes on with a clock that has jumped: the agent's turn
    looks overdue, although it had no chance to end. An overdue turn therefore has GRACE_S seconds more,
    from the moment at which the engine's thread finds it so.

    Args:
        timeout_s: how long a turn may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._overdue = self._found_at = float(
            "-inf"
        )  # a turn, by its begin, and when that was found

    def begin(self, in_s: float = 0.0) -> float:
        """A turn begins, in `in_s` seconds. Returns the time now, in seconds, monotonic."""
        now = time.monotonic()
        self._began = now + in_s
        return now

    def left_s(self) -> float:
        """Seconds until the agent counts as hung; below 0: it does."""
        now, began = time.monotonic(), self._began
        left_s = began + self._timeout_s - now
        if left_s >= 0:
            return left_s
        if self._overdue != began:
            self._overdue, self._found_at = began, now
        return self._found_at + GRACE_S - now
