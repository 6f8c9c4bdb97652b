# SPDX-License-Identifier: Apache-2.0
"""Routers of the same engines send each other their load on each engine every 50 ms.

A router that hears nothing of other routers ignores their work. Messages may be late or wrong, which costs time only.
With a secret (`PD_ROUTER_KEY`), both sides of a connection prove that they have it, and messages are encrypted
(CURVE).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
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
from scheduler_plugins.router.loop import is_behind
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.peer_routers.advertised_roles import AdvertisedRole, AdvertisedRoles
from scheduler_plugins.router.peer_routers.counts import FELLOWS_ROW, SharedCounts
from scheduler_plugins.router.peer_routers.slots import EngineSlots

logger = logging.getLogger(__name__)

EVERY_S = 0.05
TOGETHER_S = 0.005
"""Messages within this time are shown to policies together."""
FORGOTTEN_S = 1.0
"""A router without a message for this time has ended or cannot be reached."""
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


class InFlight(msgspec.Struct, frozen=True, array_like=True):
    """The open work of one router."""

    router: str
    number: int
    """Number of the message. A message with an old number is ignored, even after its router has ended."""
    engines: dict[str, list[float]]
    """Counts by the engine's URL, in the order of `Count`. The time is sent as an age in seconds."""
    roles: dict[str, AdvertisedRole] = {}
    """Roles that differ from the settings, by the engine's URL."""
    events: list[Event] = []
    """What happened to requests since the message before."""


class _Heard(NamedTuple):
    at_s: float
    sent: InFlight


