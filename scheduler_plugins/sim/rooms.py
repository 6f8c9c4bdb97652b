# SPDX-License-Identifier: Apache-2.0
"""Computed prompts that wait until their decode engine has room."""

from __future__ import annotations

from functools import partial

from scheduler_plugins.sim.journey import Journey
from scheduler_plugins.sim.node import Node
from scheduler_plugins.sim.timeline import Timeline


class Rooms:
    """For each decode engine, the prompts that wait for room, in order; and their transfers."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._waiting: dict[str, list[tuple[Journey, int]]] = {}

    def clear(self, name: str) -> None:
        """Nothing waits for this engine, because it is new or dead."""
        self._waiting[name] = []

    def wait(self, journey: Journey, size: int, now_s: float) -> None:
        """A prompt of `size` bytes was computed. Its transfer begins when its decode engine has room."""
        assert journey.d is not None
        self._waiting[journey.d.name].append((journey, size))
        self.give(journey.d, now_s)

    def give(self, node: Node, now_s: float) -> None:
        """Begin the transfers to an engine that has room for their KV, in the order in which they wait."""
        waiting, engine = self._waiting[node.name], node.engine
        while waiting and engine.has_room(waiting[0][0].waiting.tokens):
            journey, size = waiting.pop(0)
            engine.reserved_tokens += journey.waiting.tokens
            journey.in_transfer = True
            assert journey.p is not None
            done = partial(self._received, journey, node, journey.attempt)
            self._timeline.transfer(journey.p.name, node.name, size, now_s, done)

    def leave(self, journey: Journey) -> None:
        """A request no longer goes to its decode engine."""
        if journey.d is not None:
            waiting = self._waiting[journey.d.name]
            waiting[:] = [pair for pair in waiting if pair[0] is not journey]
            if journey.in_transfer:
                journey.d.engine.reserved_tokens -= journey.waiting.tokens

    def _received(self, journey: Journey, node: Node, attempt: int, now_s: float) -> None:
        if journey.attempt == attempt:
            journey.in_transfer, journey.p = False, None  # it no longer needs its prefill engine
            node.engine.receive(journey.waiting, journey.record, now_s)
            self._timeline.schedule(node)
