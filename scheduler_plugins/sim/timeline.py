# SPDX-License-Identifier: Apache-2.0
"""The events of a simulated cluster in one heap: of engines, links and everything else."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from math import inf

from scheduler_plugins.sim.engine import END
from scheduler_plugins.sim.links import Links
from scheduler_plugins.sim.node import Node


class Timeline:
    """The heap, and the clock that it moves."""

    def __init__(self, links: Links) -> None:
        self.now_s = 0.0
        self._links = links
        self._links_ticket = 0
        self._heap: list[tuple[float, int, int, Node | Callable[[float], None]]] = []
        self._seq = 0

    def __bool__(self) -> bool:
        """Whether any event is left."""
        return bool(self._heap)

    def comes_before(self, at_s: float, kind: int) -> bool:
        """Whether an event comes before this time."""
        return bool(self._heap) and self._heap[0][:2] < (at_s, kind)

    def at(self, at_s: float, kind: int, what: Callable[[float], None]) -> None:
        """Call `what` at this time, with the time."""
        self._seq += 1
        heapq.heappush(self._heap, (at_s, kind, self._seq, what))

    def schedule(self, node: Node) -> None:
        """Note the time of an engine's next event."""
        engine = node.engine
        due = (engine.next_event_s, engine.next_kind)
        if due == node.due:
            return
        node.due = due
        self._seq += 1
        node.ticket = self._seq
        if due[0] < inf:
            heapq.heappush(self._heap, (*due, self._seq, node))

    def transfer(
        self,
        source: str,
        target: str,
        size: float,
        now_s: float,
        done: Callable[[float], None],
        latency_s: float = 0.0,
    ) -> None:
        """Send `size` bytes. `done` is called when the last byte has come, `latency_s` and the link's own latency after
        it was sent."""
        latency_s += self._links.network.latency_s

        def sent(at_s: float) -> None:
            self.at(at_s + latency_s, END, done)

        self._links.start(source, target, size, now_s, sent)
        self.schedule_links()

    def schedule_links(self) -> None:
        """Note the end of the next transfer."""
        self._seq += 1
        self._links_ticket = self._seq
        if self._links.next_event_s < inf:
            what = partial(self._advance_links, self._seq)
            heapq.heappush(self._heap, (self._links.next_event_s, END, self._seq, what))

    def _advance_links(self, ticket: int, now_s: float) -> None:
        if ticket == self._links_ticket:
            self._links.advance(now_s)
            self.schedule_links()

    def next(self) -> None:
        """Handle the next event."""
        at_s, _, ticket, what = heapq.heappop(self._heap)
        if not isinstance(what, Node):
            self.now_s = at_s
            what(at_s)
        elif what.ticket == ticket:
            self.now_s = at_s
            what.due = None
            what.engine.advance(at_s)
            self.schedule(what)
