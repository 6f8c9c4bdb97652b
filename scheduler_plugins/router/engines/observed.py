# SPDX-License-Identifier: Apache-2.0
"""What role policies and the live page learn of requests. Workers and other routers send it, so each keeper knows all
requests."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Literal, Protocol

from scheduler_plugins.router.recent_history import RecentHistory
from scheduler_plugins.router.roles.history import History

TOGETHER_S = 0.1
"""Events within this time are sent together."""
MOST_EVENTS = 5_000
"""Most events that wait to be sent. Further events are dropped: they would be late anyway."""

Kind = Literal["arrived", "prefilled", "answered", "refused", "overflowed"]
Event = tuple[Kind, str, Sequence[float]]
"""A method of `Observer`, the group, and its other arguments."""
_LENGTHS = {"arrived": 3, "prefilled": 3, "answered": 3, "refused": 0, "overflowed": 0}


class Observer(Protocol):
    """The calls that note requests: those of `History`, and `overflowed`."""

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


class _AsEvents(ABC):
    """`Observer` that makes an event of each call."""

    @abstractmethod
    def _noted(self, now_s: float, event: Event) -> None: ...

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


class SentEvents(_AsEvents):
    """`Observer` that sends all events to other processes, some together."""

    def __init__(self, send: Callable[[list[Event]], None]) -> None:
        self._send = send
        self._events: list[Event] = []

    def _noted(self, now_s: float, event: Event) -> None:
        if not self._events:
            asyncio.get_running_loop().call_later(TOGETHER_S, self._flush)
        if len(self._events) < MOST_EVENTS:
            self._events.append(event)

    def _flush(self) -> None:
        events, self._events = self._events, []
        self._send(events)


class SharedHistory(_AsEvents, History):
    """The history of a router. While other routers listen, it keeps its own events for them."""

    def __init__(self, pulse: RecentHistory | None = None) -> None:
        """`pulse` notes each event, too."""
        super().__init__()
        self._recent_history = pulse
        self.listened = False
        """Whether other routers listen."""
        self._unsent: list[Event] = []

    def heard(self, events: Iterable[Event], now_s: float, groups: frozenset[str]) -> None:
        """Another router tells its events. They are not told on."""
        before, self.listened = self.listened, False
        try:
            note(self, events, now_s, groups)
        finally:
            self.listened = before

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


def note(
    history: Observer, events: Iterable[Event], now_s: float, groups: frozenset[str] | None = None
) -> None:
    """Note events of another process, as if they came now.

    Args:
        groups: groups that are known here; events of others are ignored. None: all.
    """
    for kind, group, numbers in events:
        is_here = groups is None or group in groups
        if not is_here or len(numbers) != _LENGTHS[kind] or any(n < 0 or n != n for n in numbers):
            continue
        if numbers and not isfinite(numbers[0]):
            continue
        getattr(history, kind)(now_s, group, *numbers)
