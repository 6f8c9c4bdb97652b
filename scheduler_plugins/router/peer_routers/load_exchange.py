# SPDX-License-Identifier: Apache-2.0
"""Routers of the same engines send each other their load on each engine every 50 ms, and agree on roles.

A router that hears nothing of the others ignores their work. Messages may be late or wrong, which costs time only.
Workers of one router share their load in memory (`counts`), and all else by the same messages, over sockets in a folder
that only their user can enter. The first worker also talks to other routers, and passes messages on in both directions.
With a secret (`PD_ROUTER_KEY`), both sides of a connection between
routers prove that they have it, and messages are encrypted (CURVE).
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from pd_connector.control.keys import CurveKeys, Gatekeeper
from pd_connector.control.liveness import keep_alive
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.observed import Event
from scheduler_plugins.router.engines.others import Count
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.engines.role_state import MOST_DECISIONS, Decision
from scheduler_plugins.router.index.hashes import packed, unpacked
from scheduler_plugins.router.loop import is_behind
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.peer_routers.advertised_engines import AdvertisedEngines, EngineList
from scheduler_plugins.router.peer_routers.advertised_roles import AdvertisedRole, AdvertisedRoles
from scheduler_plugins.router.peer_routers.counts import SenderCounts
from scheduler_plugins.router.peer_routers.worker_place import WorkerPlace
from scheduler_plugins.router.roles.base import Front
from scheduler_plugins.router.settings.config import RouterConfig

logger = logging.getLogger(__name__)

EVERY_S = 0.05
TOGETHER_S = 0.005
"""Messages within this time are shown to policies together."""
FORGOTTEN_S = 1.0
"""A router without a message for this time has ended or cannot be reached."""
EVENTS_S = 0.2
"""What happened to requests is told after this time at the latest."""
QUIET_S = 0.5
"""A router repeats an unchanged message after this pause."""
_MOST_BYTES = 1 << 20
_CHANNEL = b"pd-router"
SILENT_S = 10.0
"""If a named router is not heard for this time, a warning is logged."""
MOST = 1e12
"""Upper bound of an accepted count. It keeps sums of counts finite."""
MOST_FELLOWS = 256
"""Most other routers whose counts are used at a time."""
MOST_REMEMBERED = 16 * MOST_FELLOWS
"""Most routers whose last message number is remembered, including routers that have ended."""
MOST_HASHES = 1 << 15
"""Most hashes of prompts in a message. Further prompts are dropped: the guess of what engines have cached can miss some."""
ALONE_S = 2.0
"""A worker that hears no other worker for this time after its start acts alone."""


class InFlight(msgspec.Struct, frozen=True, array_like=True):
    """The open work of one process."""

    router: str
    """Its name, which is new at each start."""
    number: int
    """Number of the message. A message with an old number is ignored, even after its router has ended."""
    engines: dict[str, list[float]]
    """Counts by the engine's URL, in the order of `Count`. The time is sent as an age in seconds. A router in several
    processes sends the sums in the messages of its first worker."""
    roles: dict[str, AdvertisedRole] = {}
    """Roles that differ from the settings, by the engine's URL."""
    events: list[Event] = []
    """What happened to requests since the message before."""
    router_id: str = ""
    """What all workers of one router have in common; empty: the router is one process."""
    front: dict[str, Front] = {}
    """What waits in its front queue, by group."""
    prompts: list[tuple[str, bytes]] = []
    """Prompts since the message before that engines without events have computed: URL, and hashes of 8 bytes each
    (little-endian)."""
    listed: EngineList | None = None
    """The list of engines, if an operator or the settings file has changed it. It holds for workers of the same router."""
    decisions: tuple[Decision, ...] = ()
    """The last decisions on roles. They are shown by workers of the same router."""


class _Heard(NamedTuple):
    at_s: float
    sent: InFlight


