# SPDX-License-Identifier: Apache-2.0
"""Outgoing chunks: where each one lies until it has arrived, and what the consumer is told of it."""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from pd_connector.agent.page_gate import PageGate
from pd_connector.agent.producing.in_flight import LEFT, ChunksInFlight, InFlight, Key, SendPath
from pd_connector.config import Config
from pd_connector.memory.device_bytes import Payload
from pd_connector.memory.device_slab import DeviceSlab
from pd_connector.memory.pieces import Pieces
from pd_connector.memory.slab import Slab
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.producing.outgoing import SendChunk
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.header import encode_header
from pd_connector.transport.base import LEAST_PIECE_BYTES
from pd_kernels.checksum import checksum_of

_MOST_LEFT = 4
"""Chunks that one consumer is left to read at a time. With few, what was gathered is still in the
processors' cache when it is read."""
_MOST_WRITES = 3
"""Chunks that are written to one consumer at a time, over a transport with send slots of its own.
With few, what was gathered is still in the processor's cache when it is sealed, which halves the cost
of gathering; and a consumer that takes nothing holds no more slots than these."""


class SendPipeline:
    """Used by the agent's thread only. Owns the send slots.

    A chunk takes the first of these ways that fits it:

    | way | if | what the consumer's bytes are read from | checksum in its header |
    |---|---|---|---|
    | pages left | the chunk may be read where it lies (`SendChunk.direct`) | pages, by the consumer | of the pages (XXH3) |
    | pages written | the transport copies, and the pages are one run | pages | of the pages |
    | sealed slot written | the transport prepares, and pieces are large | a send slot, sealed from the pages | none: tags |
    | slot left | the consumer reads (`SendPath.read`) | a send slot, by the consumer | of the payload |
    | slot written | else | a send slot | of the payload; none if the transport verifies |

    Attributes:
        in_flight: chunks that have been posted and have not ended.
    """

    def __init__(
        self, config: Config, epoch: int, cache: PagedCache, sending: Slab, gate: PageGate
    ) -> None:
        self._config = config
        self._epoch = epoch
        self._cache = cache
        self._sending = sending
        self._gate = gate
        self.in_flight = ChunksInFlight(config.stall_timeout_s)
        self._numbers = itertools.count()
        self._free_slots = deque(range(sending.slots))
        self._fences: dict[str, Any] = {}
        self._computed: dict[str, int] = {}  # tokens by request

    @property
    def busy(self) -> bool:
        """Whether chunks are under way."""
        return bool(self.in_flight.chunks)

    @property
    def held(self) -> int:
        """Send slots that are not free."""
        return self._sending.slots - len(self._free_slots)

    @property
    def full(self) -> bool:
        return not self._free_slots

    @property
    def backpressured(self) -> Collection[bytes]:
        """Sessions with the most chunks under way that a session may have. They get no more until a chunk
        has ended."""
        return self.in_flight.backpressured

    def gather_after(self, request: str, fence: Any, tokens: int) -> None:
        """The request's pages are gathered after the work that `fence` stands for. It computes them up to
        `tokens` tokens, in all layers."""
        if fence is not None:
            self._fences[request] = fence
        self._computed[request] = max(tokens, self.computed(request))

    def computed(self, request: str) -> int:
        """The number of the request's tokens that are known to be computed in all layers."""
        return self._computed.get(request, 0)

    def forget(self, request: str) -> None:
        self._fences.pop(request, None)
        self._computed.pop(request, None)

    def post(self, send: SendChunk, path: SendPath, now: float) -> messages.Message | None:
        """Set a chunk on its way; returns what the consumer must be told, if it is to read it. See `SendPipeline` for
        the ways.

        Raises:
            RevokedError: the pages were taken back, before or while they were read.
            TransportError: the write cannot start. The chunk holds no send slot then.
        """
        with self._gate.touching(send.request) as confirm:
            if send.direct and (pieces := self._pieces(send)):
                checksum = pieces.checksum()
                confirm()
                return self._leave_pages(send, pieces, checksum, now)
            if (run := self._in_place(send, path)) is not None:
                checksum = checksum_of(run)
                confirm()  # if the pages change from here on, the checksum tells
                start = self._writer(send, path, run, checksum)
                self._start_write(start, send, path, len(run), None, now)
                return None
            send_slot, payload, prepared = self._fill(send, path, confirm)
        try:  # the pages are no longer read: the engine need not wait for the rest
            if path.read:
                checksum = self._checksum(payload, path)
                return self._leave_slot(send, payload, checksum, send_slot, now)
            start = prepared or self._writer(send, path, payload, self._checksum(payload, path))
            self._start_write(start, send, path, len(payload), send_slot, now)
        except BaseException:
            self._free_slots.append(send_slot)
            raise
        return None

    @property
    def begins_early(self) -> bool:
        """Whether a chunk can be gathered while the one before is posted."""
        return not self._cache.on_host and len(self._free_slots) > 1

    def post_next(self, send: SendChunk, path: SendPath) -> None:
        """The `post` after the next one will probably be this one; `settle` must follow. What is gathered for
        it counts only if its gate is open when it is posted."""
        slot = self._slots(path).slot(self._free_slots[-2])
        fence = self._fences.get(send.request)
        self._cache.gather_next(send.route, send.chunk, send.pages, slot, fence)

    def settle(self) -> None:
        """See `PagedCache.settle`."""
        self._cache.settle()

    def chunk_ended(self, key: Key) -> InFlight | None:
        """A chunk has arrived, or certainly will not; None if it was not under way."""
        in_flight = self.in_flight.chunk_ended(key)
        if in_flight is not None and in_flight.send_slot is not None:
            self._free_slots.append(in_flight.send_slot)
        return in_flight

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every send slot is free or under way exactly once. A session is
        backpressured exactly if it has as many chunks under way as it may have."""
        chunks = self.in_flight.chunks.values()
        used = [one.send_slot for one in chunks if one.send_slot is not None]
        if sorted([*self._free_slots, *used]) != list(range(self._sending.slots)):
            raise RuntimeError(
                f"send slots: {sorted(self._free_slots)} free and {sorted(used)} under way, "
                f"wanted each of 0-{self._sending.slots - 1} once"
            )
        self.in_flight.check_integrity()

    def _in_place(self, send: SendChunk, path: SendPath) -> memoryview | None:
        """The chunk where its pages lie, if the transport can write it from there."""
        if path.read or not path.transport.copies:
            return None
        return self._cache.in_place(send.route, send.chunk, send.pages)

    def _checksum(self, payload: Payload, path: SendPath) -> bytes:
        """The checksum of the chunk that was gathered last; empty if its transport verifies every byte."""
        if summed := self._cache.last_checksum:
            return summed
        if path.transport.verifies and not path.read:
            return b""
        assert isinstance(payload, memoryview)  # what lies on a device was summed there
        return checksum_of(payload)

    def _fill(
        self, send: SendChunk, path: SendPath, confirm: Callable[[], None]
    ) -> tuple[int, Payload, Callable[[], int] | None]:
        """Gather a chunk into a send slot; returns the slot and the payload in it. Or seal it into
        the slot; returns also what starts the write then.

        It is never gathered straight into the landing slot: a producer that was given up may still
        write there, and the checksum would certify its bytes.
        """
        send_slot = self._free_slots.pop()  # the one used last is still in the processor's cache
        try:
            slot, fence = self._slots(path).slot(send_slot), self._fences.get(send.request)
            if (prepared := self._seal(send, path, slot)) is not None:
                payload = slot[: send.chunk.nbytes(send.route)]
            else:
                payload = self._cache.gather(send.route, send.chunk, send.pages, slot, fence)
            confirm()
        except BaseException:
            self._free_slots.append(send_slot)
            raise
        return send_slot, payload, prepared

    def _seal(self, send: SendChunk, path: SendPath, slot: Payload) -> Callable[[], int] | None:
        """Seal a chunk of whole pages into a send slot, from where it lies; returns what starts the
        write, or None where it has to be gathered. A write that is never started ends the
        connection: numbers of records are missing then."""
        if path.read or not path.transport.prepares or not isinstance(slot, memoryview):
            return None
        pieces = self._pieces(send)
        if pieces is None or pieces.piece_bytes < LEAST_PIECE_BYTES:
            return None
        payload = slot[: pieces.nbytes]
        header = self._header(send, pieces.nbytes, b"")
        return path.transport.prepare(path.link, header, pieces, send.slot, payload)

    def _slots(self, path: SendPath) -> Slab | DeviceSlab:
        """The send slots that chunks on this path are gathered into."""
        on_device = path.transport.device_slots(path.link)
        return on_device or (None if path.read else path.transport.sends_from) or self._sending

    def _pieces(self, send: SendChunk) -> Pieces | None:
        """Where the chunk lies, if the consumer may read it there."""
        route = send.route
        found = self._cache.pieces(route.source, route.source_head, route, send.chunk, send.pages)
        if not found:
            return None
        joined = found.joined()
        return joined if len(joined.addresses) <= messages.MAX_PIECES else None

    def _writer(
        self, send: SendChunk, path: SendPath, payload: Payload, checksum: bytes
    ) -> Callable[[], int]:
        """What starts to write a payload with this checksum."""
        header = self._header(send, len(payload), checksum)
        return functools.partial(path.transport.write, path.link, header, payload, send.slot)

    def _start_write(
        self,
        start: Callable[[], int],
        send: SendChunk,
        path: SendPath,
        nbytes: int,
        send_slot: int | None,
        now: float,
    ) -> None:
        """Start a write; without a `send_slot` its payload lies in pages."""
        token = start()
        in_flight = self._in_flight(send, send_slot, nbytes, now)
        if path.transport.sends_from is not None:
            in_flight = in_flight._replace(most=_MOST_WRITES, in_order=True)
        self.in_flight.chunk_begun((path.transport.name, token), in_flight)

    def _leave_slot(
        self, send: SendChunk, payload: Payload, checksum: bytes, send_slot: int, now: float
    ) -> messages.Message:
        header = self._header(send, len(payload), checksum)
        number = self._leave(self._in_flight(send, send_slot, len(payload), now))
        return messages.LeftInSlot(
            transfer=send.transfer,
            number=number,
            send_slot=send_slot,
            slot=send.slot,
            nbytes=len(payload),
            header=header,
        )

    def _leave_pages(
        self, send: SendChunk, pieces: Pieces, checksum: bytes, now: float
    ) -> messages.Message:
        header = self._header(send, pieces.nbytes, checksum)
        number = self._leave(self._in_flight(send, None, pieces.nbytes, now))
        addresses = pieces.addresses.astype("<u8").tobytes()
        return messages.LeftInPages(
            transfer=send.transfer,
            number=number,
            slot=send.slot,
            piece_bytes=pieces.piece_bytes,
            addresses=addresses,
            header=header,
        )

    def _leave(self, in_flight: InFlight) -> int:
        """Note a chunk that is left for the consumer to read; returns its number."""
        number = next(self._numbers)
        self.in_flight.chunk_begun((LEFT, number), in_flight._replace(most=_MOST_LEFT))
        return number

    def _in_flight(
        self, send: SendChunk, send_slot: int | None, nbytes: int, now: float
    ) -> InFlight:
        deadline = now + self._config.stall_timeout_s
        return InFlight(send.session, send.transfer, send_slot, nbytes, deadline)

    def _header(self, send: SendChunk, nbytes: int, checksum: bytes) -> bytes:
        return encode_header(send.header(self._epoch, nbytes, checksum, self._cache.passed))