class PeerRouters:
    """Maintains the shared counts' row for other routers, and agrees with them on roles."""

    def __init__(
        self,
        counts: SharedCounts,
        slots: EngineSlots,
        pool: EnginePool,
        own: Callable[[BackendEngine], list[float]],
        key: str,
        metrics: Metrics,
    ) -> None:
        """Start nothing yet.

        Args:
            slots: the engines' slots in `counts`.
            own: returns this router's counts for an engine, in the order of `Count`.
            key: the secret that all routers share; empty: none.
        """
        self._counts, self._slots = counts, slots
        self._pool, self._own = pool, own
        self._roles = AdvertisedRoles(pool)
        self._keys = CurveKeys.derive(key, _CHANNEL) if key else None
        self._name = pool.name
        self._number = 0
        self._said: tuple[dict[str, list[float]], dict[str, AdvertisedRole]] = {}, {}
        self._said_s = 0.0
        self._heard: dict[str, _Heard] = {}
        self._numbers: dict[str, int] = {}
        self._gauge = metrics.fellows
        self._complete_s: float | None = None
        self._missed = False
        self._named = 0  # other routers that this one should hear

    async def run(self, exchange: str, fellows: Collection[str]) -> None:
        """Send and receive until cancelled. Raises zmq.ZMQError if the address cannot be bound."""
        self._named, self._pool.leads = len(set(fellows)), not fellows
        self._pool.history.listened = bool(exchange)
        with zmq.asyncio.Context() as context:
            gatekeeper = self._gatekeeper(context)
            telling, hearing = context.socket(zmq.PUB), context.socket(zmq.SUB)
            try:
                if self._keys is not None:
                    self._keys.demand(telling)
                    self._keys.present(hearing)
                for socket in (telling, hearing):
                    socket.setsockopt(zmq.LINGER, 0)
                    socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
                    keep_alive(
                        socket
                    )  # who only hears would wait at a forgotten connection for ever
                if exchange:
                    telling.bind(exchange)
                hearing.setsockopt(zmq.SUBSCRIBE, b"")
                for address in fellows:
                    hearing.connect(address)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._tell(telling, len(set(fellows)), gatekeeper))
                    group.create_task(self._hear(hearing))
            finally:
                telling.close()
                hearing.close()
                if gatekeeper is not None:
                    gatekeeper.close()

    def _gatekeeper(self, context: zmq.asyncio.Context) -> Gatekeeper | None:
        """Admits connections that have the secret, whenever `_tell` runs it; None: there is no secret."""
        if self._keys is None:
            return None
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        return Gatekeeper(plain, self._keys)

    async def _tell(
        self, socket: zmq.asyncio.Socket, named: int, gatekeeper: Gatekeeper | None
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if gatekeeper is not None:
                gatekeeper.answer()
            self._slots.follow(self._pool.engines)
            if (content := self.saying(loop.time())) is not None:
                await socket.send(content)
            self.show(loop.time(), forgets=not is_behind())
            self.count(named, loop.time())
            await asyncio.sleep(EVERY_S)

    async def _hear(self, socket: zmq.asyncio.Socket) -> None:
        loop, showing = asyncio.get_running_loop(), False

        def show() -> None:
            nonlocal showing
            showing = False
            self.show(loop.time(), forgets=not is_behind())

        while True:
            self.heard(await socket.recv(), loop.time())
            if not showing:
                showing = True
                loop.call_later(TOGETHER_S, show)

    def saying(self, now_s: float) -> bytes | None:
        """The next message to send; None: nothing is new."""
        engines = dict[str, list[float]]()
        for engine in self._pool.engines:
            counts = self._own(engine)
            # Open requests are not sent, because a leaving engine waits only for this router's own.
            counts[Count.OPEN] = 0.0
            # Also report an engine whose last prompt has ended. That time is when its next prompt began, which may be
            # another router's.
            if any(counts):
                # A leaving engine may have returned on another side, but it is the same engine.
                counted = engines.get(engine.url)
                engines[engine.url] = counts if counted is None else _added(counted, counts)
        roles, events = self._roles.telling(), self._pool.history.take_unsent()
        said = engines, roles
        if said == self._said and not events and now_s - self._said_s < QUIET_S:
            return None
        self._said, self._said_s = said, now_s
        self._number += 1
        sent = {name: _with_age(counts, now_s) for name, counts in engines.items()}
        return msgspec.msgpack.encode(InFlight(self._name, self._number, sent, roles, events))

    def heard(self, message: bytes, now_s: float) -> None:
        """Take in a message. An invalid message changes nothing."""
        try:
            sent = _DECODER.decode(message)
        except msgspec.MsgspecError as error:
            logger.debug("a message of another router cannot be read: %s", error)
            return
        full = sent.router not in self._heard and len(self._heard) >= MOST_FELLOWS
        if sent.router == self._name or full or self._numbers.get(sent.router, 0) >= sent.number:
            return
        self._numbers.pop(sent.router, None)
        self._numbers[sent.router] = sent.number
        if len(self._numbers) > MOST_REMEMBERED:
            del self._numbers[next(iter(self._numbers))]  # the router silent for the longest time
        self._heard[sent.router] = _Heard(now_s, sent)
        self._roles.heard(sent.router, sent.roles)
        groups = frozenset(engine.role_state.place.group for engine in self._pool.engines)
        self._pool.history.heard(sent.events, now_s, groups)

    def show(self, now_s: float, *, forgets: bool = True) -> None:
        """Show the load of other routers to policies.

        Args:
            forgets: whether silent routers are forgotten. False: what they have sent may not be read yet.
        """
        for name, heard in list(self._heard.items()):
            if forgets and now_s - heard.at_s > FORGOTTEN_S:
                del self._heard[name]
        self._roles.forget(self._heard.keys())
        self._pool.leads = self._leads()
        for engine in self._pool.engines:
            sums = [0.0] * len(Count)
            for heard in self._heard.values():
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
            slot = self._slots.of(engine)
            if slot is not None:
                self._counts.put(FELLOWS_ROW, slot, sums)

    def _leads(self) -> bool:
        """Whether this router decides on roles: its name is the smallest of those that hear each other. A router that
        should hear others, and hears none, leaves roles as they are."""
        return all(self._name < name for name in self._heard) and bool(
            self._heard or not self._named
        )

    def count(self, named: int, now_s: float) -> None:
        """Report how many other routers are heard, and warn if they are fewer than named."""
        heard = len(self._heard)
        self._gauge.set(heard)
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
