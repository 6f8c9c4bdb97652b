# SPDX-License-Identifier: Apache-2.0
"""A simulated cluster: engines, links, a policy, and prompts that wait for room, driven by one heap of events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
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
from scheduler_plugins.router.roles.controller import RoleController
from scheduler_plugins.sim.engine import ARRIVAL
from scheduler_plugins.sim.journey import Journey
from scheduler_plugins.sim.kv_pool import FAR, KvPool, Pools
from scheduler_plugins.sim.links import Links, Network, Place
from scheduler_plugins.sim.node import ClusterView, Node
from scheduler_plugins.sim.prefill import RunningPrefill
from scheduler_plugins.sim.roles import EVERY_S, Roles, Ticks
from scheduler_plugins.sim.scaling import Scaler, Starts
from scheduler_plugins.sim.served import Served
from scheduler_plugins.sim.timeline import Timeline


class Change(NamedTuple):
    """A change of the cluster at a time; see the methods of `Cluster`."""

    at_s: float
    what: Callable[[Cluster, float], None]


class Cluster:
    """Serves a trace with a policy. One object serves one run.

    A request goes to a prefill engine. When its prompt is computed and its decode engine has room, its KV goes over the
    links. The first token comes from the decode engine's first step, as with PDConnector. If an engine dies, it loses
    everything. Its requests are routed again, with the tokens that they have.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        policy: Policy,
        *,
        network: Network | None = None,
        pools: Sequence[KvPool] = (),
        classes: Sequence[QosClass] = ONLY,
        seed: int = 0,
    ) -> None:
        """Join the engines. Nothing runs yet.

        Args:
            pools: get every prompt that an engine which reaches them computes. Policies can fetch prefixes from them.
            classes: classes of users, whose promises (SLOs) the policy sees.
        """
        self.nodes: dict[str, Node] = {}
        self.pools = Pools(pools)
        rates = {pool.name: pool.settings.bytes_per_s for pool in pools}
        self.links = Links(network or Network(), rates)
        for pool in pools:
            if pool.host:
                self.links.place(pool.name, Place(node=pool.host))
        self.view = ClusterView(self.nodes, self.links, self.pools)
        self._policy = policy
        self._random = Random(seed)
        self._classes = {qos_class.name: qos_class for qos_class in classes}
        self._default_class = default_class(classes)
        self._timeline = Timeline(self.links)
        self._journeys: dict[str, Journey] = {}
        self._stranded: list[Journey] = []
        self._rooms = Rooms(self._timeline)
        self.roles = Roles(self.nodes, self.set_role)
        self._ticks: Ticks | None = None
        self._arriving = False
        for node in nodes:
            self.join(node, 0.0)

    def run(
        self,
        requests: Iterable[Waiting],
        changes: Iterable[Change] = (),
        controller: RoleController | None = None,
        every_s: float = EVERY_S,
        starts: Starts | None = None,
    ) -> list[Served]:
        """Serve everything; the results are in the order of arrival.

        Args:
            requests: in order of arrival. Each generates exactly `max_tokens` tokens.
            changes: engines that join, leave, die or change their role.
            controller: changes roles; asked every `every_s` seconds. The moves are in `roles.moved`. At level 1, with
                whole prompts as steps, the results mislead: sequences stand still for whole prompts.
            starts: how the controller's numbers of engines are carried out; None: they are not. What came of them is in
                `roles.scaler`.
        """
        timeline, served = self._timeline, list[Served]()
        if starts is not None:
            self.roles.scaler = Scaler(starts, self.nodes, self.join, self._drains, self._leaves)
        if controller is not None:
            self.roles.controller = controller
            self._arriving = True
            goes_on = lambda: self._arriving or bool(self._journeys)  # noqa: E731
            self._ticks = Ticks(timeline, every_s, self.roles.tick, goes_on)
            self._ticks.wake(0.0)
        for change in changes:
            timeline.at(change.at_s, ARRIVAL, partial(change.what, self))
        for request in requests:
            while timeline.comes_before(request.arrival_s, ARRIVAL):
                timeline.next()
            timeline.now_s = request.arrival_s
            served.append(Served(request))
            if self._ticks is not None:
                self._ticks.wake(request.arrival_s)
            self._arrive(served[-1])
        self._arriving = False
        while timeline:
            timeline.next()
        for journey in self._stranded:
            journey.record.rejected = "unavailable"
        return served

    def join(self, node: Node, now_s: float, start_s: float = 0.0) -> None:
        """Add an engine with an empty cache, which serves after `start_s`. Its name must be new, or belong to an engine
        that died."""
        present = self.nodes.get(node.name)
        if present is not None and present.up:
            raise ValueError(f"engine {node.name}: exists already; names must be unique")
        self.nodes[node.name] = node
        self.links.place(node.name, node.place)
        self._rooms.clear(node.name)
        node.engine.hand_over = partial(self._computed, node)
        node.engine.on_end = partial(self._ended, node)
        node.engine.on_first_token = self._first_token
        if start_s:
            node.up = False
            self._timeline.at(now_s + start_s, ARRIVAL, partial(self._started, node))
        self._changed(now_s)

    def _started(self, node: Node, now_s: float) -> None:
        if self.nodes[node.name] is node and node.ticket >= 0:  # it has not died meanwhile
            node.up = True
            self._changed(now_s)

    def die(self, name: str, now_s: float) -> None:
        """Remove an engine with everything in it. The router knows at once."""
        node = self.nodes[name]
        node.engine.settle(now_s)
        node.up = False
        node.ticket = -1
        self.links.drop(name)
        self._timeline.schedule_links()
        for pool in self.pools.all:
            pool.drop(name)
        lost = [
            travelling
            for travelling in self._journeys.values()
            if node in (travelling.p, travelling.d, travelling.source)
        ]
        self._rooms.clear(name)
        self._changed(now_s)
        for journey in lost:
            journey.record.restarts += 1
            self._take_back(journey, now_s)
        for other in self.nodes.values():
            if other.up:
                self._rooms.give(other, now_s)
        for journey in lost:
            self._decide(journey, now_s)

    def host_dies(self, host: str, now_s: float) -> list[Node]:
        """Remove all engines of a host, and what its memory held. Returns those that were there."""
        dead = [node for node in self.nodes.values() if node.host == host and node.up]
        for node in dead:
            node.draining = True  # none of them gets the requests of another
        for node in dead:
            self.die(node.name, now_s)
        for pool in self.pools.all:
            if pool.host == host:
                pool.lose_all()
        return dead

    def drain(self, name: str, now_s: float) -> None:
        """Drain an engine: it gets no new requests, and finishes its own."""
        self.nodes[name].draining = True
        self._changed(now_s)

    def _drains(self, node: Node, drains: bool, now_s: float) -> None:
        node.draining = drains
        self._changed(now_s)

    def _leaves(self, node: Node, now_s: float) -> bool:
        """Remove an engine that serves nothing and holds no KV that is to be fetched. Returns whether it is so."""
        if any(node in (each.p, each.d, each.source) for each in self._journeys.values()):
            return False
        del self.nodes[node.name]
        self._rooms.gone(node.name)
        self._changed(now_s)
        return True

    def set_role(self, name: str, role: Role, now_s: float) -> None:
        """Change an engine's role. It gets requests of the new role from now on, and finishes its own."""
        self.nodes[name].role = role
        self._changed(now_s)

    def _changed(self, now_s: float) -> None:
        self.view.update()
        stranded, self._stranded = self._stranded, []
        for journey in stranded:
            self._decide(journey, now_s)

    def _arrive(self, record: Served) -> None:
        request = record.request
        journey = Journey.begin(record, self._classes.get(request.qos, self._default_class))
        self._journeys[request.id] = journey
        self.roles.arrived(journey, request.arrival_s)
        self._decide(journey, request.arrival_s)

    def _decide(self, journey: Journey, now_s: float) -> None:
        view = self.view
        self.roles.left(journey)
        if not view.engines(Role.DECODE):
            self._stranded.append(journey)
            self.roles.waits(journey)
            return
        view.begin(now_s)
        decision = self._policy.decide(journey.request, view, now_s, self._random)
        if isinstance(decision, Route):
            self._send(journey, decision, now_s)
        elif isinstance(decision, Reject):
            journey.record.rejected = decision.cause
            self.roles.refused(now_s)
            del self._journeys[journey.waiting.id]
        else:
            assert isinstance(decision, Defer)
            again = partial(self._decide, journey)
            self.roles.waits(journey)
            self._timeline.at(max(decision.until_s, now_s + 1e-6), ARRIVAL, again)

    def _send(self, journey: Journey, route: Route, now_s: float) -> None:
        """Count the request at its engines, and begin."""
        record, request = journey.record, journey.waiting
        d = journey.d = self.nodes[route.d]
        p = journey.p = None if route.p is None else self.nodes[route.p]
        record.p, record.d = route.p, route.d
        computes = p or d
        (blocks,) = self.view.match(request.block_hashes, (computes,))
        cached = cached_tokens(journey.request, computes, blocks)
        d.load.decode_sent(request.id, request.tokens, request.max_tokens)
        pulled, source = 0, self._source(route)
        if source is not None:
            (blocks,) = self.view.match(request.block_hashes, (source,))
            pulled = cached_tokens(journey.request, source, blocks) - cached
        cost_s = computes.costs.prefill_s(request.tokens, cached + max(0, pulled))
        fresh = request.tokens - cached - max(0, pulled)
        computes.load.prefill_sent(request.id, fresh, cost_s, now_s)
        if source is None or pulled <= 0:
            self._prefill(journey, computes, now_s)
            return
        record.pulled_tokens = pulled
        size = pulled * self.links.network.kv_bytes_per_token
        hashes, latency_s = request.block_hashes[:blocks], 0.0
        if isinstance(source, KvPool):
            source.got(hashes, now_s)
            latency_s = source.settings.latency_s
            if source.name == FAR:
                record.far_tokens = pulled
                self.pools.brought(computes.host, hashes, now_s)
        else:
            journey.source = source
        done = partial(self._pulled, journey, computes, hashes, journey.attempt)
        self._timeline.transfer(source.name, computes.name, size, now_s, done, latency_s)

    def _source(self, route: Route) -> Node | KvPool | None:
        """The source from which a prefix is fetched."""
        if (pool := self.pools.named(route.pull_from)) is not None:
            return pool
        return None if route.pull_from is None else self.nodes[route.pull_from]

    def _put(self, node: Node, hashes: Sequence[object], now_s: float) -> None:
        """Give each pool that the engine reaches the blocks of a computed prompt that it lacks."""
        for pool in self.pools.of(node.host) if hashes else ():
            fresh = pool.missing(hashes, node.name)
            if fresh:
                size = len(fresh) * node.block_tokens * self.links.network.kv_bytes_per_token
                done = partial(pool.put, hashes, fresh)
                latency_s = pool.settings.latency_s
                self._timeline.transfer(node.name, pool.name, size, now_s, done, latency_s)
            else:
                pool.got(hashes, now_s)

    def _pulled(
        self, journey: Journey, node: Node, hashes: Sequence[object], attempt: int, now_s: float
    ) -> None:
        """Called when a prefix from another engine's cache has arrived."""
        if journey.attempt == attempt:
            journey.source = None
            node.cache.arrived(hashes, now_s)
            self._prefill(journey, node, now_s)

    def _prefill(self, journey: Journey, node: Node, now_s: float) -> None:
        node.engine.arrive(journey.waiting, journey.record, now_s)
        self._timeline.schedule(node)

    def _computed(self, node: Node, prefill: RunningPrefill, now_s: float) -> bool:
        """Called when a prompt was computed. True if another engine decodes it."""
        journey = self._journeys[prefill.request.id]
        node.load.prefill_ended(prefill.request.id, now_s)
        self._put(node, prefill.request.block_hashes, now_s)
        if journey.p is None or journey.d is None or journey.d is node:
            return False
        tokens, cached = prefill.request.tokens, journey.record.cached_tokens
        prefill_s = node.costs.prefill_s(tokens, cached)
        size = self.links.exposed_bytes(node.name, journey.d.name, tokens, prefill_s, now_s)
        self._rooms.wait(journey, int(size), now_s)
        return True

    def _first_token(self, record: Served) -> None:
        self.roles.first_token(self._journeys[record.request.id])

    def _ended(self, node: Node, record: Served) -> None:
        node.load.decode_ended(record.request.id)
        self.roles.ended(self._journeys.pop(record.request.id))
        self._rooms.give(node, self._timeline.now_s)

    def _take_back(self, journey: Journey, now_s: float) -> None:
        """Forget the place of a request; keep its tokens."""
        request, left = journey.waiting, 0
        journey.attempt += 1
        for node in (journey.p, journey.d):
            if node is not None:
                left = max(left, node.engine.cancel(request.id))
                node.load.prefill_ended(request.id, now_s)
                node.load.decode_ended(request.id)
        self._rooms.leave(journey)
        journey.go_on(left)


class Rooms:
    """For each decode engine, the prompts that wait for room, in order; and their transfers."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._waiting: dict[str, list[tuple[Journey, int]]] = {}

    def clear(self, name: str) -> None:
        """Nothing waits for this engine, because it is new or dead."""
        self._waiting[name] = []

    def gone(self, name: str) -> None:
        """The engine has left. Nothing waited for it."""
        del self._waiting[name]

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