class _Circle:
    """The sockets of processes that hear each other."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        own: str,
        others: Collection[str],
        keys: CurveKeys | None,
    ) -> None:
        """Raises zmq.ZMQError if the address cannot be bound.

        Args:
            own: address where the others hear this process; empty: they do not.
            keys: made from the circle's secret; None: the circle has no secret.
        """
        self.telling, self.hearing = context.socket(zmq.PUB), context.socket(zmq.SUB)
        try:
            if keys is not None:
                keys.demand(self.telling)
                keys.present(self.hearing)
            for socket in (self.telling, self.hearing):
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
                keep_alive(socket)  # who only hears would wait at a forgotten connection for ever
            if own:
                self.telling.bind(own)
            self.hearing.setsockopt(zmq.SUBSCRIBE, b"")
            for address in others:
                self.hearing.connect(address)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.telling.close()
        self.hearing.close()


class PeerRouters:
    """Adds the load of other workers and routers to the pool's engines, and agrees with them on roles."""

    def __init__(
        self,
        pool: EnginePool,
        metrics: Metrics,
        *,
        key: str = "",
        place: WorkerPlace | None = None,
        waiting: Callable[[], Mapping[str, Front]] = dict,
    ) -> None:
        """Start nothing yet.

        Args:
            key: the secret that all routers share; empty: none.
            place: place of this process among the workers of its router; None: the router is one process.
            waiting: returns the requests that wait in this process's front queue, by group.
        """
        self._pool, self._place, self._waiting = pool, place, waiting
        self._roles, self._list = AdvertisedRoles(pool), AdvertisedEngines(pool)
        self._keys = CurveKeys.derive(key, _CHANNEL) if key else None
        self._counts = SenderCounts(place.counts, place.number) if place else SenderCounts(None)
        self._name, self._router_id = pool.name, place.router_id if place else ""
        self._tells_load = place is None
        self._number = 0
        self._said: Sequence[object] = ()
        self._said_s = self._begun_s = 0.0
        self._heard: dict[str, _Heard] = {}
        self._numbers: dict[str, int] = {}
        self._metrics = metrics
        self._complete_s: float | None = None
        self._missed = False
        self._named = 0  # other routers that this one should hear
        self._hears_workers = asyncio.Event()

    async def run(self, exchange: str, fellows: Collection[str]) -> None:
        """Send and receive until cancelled. Raises zmq.ZMQError if an address cannot be bound.

        Args:
            exchange: address where other routers hear this one; empty: none does.
            fellows: addresses where this router hears others.
        """
        place, self._begun_s = self._place, asyncio.get_running_loop().time()
        self._named = len(set(fellows))
        self._pool.leads = not (fellows or place)
        self._pool.history.listened = bool(exchange or place)
        self._pool.unsent_prompts = [] if exchange or place else None
        self._tells_load = place is None or (place.is_first and bool(exchange))
        self._counts.follow(self._pool.engines)
        with zmq.asyncio.Context() as context:
            circles, gatekeeper = list[_Circle](), None
            try:
                if place is not None:
                    circles.append(_Circle(context, place.address, place.others, None))
                if (exchange or fellows) and (place is None or place.is_first):
                    gatekeeper = self._gatekeeper(context)
                    circles.append(_Circle(context, exchange, fellows, self._keys))
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._tell(circles, gatekeeper))
                    for circle in circles:
                        others = [c for c in circles if c is not circle]
                        outside = place is None or circle is not circles[0]
                        group.create_task(self._hear(circle, others, outside=outside))
            finally:
                for circle in circles:
                    circle.close()
                if gatekeeper is not None:
                    gatekeeper.close()

    async def introduced(self) -> None:
        """Wait until another worker is heard, `ALONE_S` at most: then this one knows the list of engines and their roles.
        Returns at once if the router is one process."""
        if self._place is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(ALONE_S):
                    await self._hears_workers.wait()

    def _gatekeeper(self, context: zmq.asyncio.Context) -> Gatekeeper | None:
        """Admits connections that have the secret, whenever `_tell` runs it; None: there is no secret."""
        if self._keys is None:
            return None
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        return Gatekeeper(plain, self._keys)

    async def _tell(self, circles: Sequence[_Circle], gatekeeper: Gatekeeper | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                if gatekeeper is not None:
                    gatekeeper.answer()
                self._counts.follow(self._pool.engines)
                if (content := self.saying(loop.time())) is not None:
                    for circle in circles:
                        await circle.telling.send(content)
                self.show(loop.time(), forgets=not is_behind())
                self.count(self._named, loop.time())
            except Exception:  # the exchange must not end: nobody would start it again
                logger.exception("the load could not be sent to other routers this time")
            await asyncio.sleep(EVERY_S)

    async def _hear(self, circle: _Circle, others: Sequence[_Circle], *, outside: bool) -> None:
        """Take in the messages of one circle of peers, and pass them on to the other circles. `outside`: as in
        `heard`."""
        loop, showing = asyncio.get_running_loop(), False

        def show() -> None:
            nonlocal showing
            showing = False
            self.show(loop.time(), forgets=not is_behind())

        while True:
            message = await circle.hearing.recv()
            try:
                if self.heard(message, loop.time(), outside=outside):
                    for other in others:
                        await other.telling.send(message)
            except Exception:  # as in `_tell`
                logger.exception("a message of another router could not be used")
            if not showing:
                showing = True
                loop.call_later(TOGETHER_S, show)

    def saying(self, now_s: float) -> bytes | None:
        """The next message to send; None: nothing is new."""
        engines = dict[str, list[float]]()
        for engine in self._pool.engines if self._tells_load else ():
            counts = self._sent(engine)
            # Also report an engine whose last prompt has ended. That time is when its next prompt began, which may be
            # another router's.
            if any(counts):
                engines[engine.url] = counts
        roles, history = self._roles.telling(), self._pool.history
        front, listed, decisions = dict(self._waiting()), None, tuple[Decision, ...]()
        if self._router_id:
            listed = self._list.telling()
            decisions = tuple(self._pool.decisions) if self._pool.leads else ()
        said = engines, roles, front, listed, decisions
        pause_s = EVENTS_S if history.has_unsent else QUIET_S
        if said == self._said and not self._pool.unsent_prompts and now_s - self._said_s < pause_s:
            return None
        self._said, self._said_s = said, now_s
        events, prompts = history.take_unsent(), self._prompts()
        self._number += 1
        sent = {name: _with_age(counts, now_s) for name, counts in engines.items()}
        return msgspec.msgpack.encode(
            InFlight(
                self._name,
                self._number,
                sent,
                roles,
                events,
                self._router_id,
                front,
                prompts,
                listed,
                decisions,
            )
        )

    def _sent(self, engine: BackendEngine) -> list[float]:
        """What all workers of this router have sent, in the order of `Count`."""
        others = self._counts.of(engine)
        result = [
            own + others.of_workers(count)
            for count, own in zip(Count, engine.load.counts(), strict=True)
        ]
        busy_s = engine.load.counts()[Count.BUSY_SINCE_S]
        result[Count.BUSY_SINCE_S] = max(busy_s, others.latest_of_workers(Count.BUSY_SINCE_S))
        return result

    def _prompts(self) -> list[tuple[str, bytes]]:
        """Prompts that the others do not know of."""
        if not self._pool.unsent_prompts:
            return []
        unsent, self._pool.unsent_prompts = self._pool.unsent_prompts, []
        result, left = list[tuple[str, bytes]](), MOST_HASHES
        for url, hashes in unsent:
            if (left := left - len(hashes)) < 0:
                break
            result.append((url, packed(hashes)))
        return result

    def heard(self, message: bytes, now_s: float, *, outside: bool = False) -> bool:
        """Take in a message. Returns whether it is new and valid; otherwise it changes nothing.

        Args:
            outside: whether it came from another router. Such a message never counts as one of this router's workers,
                even if it claims that.
        """
        try:
            sent = _DECODER.decode(message)
        except msgspec.MsgspecError as error:
            logger.debug("a message of another router cannot be read: %s", error)
            return False
        if outside and self._router_id and sent.router_id == self._router_id:
            return False
        full = sent.router not in self._heard and len(self._heard) >= MOST_FELLOWS
        if sent.router == self._name or full or self._numbers.get(sent.router, 0) >= sent.number:
            return False
        self._numbers.pop(sent.router, None)
        self._numbers[sent.router] = sent.number
        if len(self._numbers) > MOST_REMEMBERED:
            del self._numbers[next(iter(self._numbers))]  # the router silent for the longest time
        self._heard[sent.router] = _Heard(now_s, sent)
        self._roles.heard(sent.router, sent.roles)
        groups = frozenset(engine.role_state.place.group for engine in self._pool.engines)
        self._pool.history.heard(sent.events, now_s, groups)
        self._note_prompts(sent.prompts)
        if sent.router_id and sent.router_id == self._router_id:
            self._hears_workers.set()
            self._list.heard(sent.listed)
            if sent.decisions and not self._pool.leads:
                self._pool.decisions = deque(sent.decisions, maxlen=MOST_DECISIONS)
        return True

    def _note_prompts(self, prompts: Sequence[tuple[str, bytes]]) -> None:
        engines = {engine.url: engine for engine in self._pool.engines} if prompts else {}
        for url, content in prompts:
            if url in engines:
                self._pool.prefilled_elsewhere(engines[url], unpacked(content))

    def waiting(self) -> dict[str, Front]:
        """The requests that wait in the front queues of all workers and routers, by group."""
        result = dict(self._waiting())
        for heard in self._heard.values():
            for group, front in heard.sent.front.items():
                other = result.get(group, Front())
                result[group] = Front(
                    front.requests + other.requests,
                    front.tokens + other.tokens,
                    max(front.oldest_s, other.oldest_s),
                )
        return result

    def show(self, now_s: float, *, forgets: bool = True) -> None:
        """Show the load of other routers to policies.

        Args:
            forgets: whether silent routers are forgotten. False: what they have sent may not be read yet.
        """
        for name, heard in list(self._heard.items()):
            if forgets and now_s - heard.at_s > FORGOTTEN_S:
                del self._heard[name]
        self._roles.forget(self._heard.keys())
        self._pool.leads, self._metrics.first_worker = self._leads(), self._is_first_worker(now_s)
        self._counts.follow(self._pool.engines)
        routers = [
            peer
            for peer in self._heard.values()
            if not self._router_id or peer.sent.router_id != self._router_id
        ]
        for engine in self._pool.engines:
            sums = [0.0] * len(Count)
            for heard in routers:
                counts = heard.sent.engines.get(engine.url)
                if (
                    counts is None
                    or len(counts) != len(Count)
                    or not all(0 <= c < MOST for c in counts)
                ):
                    continue
                aligned = list(counts)
                aligned[Count.BUSY_SINCE_S] = heard.at_s - counts[Count.BUSY_SINCE_S]
                sums = _added(sums, aligned)
            self._counts.of(engine).routers = sums

    def _leads(self) -> bool:
        """Whether this process decides on roles: its name is the smallest of those that hear each other. A process that
        should hear other routers, or other workers, and hears none, leaves roles as they are."""
        hears = (self._routers() or not self._named) and (self._workers() or self._place is None)
        return all(self._name < name for name in self._heard) and bool(hears)

    def _is_first_worker(self, now_s: float) -> bool:
        """Whether this worker does what one worker does for all."""
        if self._place is None:
            return True
        workers = self._workers()
        alone = not workers and now_s - self._begun_s > ALONE_S
        return alone or (bool(workers) and all(self._name < name for name in workers))

    def _workers(self) -> list[str]:
        """Names of the other workers of this router that are heard."""
        own = self._router_id
        return [name for name, peer in self._heard.items() if own and peer.sent.router_id == own]

    def _routers(self) -> set[str]:
        """Other routers that are heard. A router in several processes counts once."""
        ids = {peer.sent.router_id or name for name, peer in self._heard.items()}
        return ids - {self._router_id}

    def count(self, named: int, now_s: float) -> None:
        """Report how many other routers are heard, and warn if they are fewer than named."""
        heard = len(self._routers())
        self._metrics.fellows.set(heard)
        if self._complete_s is None or heard >= named:
            self._complete_s = now_s
            if self._missed:
                self._missed = False
                logger.info("all %d other routers send messages again", named)
        elif not self._missed and now_s - self._complete_s >= SILENT_S:
            self._missed = True
            logger.warning(
                "messages from only %d of %d other routers have arrived in the last %.0f s, so requests of the rest are not "
                "counted here. Name their --exchange in this router's --fellows, and give all routers "
                "the same PD_ROUTER_KEY",
                heard,
                named,
                SILENT_S,
            )


def _added(first: list[float], other: list[float]) -> list[float]:
    """The sums of two lists of counts, with the later of their times."""
    sums = [a + b for a, b in zip(first, other, strict=True)]
    sums[Count.BUSY_SINCE_S] = max(first[Count.BUSY_SINCE_S], other[Count.BUSY_SINCE_S])
    return sums


def _with_age(counts: list[float], now_s: float) -> list[float]:
    """The counts in the form of a message: the time becomes an age, because clocks differ."""
    sent = list(counts)
    sent[Count.BUSY_SINCE_S] = max(0.0, now_s - counts[Count.BUSY_SINCE_S])
    return sent


_DECODER = msgspec.msgpack.Decoder(InFlight)


@asynccontextmanager
async def exchanging(
    config: RouterConfig,
    pool: EnginePool,
    metrics: Metrics,
    place: WorkerPlace | None,
    waiting: Callable[[], Mapping[str, Front]],
) -> AsyncIterator[PeerRouters]:
    """Exchange load inside the block, if the router has several workers or the settings name other routers.

    Raises:
        OSError: the address `exchange` cannot be bound.
    """
    peers = PeerRouters(pool, metrics, key=config.router_key, place=place, waiting=waiting)
    if not (config.exchange or config.fellows or place):
        yield peers
        return
    task = asyncio.create_task(peers.run(config.exchange, config.fellows), name="load exchange")
    await asyncio.sleep(0)
    if task.done():
        error = task.exception()
        do = {
            errno.EADDRINUSE: "another program listens there; take another port with --exchange",
            errno.EADDRNOTAVAIL: "this machine has no such address; name one of its own with --exchange",
        }
        raise OSError(
            f"{config.exchange} (exchange): {do.get(getattr(error, 'errno', None) or 0, error)}"
        )
    try:
        await peers.introduced()
        yield peers
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
