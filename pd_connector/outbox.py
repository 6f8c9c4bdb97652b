# SPDX-License-Identifier: Apache-2.0
"""Chunks on their way out: where each lies until it has arrived, and what it is announced with."""

import itertools
from collections import deque
from collections.abc import Collection, Hashable
from typing import Any, NamedTuple

from pd_connector import wire
from pd_connector.config import Config
from pd_connector.errors import PDConnectorError, TransportError
from pd_connector.gate import Gate
from pd_connector.integrity import checksum
from pd_connector.memory import Pieces
from pd_connector.outgoing import Send
from pd_connector.pages import PagedCache
from pd_connector.slab import Slab
from pd_connector.transport.base import Transport

OFFERED = "offered"
"""In place of a transport's name, for chunks that the consumer reads."""
_READ_AHEAD = 4
"""Chunks that are offered to a consumer at a time."""
_WRITE_AHEAD = 3
"""Chunks that are on their way to a consumer at a time, over a transport that sends from slots of
its own: what was gathered just before it is sealed is still in the processor's cache (gathering
costs half), and a consumer that takes nothing holds no more slots than these."""

Key = tuple[str, int]
"""A transport's name and its token for a write, or `OFFERED` and the number of the offer."""


class RevokedError(PDConnectorError):
    """The engine has taken the pages back."""


class Way(NamedTuple):
    """How chunks get to a consumer."""

    transport: Transport
    link: Hashable  # of the transport
    read: bool  # chunks are offered to be read


class Moving(NamedTuple):
    """A chunk on its way."""

    session: bytes
    transfer: str
    send_slot: int | None
    nbytes: int
    deadline: float


