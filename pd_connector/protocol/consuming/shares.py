# SPDX-License-Identifier: Apache-2.0
"""How the landing slots of one rank are shared between producers."""

from collections import Counter
from collections.abc import Iterable

_TIMES = 3
"""A producer has at most this many times the slots that are free afterwards. More would leave fewer for
others. Fewer would leave more unused: of 16 slots a producer has 12 at most while no other has any."""


class Shares:
    """What each producer (an engine, with all of its ranks) has at one moment, and may have besides.

    A producer that stops keeps its slots until a deadline. So none may have all of them: the next one always
    finds some free. The limit depends on what is free ("dynamic thresholds": Choudhury and Hahne, IEEE/ACM
    Transactions on Networking 6(2), 1998), because most producers want nothing most of the time.

    Slots of prefills that are under way are counted apart. They may lie unused for long, so half of all slots
    are not lent to such prefills.

    Args:
        slots: all of them.
        free: those that are free.
        alone: whether there is one producer only, and it may have all.
        has: slots of producers, by engine id and whether their prefill is under way.
    """

    def __init__(
        self, slots: int, free: int, *, alone: bool, has: Iterable[tuple[str, bool, int]]
    ) -> None:
        self._kept = (slots + 1) // 2
        self._free = free
        self._alone = alone
        self._has: Counter[tuple[str, bool]] = Counter()
        for producer, early, count in has:
            self._has[producer, early] += count

    def room(self, producer: str, *, early: bool) -> int:
        """How many more slots this producer may have now.

        Args:
            early: for prefills that are under way. At least one slot is left for those that have ended.
        """
        room = self._part(producer, self._free, early=False)
        if early:
            room = min(room - 1, self._part(producer, self._free - self._kept, early=True))
        return max(0, room)

    def _part(self, producer: str, free: int, *, early: bool) -> int:
        if self._alone:
            return free
        has = self._has[producer, early]
        part = (_TIMES * free - has) // (_TIMES + 1)
        return max(part, min(free, 1)) if not has else part

    def take(self, producer: str, *, early: bool) -> None:
        """One free slot is lent to this producer."""
        self._free -= 1
        self._has[producer, early] += 1
