# SPDX-License-Identifier: Apache-2.0
"""Progress of a comparison of many runs: the present run, the number of runs, and the time for the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from pd_bench.report import Say

Count = Callable[[], None]
"""Called with each answer."""

EVERY_S = 15.0


class Runs:
    """Counts the runs of a comparison.

    Args:
        total: runs of the whole comparison.
        say: where lines go: one when a run begins, and one every `every_s` seconds within it.
        clock: in seconds.
    """

    def __init__(
        self,
        total: int,
        say: Say,
        *,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._say = say
        self._every_s = every_s
        self._clock = clock
        self._begun_s = clock()
        self._ended = 0

    @asynccontextmanager
    async def run(self, name: str, requests: int) -> AsyncIterator[Count]:
        """Covers the next run. Yields a function to call with each answer.

        Args:
            requests: the number of requests of the run.
        """
        place = f"run {self._ended + 1} of {self._total}"
        self._say(f"{place}: {name}, {requests} requests{self._left()}")
        answered, begun_s = 0, self._clock()

        def count() -> None:
            nonlocal answered
            answered += 1

        async def tell() -> None:
            while True:
                await asyncio.sleep(self._every_s)
                took_s = self._clock() - begun_s
                self._say(f"  {place}: {answered} of {requests} answered, {took_s:.0f} s")

        telling = asyncio.create_task(tell())
        try:
            yield count
        finally:
            telling.cancel()
            with suppress(asyncio.CancelledError):
                await telling
        self._ended += 1

    def _left(self) -> str:
        """Estimated time for the rest, from the mean of the runs so far; empty before the first."""
        if not self._ended:
            return ""
        each_s = (self._clock() - self._begun_s) / self._ended
        return f"; about {each_s * (self._total - self._ended) / 60:.0f} minutes left"
