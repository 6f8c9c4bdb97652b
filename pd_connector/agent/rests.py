# SPDX-License-Identifier: Apache-2.0
"""How long a worker rests in steps that compute nothing.

vLLM steps without pause while KV is under way, also when there is nothing to compute. A step costs
a few milliseconds of a processor, and of Python's lock, which the agent needs to move that KV.
"""

from collections.abc import Callable

FIRST_S = 0.005
LONGEST_S = 0.02
"""Who comes while a worker rests, a new request above all, waits until the rest is over. Each rest
is twice as long as the one before, so that this is no longer than nothing has come before, up to
here."""


class Rests:
    """The rests of one worker."""

    def __init__(self, *, alone: bool) -> None:
        """
        Args:
            alone: no other rank waits for this one in each step. Where there are others, one's rest
                delays what another has to tell, and rests do not grow.
        """
        self._longest_s = LONGEST_S if alone else FIRST_S
        self._next_s = FIRST_S

    def stirred(self) -> None:
        """Something has come, or is being computed: the next rest is a short one."""
        self._next_s = FIRST_S

    def take(self, rest: Callable[[float], bool]) -> None:
        """Rest once.

        Args:
            rest: waits for news, not longer than so many seconds; returns whether it was over
                before its time.
        """
        if rest(self._next_s):
            self.stirred()
        else:
            self._next_s = min(2 * self._next_s, self._longest_s)
