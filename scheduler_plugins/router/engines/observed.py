# SPDX-License-Identifier: Apache-2.0
"""Events of requests for role policies and the live page. Workers and routers send them to each other, so each knows
all requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Literal, Protocol

from scheduler_plugins.router.recent_history import RecentHistory
from scheduler_plugins.router.roles.history import History

MOST_EVENTS = 5_000
"""Most events that wait to be sent. Further events are dropped: they would be late anyway."""

Kind = Literal["arrived", "prefilled", "answered", "refused", "overflowed"]
Event = tuple[Kind, str, Sequence[float]]
"""A method of `Observer`, the group, and its other arguments."""
_LENGTHS = {"arrived": 3, "prefilled": 3, "answered": 3, "refused": 0, "overflowed": 0}


class Observer(Protocol):
    """The calls that note requests: the calls of `History`, and `overflowed`."""

    def arrived(
        self, now_s: float, group: str, tokens: int, ttft_slo_s: float, tpot_slo_s: float
    ) -> None: ...

    def prefilled(
        self, now_s: float, group: str, uncached_tokens: int, ttft_s: float, ttft_slo_s: float
    ) -> None: ...

    def answered(
        self, now_s: float, group: str, tokens: int, tpot_s: float, tpot_slo_s: float
    ) -> None: ...

    def refused(self, now_s: float, group: str) -> None: ...

    def overflowed(self, now_s: float, group: str) -> None:
        """A prompt was sent to an engine without a GPU, because all others would be late."""


class SharedHistory(History):
    """The history of a router. While other workers or routers listen, it keeps its own events for them."""

    def __init__(self, pulse: RecentHistory | None = None) -> None:
        """`pulse` notes each event, too."""
        super().__init__()
        self._recent_history = pulse
        self.listened = False
        """Whether other workers or routers listen."""
        self._unsent: list[Event] = []

    def arrived(
        self, now_s: float, group: str, tokens: int, ttft_slo_s: float, tpot_slo_s: float
    ) -> None:
        self._noted(now_s, ("arrived", group, (tokens, ttft_slo_s, tpot_slo_s)))

    def prefilled(
        self, now_s: float, group: str, uncached_tokens: int, ttft_s: float, ttft_slo_s: float
    ) -> None:
        self._noted(now_s, ("prefilled", group, (uncached_tokens, ttft_s, ttft_slo_s)))

    def answered(
        self, now_s: float, group: str, tokens: int, tpot_s: float, tpot_slo_s: float
    ) -> None:
        self._noted(now_s, ("answered", group, (tokens, tpot_s, tpot_slo_s)))

    def refused(self, now_s: float, group: str) -> None:
        self._noted(now_s, ("refused", group, ()))

    def overflowed(self, now_s: float, group: str) -> None:
        self._noted(now_s, ("overflowed", group, ()))

    def heard(self, events: Iterable[Event], now_s: float, groups: frozenset[str]) -> None:
        """Note the events of another router, as if they came now. They are not sent on to further routers.

        Args:
            groups: groups that are known here. Events of other groups, and events with impossible numbers, are ignored.
        """
        before, self.listened = self.listened, False
        try:
            for kind, group, numbers in events:
                odd = len(numbers) != _LENGTHS[kind] or any(n < 0 or n != n for n in numbers)
                if group not in groups or odd or (numbers and not isfinite(numbers[0])):
                    continue
                getattr(self, kind)(now_s, group, *numbers)
        finally:
            self.listened = before

    @property
    def has_unsent(self) -> bool:
        """Whether `take_unsent` would return any."""
        return bool(self._unsent)

    def take_unsent(self) -> list[Event]:
        """Events of this router that were not taken yet."""
        events, self._unsent = self._unsent, []
        return events

    def _noted(self, now_s: float, event: Event) -> None:
        kind, group, numbers = event
        if kind != "overflowed":  # only the live page asks for it
            getattr(History, kind)(self, now_s, group, *numbers)
        if self._recent_history is not None:
            self._recent_history.note(now_s, kind, numbers)
        if self.listened and len(self._unsent) < MOST_EVENTS:
            self._unsent.append(event)
