# SPDX-License-Identifier: Apache-2.0
"""Transfers of random pages between all ranks of a producer and of a consumer."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from chaos.faults import PAGES
from chaos.ranks import Ranks

MOST_PAGES = 14


class Drawn(NamedTuple):
    """One transfer."""

    name: str
    theirs: list[int]  # the producer's pages
    ours: list[int]  # the pages to fill


class Transfers:
    """Begins transfers.

    Args:
        choices: the random number generator.
        apart: whether transfers at the same time must not share pages of the producer. Otherwise they can, like
            prompts.
    """

    def __init__(self, ranks: Ranks, choices: random.Random, *, apart: bool) -> None:
        self._ranks = ranks
        self._random = choices
        self._apart = apart
        self._numbers = itertools.count()

    def begin(self, count: int) -> list[set[str]]:
        """Offer and load transfers. Returns the names that each consumer must report."""
        draws = self.draw(count)
        self.offer(draws)
        return self.load(draws, wait=False)

    def begin_waiting(self, count: int) -> tuple[list[set[str]], Callable[[], None]]:
        """Load transfers of prefills that have not begun. Also returns the function that offers them."""
        draws = self.draw(count)
        return self.load(draws, wait=True), lambda: self.offer(draws)

    def draw(self, count: int) -> list[Drawn]:
        free, kept = (iter(self._random.sample(range(PAGES), PAGES)) for _ in range(2))
        draws = []
        for _ in range(count):
            size = self._random.randrange(1, MOST_PAGES + 1)
            ours = [*itertools.islice(free, size)]
            shared = self._random.sample(range(PAGES), size)
            theirs = [*itertools.islice(kept, size)] if self._apart else shared
            draws.append(Drawn(f"transfer {next(self._numbers)}", theirs, ours))
        return draws

    def offer(self, draws: Sequence[Drawn], *, final: bool = True) -> None:
        """Offer the transfers; if a prefill has not ended, half of its pages."""
        for producer in self._ranks.producers:
            producer.call("offer", transfers=[draw[:2] for draw in draws], final=final)

    def load(self, draws: Sequence[Drawn], *, wait: bool) -> list[set[str]]:
        """Load the transfers. Returns the names that each consumer must report."""
        host, ports = self._ranks.hosts[0], self._ranks.ports
        for consumer in self._ranks.consumers:
            consumer.call("load", transfers=draws, host=host, ports=ports, wait=wait)
        return [{draw.name for draw in draws} for _ in self._ranks.consumers]
