# SPDX-License-Identifier: Apache-2.0
"""Pauses of a worker in engine steps that compute nothing.

Engines step without pause while KV is under way, also if there is nothing to compute. Each empty step takes a few
milliseconds of a processor and of Python's lock. The agent needs both to move that KV.
"""

from collections.abc import Callable

FIRST_S = 0.005
LONGEST_S = 0.02
"""Seconds. Pauses double from FIRST_S to LONGEST_S. A new request waits for the end of the current pause: never longer than
the idle time before it."""


class IdleBackoff:
    """The pauses of one worker. Used by the engine's thread."""

    def __init__(self, *, alone: bool) -> None:
        """
        Args:
            alone: whether the engine has only one rank. With several ranks each step ends with the slowest rank, so one
                rank's pause delays the others. Pauses stay at FIRST_S then.
        """
        self._longest_s = LONGEST_S if alone else FIRST_S
        self._next_s = FIRST_S

    def reset(self) -> None:
        """There is work: the next pause is short."""
        self._next_s = FIRST_S

    def pause(self, wait: Callable[[float], bool]) -> None:
        """Pause once.

        Args:
            wait: waits for an outcome, at most the given number of seconds. Returns whether it ended early.
        """
        if wait(self._next_s):
            self.reset()
        else:
            self._next_s = min(2 * self._next_s, self._longest_s)
