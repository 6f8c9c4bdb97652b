# SPDX-License-Identifier: Apache-2.0
"""A simulated cluster: engines, links and a policy, driven by one heap of events."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from random import Random
from typing import NamedTuple

from scheduler_plugins.order.request import Waiting
from scheduler_plugins.qos.classes import ONLY, QosClass, default_class
from scheduler_plugins.router.policies.base import (
    Defer,
    Policy,
    Reject,
    Role,
    Route,
    cached_tokens,
)
from scheduler_plugins.sim.engine import ARRIVAL, END
from scheduler_plugins.sim.journey import Journey, promise_of
from scheduler_plugins.sim.links import Links, Network
from scheduler_plugins.sim.node import Node
from scheduler_plugins.sim.prefill import RunningPrefill
from scheduler_plugins.sim.served import Served
from scheduler_plugins.sim.view import ClusterView


class Change(NamedTuple):
    """Something that happens to the cluster at a time: see the methods of `Cluster`."""

    at_s: float
    what: Callable[[Cluster, float], None]


class Cluster:
    """Serves a trace with a policy. One object serves one run.

    A request goes to a prefill engine; when its prompt is computed and its decode engine has room,
    its KV goes over the links; the first token is the decode engine's first step, as with
    PDConnector. An engine that dies loses everything; its requests are decided anew, with the
    tokens they have.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        policy: Policy,
        *,
        network: Network | None = None,
        classes: Sequence[QosClass] = ONLY,
        seed: int = 0,
    ) -> None:
        """`classes`: their promises (SLOs) are shown to the policy."""
        self.nodes: dict[str, Node] = {}
        self.links = Links(network or Network())
        self.view = ClusterView(self.nodes, self.links)
        self._policy = policy
        self._random = Random(seed)
        self._promises = {one.name: promise_of(one) for one in classes}
        self._promise = promise_of(default_class(classes))
        self._heap: list[tuple[float, int, int, Node | Callable[[float], None]]] = []
        self._seq = 0
        self._links_ticket = 0
        self._journeys: dict[str, Journey] = {}
        self._stranded: list[Journey] = []
        self._rooms: dict[str, list[tuple[Journey, int]]] = {}
        self.now_s = 0.0
        for node in nodes:
            self.join(node, 0.0)

    def run(self, requests: Iterable[Waiting], changes: Iterable[Change] = ()) -> list[Served]:
        """Serve everything; the results are in the order of arrival.

        Args:
            requests: in order of arrival; one generates `max_tokens` tokens exactly.
            changes: engines that join, leave, die or change their role.
        """
        for change in changes:
            self._at(change.at_s, ARRIVAL, partial(change.what, self))
        heap, served = self._heap, list[Served]()
        for request in requests:
            arrival = (request.arrival_s, ARRIVAL)
            while heap and heap[0][:2] < arrival:
                self._next()
            self.now_s = request.arrival_s
            served.append(Served(request))
            self._arrive(served[-1])
        while heap:
            self._next()
        for journey in self._stranded:
            journey.record.rejected = "unavailable"
        return served

    def join(self, node: Node, now_s: float) -> None:
        """An engine comes, with an empty cache. Its name must be new, or that of one that died."""
        known = self.nodes.get(node.name)
        if known is not None and known.up:
            raise ValueError(f"engine {node.name}: is there already; names must be unique")
        self.nodes[node.name] = node
        self._rooms[node.name] = []
        node.engine.hand_over = partial(self._computed, node)
        node.engine.on_end = partial(self._ended, node)
        self._changed(now_s)

    def die(self, name: str, now_s: float) -> None:
        """An engine is gone, with all it had. The router knows at once."""
        node = self.nodes[name]
        node.engine.settle(now_s)
        node.up = False
        node.ticket = -1
        self.links.drop(name)
        self._schedule_links()
        lost = [one for one in self._journeys.values() if node in (one.p, one.d)]
        self._rooms[name] = []
        self._changed(now_s)
        for journey in lost:
            journey.record.restarts += 1
            self._take_back(journey, now_s)
        for other in self.nodes.values():
            if other.up:
                self._give_room(other, now_s)
        for journey in lost:
            self._decide(journey, now_s)

    def drain(self, name: str, now_s: float) -> None:
        """An engine gets nothing new, and finishes what it has."""
        self.nodes[name].draining = True
        self._changed(now_s)

    def set_role(self, name: str, role: Role, now_s: float) -> None:
        """An engine gets the requests of another role from now on, and finishes what it has."""
        self.nodes[name].role = role
        self._changed(now_s)

    def _changed(self, now_s: float) -> None:
        self.view.update()
        stranded, self._stranded = self._stranded, []
        for journey in stranded:
            self._decide(journey, now_s)

    def _arrive(self, record: Served) -> None:
        one = record.request
        journey = Journey.begin(record, self._promises.get(one.qos, self._promise))
        self._journeys[one.id] = journey
        self._decide(journey, one.arrival_s)

    def _decide(self, journey: Journey, now_s: float) -> None:
        view = self.view
        if not view.engines(Role.DECODE):
            self._stranded.append(journey)
            return
        view.begin(now_s)
        decision = self._policy.decide(journey.asked, view, now_s, self._random)
        if isinstance(decision, Route):
            self._send(journey, decision, now_s)
        elif isinstance(decision, Reject):
            journey.record.rejected = decision.cause
            del self._journeys[journey.waiting.id]
        else:
            assert isinstance(decision, Defer)
            again = partial(self._decide, journey)
            self._at(max(decision.until_s, now_s + 1e-6), ARRIVAL, again)

    def _send(self, journey: Journey, route: Route, now_s: float) -> None:
        """Count the request where it goes, and begin."""
        record, request = journey.record, journey.waiting
        d = journey.d = self.nodes[route.d]
        p = journey.p = None if route.p is None else self.nodes[route.p]
        record.p, record.d = route.p, route.d
        computes = p or d
        (blocks,) = self.view.match(request.block_hashes, (computes,))
        cached = cached_tokens(journey.asked, computes, blocks)
        d.load.decode_sent(request.id, request.tokens, request.max_tokens)
        pulled = 0
        if route.pull_from is not None:
            source = self.nodes[route.pull_from]
            (blocks,) = self.view.match(request.block_hashes, (source,))
            pulled = cached_tokens(journey.asked, source, blocks) - cached
        cost_s = computes.costs.prefill_s(request.tokens, cached + max(0, pulled))
        fresh = request.tokens - cached - max(0, pulled)
        computes.load.prefill_sent(request.id, fresh, cost_s, now_s)
        if pulled <= 0:
            self._prefill(journey, computes, now_s)
            return
        record.pulled_tokens = pulled
        size = pulled * self.links.network.kv_bytes_per_token
        hashes = request.block_hashes[:blocks]
        done = partial(self._pulled, journey, computes, hashes, journey.attempt)
        self._transfer(source.name, computes.name, size, now_s, done)

    def _pulled(
        self, journey: Journey, node: Node, hashes: Sequence[object], attempt: int, now_s: float
    ) -> None:
        """A prefix from another engine's cache has arrived."""
        if journey.attempt == attempt:
            node.cache.store(hashes, now_s)
            node.cache.computed(now_s)
            self._prefill(journey, node, now_s)

    def _prefill(self, journey: Journey, node: Node, now_s: float) -> None:
        node.engine.arrive(journey.waiting, journey.record, now_s)
        self._schedule(node)

    def _computed(self, node: Node, one: RunningPrefill, now_s: float) -> bool:
        """A prompt was computed. True if another engine decodes it."""
        journey = self._journeys[one.request.id]
        node.load.prefill_ended(one.request.id, now_s)
        if journey.p is None or journey.d is None or journey.d is node:
            return False
        network, fresh = self.links.network, one.request.tokens - journey.record.cached_tokens
        prefill_s = node.costs.prefill_s(one.request.tokens, one.request.tokens - fresh)
        size = int(network.exposed_bytes(one.request.tokens, prefill_s))
        self._rooms[journey.d.name].append((journey, size))
        self._give_room(journey.d, now_s)
        return True

    def _give_room(self, node: Node, now_s: float) -> None:
        """Begin the transfers to an engine that has room for their KV, in the order in which they
        wait."""
        waiting, engine = self._rooms[node.name], node.engine
        while waiting and engine.has_room(waiting[0][0].waiting.tokens):
            journey, size = waiting.pop(0)
            engine.reserved_tokens += journey.waiting.tokens
            journey.in_transfer = True
            assert journey.p is not None
            done = partial(self._received, journey, node, journey.attempt)
            self._transfer(journey.p.name, node.name, size, now_s, done)

    def _received(self, journey: Journey, node: Node, attempt: int, now_s: float) -> None:
        if journey.attempt == attempt:
            journey.in_transfer = False
            node.engine.receive(journey.waiting, journey.record, now_s)
            self._schedule(node)

    def _ended(self, node: Node, record: Served) -> None:
        node.load.decode_ended(record.request.id)
        del self._journeys[record.request.id]
        if self._rooms[node.name]:
            self._give_room(node, self.now_s)

    def _take_back(self, journey: Journey, now_s: float) -> None:
        """Forget where a request was; keep the tokens it has."""
        request, left = journey.waiting, 0
        journey.attempt += 1
        for node in (journey.p, journey.d):
            if node is not None:
                left = max(left, node.engine.cancel(request.id))
                node.load.prefill_ended(request.id, now_s)
                node.load.decode_ended(request.id)
        if journey.d is not None:
            rooms = self._rooms[journey.d.name]
            rooms[:] = [pair for pair in rooms if pair[0] is not journey]
            if journey.in_transfer:
                journey.d.engine.reserved_tokens -= request.tokens
        journey.go_on(left)

    def _transfer(
        self, source: str, target: str, size: float, now_s: float, done: Callable[[float], None]
    ) -> None:
        latency_s = self.links.network.latency_s

        def sent(at_s: float) -> None:
            self._at(at_s + latency_s, END, done)

        self.links.start(source, target, size, now_s, sent)
        self._schedule_links()

    def _at(self, at_s: float, kind: int, what: Callable[[float], None]) -> None:
        self._seq += 1
        heapq.heappush(self._heap, (at_s, kind, self._seq, what))

    def _schedule(self, node: Node) -> None:
        """Note when an engine has something to do next."""
        engine = node.engine
        due = (engine.next_event_s, engine.next_kind)
        if due == node.due:
            return
        node.due = due
        self._seq += 1
        node.ticket = self._seq
        if due[0] < inf:
            heapq.heappush(self._heap, (*due, self._seq, node))

    def _schedule_links(self) -> None:
        self._seq += 1
        self._links_ticket = self._seq
        if self.links.next_event_s < inf:
            what = partial(self._advance_links, self._seq)
            heapq.heappush(self._heap, (self.links.next_event_s, END, self._seq, what))

    def _advance_links(self, ticket: int, now_s: float) -> None:
        if ticket == self._links_ticket:
            self.links.advance(now_s)
            self._schedule_links()

    def _next(self) -> None:
        """Do what comes next."""
        at_s, _, ticket, what = heapq.heappop(self._heap)
        if not isinstance(what, Node):
            self.now_s = at_s
            what(at_s)
        elif what.ticket == ticket:
            self.now_s = at_s
            what.due = None
            what.engine.advance(at_s)
            self._schedule(what)
