# SPDX-License-Identifier: Apache-2.0
"""How long a worker pauses in engine steps that compute nothing.

Engines step without pause while KV is under way, also when there is nothing to compute. Each empty
step costs a few milliseconds of a processor and of Python's lock. The agent needs both to move
that KV.
"""

from collections.abc import Callable

FIRST_S = 0.005
LONGEST_S = 0.02
"""Pauses double from FIRST_S to LONGEST_S. A new request waits until the current pause has ended;
because pauses double, that wait is never longer than the idle time before it."""


class IdleBackoff:
    """The pauses of one worker. Used by the engine's thread."""

    def __init__(self, *, alone: bool) -> None:
        """
        Args:
            alone: the engine has one rank. With several ranks each step ends with the slowest one,
                so a long pause of one rank delays what another has to report: pauses stay at
                FIRST_S then.
        """
        self._longest_s = LONGEST_S if alone else FIRST_S
        self._next_s = FIRST_S

    def reset(self) -> None:
        """There is work: the next pause is a short one."""
        self._next_s = FIRST_S

    def pause(self, wait: Callable[[float], bool]) -> None:
        """Pause once.

        Args:
            wait: waits for an outcome, for the given number of seconds at most; returns whether it ended early.
        """
        if wait(self._next_s):
            self.reset()
        else:
            self._next_s = min(2 * self._next_s, self._longest_s)