class Outbox:
    """Used by the agent's thread only. Owns the send slots."""

    def __init__(
        self, config: Config, epoch: int, cache: PagedCache, sending: Slab, gate: Gate
    ) -> None:
        self._config = config
        self._epoch = epoch
        self._cache = cache
        self._sending = sending
        self._gate = gate
        self._moving: dict[Key, Moving] = {}
        self._offers = itertools.count()
        self._sated: set[bytes] = set()
        self._moved: set[bytes] = set()  # sessions of which a chunk has arrived lately
        self._moves: dict[bytes, float] = {}  # and until when that counts as progress
        self._send_slots = deque(range(sending.slots))
        self._fences: dict[str, Any] = {}

    @property
    def busy(self) -> bool:
        """Whether chunks are under way."""
        return bool(self._moving)

    @property
    def held(self) -> int:
        """Send slots that are not free."""
        return self._sending.slots - len(self._send_slots)

    @property
    def full(self) -> bool:
        return not self._send_slots

    @property
    def sated(self) -> Collection[bytes]:
        """Sessions that have enough to read, or on its way: what was gathered just before is still
        in the processors' cache."""
        return self._sated

    def fence(self, request: str, fence: Any) -> None:
        """What computed the request's pages so far is done when they are gathered."""
        if fence is not None:
            self._fences[request] = fence

    def forget(self, request: str) -> None:
        self._fences.pop(request, None)

    def post(self, send: Send, way: Way, now: float) -> wire.Message | None:
        """Set a chunk on its way; returns what the consumer must be told, if it is to read it.

        Raises:
            RevokedError: the request's gate is shut.
            TransportError: the write cannot start.
        """
        with self._gate.passing(send.request) as passes:
            if not passes:
                raise RevokedError(f"the pages of request {send.request} were taken back")
            if send.direct and (pieces := self._pieces(send)):
                return self._offer_pages(send, pieces, now)
            lies = None
            if way.transport.copies and not way.read:
                lies = self._cache.in_place(send.route, send.chunk, send.pages)
            if lies is not None:
                self._write(send, way, lies, checksum(lies), None, now)
                return None
            # Into memory of our own, never straight into the landing slot: a producer that was
            # given up may still write there, and the checksum would certify its bytes.
            send_slot = self._send_slots.pop()  # the one used last is warm in the cache
            slab = None if way.read else way.transport.sends_from
            payload = self._gather(send, (slab or self._sending).slot(send_slot))
        found = self._cache.checksum or self._checksum(payload, way)
        if way.read:
            return self._offer_slot(send, payload, found, send_slot, now)
        self._write(send, way, payload, found, send_slot, now)
        return None

    def ended(self, key: Key) -> Moving | None:
        """A chunk has arrived, or certainly will not; None if it was not under way."""
        moving = self._moving.pop(key, None)
        if moving is None:
            return None
        if moving.send_slot is not None:
            self._send_slots.append(moving.send_slot)
        self._moved.add(moving.session)
        if key[0] == OFFERED:
            if len(self.offers_to(moving.session)) < _READ_AHEAD:
                self._sated.discard(moving.session)
        elif self._writes_to(moving.session) < _WRITE_AHEAD:
            self._sated.discard(moving.session)
        return moving

    def offered_to(self, session: bytes, offer: int) -> bool:
        """Whether the session has this offer."""
        moving = self._moving.get((OFFERED, offer))
        return moving is not None and moving.session == session

    def offers_to(self, session: bytes) -> list[Key]:
        """Chunks that the session has been offered and not read."""
        return [k for k, m in self._moving.items() if m.session == session and k[0] == OFFERED]

    def _writes_to(self, session: bytes) -> int:
        """How many chunks are being written to the session."""
        return sum(m.session == session and k[0] != OFFERED for k, m in self._moving.items())

    def stuck(self, now: float) -> set[bytes]:
        """Sessions with a chunk that should have been moved by now, although none of their other
        chunks has been: where several wait for a slow link, the last of them waits long."""
        progress = dict.fromkeys(self._moved, now + self._config.stall_timeout_s)
        self._moves = {s: until for s, until in self._moves.items() if until > now} | progress
        self._moved.clear()
        late = {moving.session for moving in self._moving.values() if moving.deadline <= now}
        return late - self._moves.keys()

    def _checksum(self, payload: memoryview, way: Way) -> bytes:
        """That of a gathered chunk; empty where its transport authenticates every byte."""
        return b"" if way.transport.authenticates and not way.read else checksum(payload)

    def _gather(self, send: Send, slot: memoryview) -> memoryview:
        fence = self._fences.get(send.request)
        return self._cache.gather(send.route, send.chunk, send.pages, slot, fence)

    def _pieces(self, send: Send) -> Pieces | None:
        """Where the chunk lies, if the consumer may read it there."""
        route = send.route
        found = self._cache.pieces(route.source, route.source_head, route, send.chunk, send.pages)
        if not found or len(found.addresses) > wire.MAX_PIECES:
            return None
        return found.in_lanes() if send.lanes else found

    def _write(
        self,
        send: Send,
        way: Way,
        payload: memoryview,
        found: bytes,
        send_slot: int | None,
        now: float,
    ) -> None:
        """Write a payload, whose checksum is `found`; without a `send_slot` it lies in pages."""
        header = self._header(send, len(payload), found)
        try:
            token = way.transport.write(way.link, header, payload, send.slot)
        except TransportError:
            if send_slot is not None:
                self._send_slots.append(send_slot)
            raise
        self._moving[way.transport.name, token] = self._begun(send, send_slot, len(payload), now)
        ahead = self._writes_to(send.session)
        if way.transport.sends_from is not None and ahead >= _WRITE_AHEAD:
            self._sated.add(send.session)

    def _offer_slot(
        self, send: Send, payload: memoryview, found: bytes, send_slot: int, now: float
    ) -> wire.Message:
        header = self._header(send, len(payload), found)
        offer = self._offer(self._begun(send, send_slot, len(payload), now))
        return wire.Offered(send.transfer, offer, send_slot, send.slot, len(payload), header)

    def _offer_pages(self, send: Send, pieces: Pieces, now: float) -> wire.Message:
        header = self._header(send, pieces.nbytes, pieces.checksum())
        offer = self._offer(self._begun(send, None, pieces.nbytes, now))
        addresses = pieces.addresses.astype("<u8").tobytes()
        place = send.transfer, offer, send.slot
        return wire.OfferedPages(*place, pieces.piece_bytes, addresses, header, pieces.lanes)

    def _offer(self, moving: Moving) -> int:
        """Take note of an offer; returns its number."""
        offer = next(self._offers)
        self._moving[OFFERED, offer] = moving
        if len(self.offers_to(moving.session)) >= _READ_AHEAD:
            self._sated.add(moving.session)
        return offer

    def _begun(self, send: Send, send_slot: int | None, nbytes: int, now: float) -> Moving:
        deadline = now + self._config.stall_timeout_s
        return Moving(send.session, send.transfer, send_slot, nbytes, deadline)

    def _header(self, send: Send, nbytes: int, found: bytes) -> bytes:
        return wire.encode(
            wire.chunk_header(
                send.transfer,
                self._epoch,
                send.identity,
                send.chunk,
                send.route.codec,
                nbytes,
                found,
            )
        )
