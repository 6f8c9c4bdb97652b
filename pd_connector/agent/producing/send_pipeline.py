# SPDX-License-Identifier: Apache-2.0
"""An outgoing chunk, from the state machine that chose it to the transport, until the consumer has it.

`ChunkSender` takes chunks from the state machine, and reports to it how each chunk ended. `SendPipeline` sends the
bytes. `ChunksInFlight` keeps the chunks that are under way. All three pass one record on: `OutgoingChunk`.
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

from pd_connector.agent.page_gate import PageGate, RevokedError
from pd_connector.agent.producing.consumer_sessions import ConsumerSessions, SendPath
from pd_connector.agent.resources import RankResources
from pd_connector.config import Config
from pd_connector.errors import Cause, TransportError
from pd_connector.memory.device_bytes import Payload
from pd_connector.memory.device_slab import DeviceSlab
from pd_connector.memory.pieces import Pieces
from pd_connector.memory.slab import Slab
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.producing.outgoing import Action, OutgoingChunk
from pd_connector.protocol.producing.producer import Producer
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.header import encode_header
from pd_connector.transport.base import LEAST_PIECE_BYTES
from pd_kernels.checksum import checksum_of

logger = logging.getLogger("pd_connector.agent.producing.send_pipeline")

_MOST_LEFT = 4
"""Chunks that are left for one consumer to read at a time. With few, a chunk's bytes are still in the processor's cache
when they are read."""
_MOST_WRITES = 3
"""Chunks that are written to one consumer at a time, over a transport with send slots of its own. With few, a chunk's
bytes are still in the processor's cache when they are sealed, which halves the cost of gathering. A consumer that takes
nothing holds only these slots."""

LEFT = "left"
"""Stands for a transport's name in the keys of chunks that the consumer reads."""

Key = tuple[str, int]
"""Names a chunk that is under way: its transport's name and the token of its write, or `LEFT` and its number."""


class ChunksInFlight:
    """The chunks of a producer that were posted and have not ended.

    Args:
        stall_timeout_s: a session without an arriving chunk for this time, in seconds, is stuck.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self.chunks: dict[Key, OutgoingChunk] = {}
        self._stall_timeout_s = stall_timeout_s
        self._backpressured: set[bytes] = set()
        self._arrived: set[bytes] = (
            set()
        )  # sessions to which an `in_order` chunk has come since `timed_out`
        self._moving_until: dict[bytes, float] = {}  # sessions whose `in_order` chunks arrive

    @property
    def backpressured(self) -> Collection[bytes]:
        """Sessions that have as many chunks under way as a session may have."""
        return self._backpressured

    def chunk_begun(self, key: Key, chunk: OutgoingChunk) -> None:
        """Note a chunk that is under way from now on."""
        self.chunks[key] = chunk
        if self._is_backpressured(chunk.session):
            self._backpressured.add(chunk.session)

    def chunk_ended(self, key: Key) -> OutgoingChunk | None:
        """A chunk has arrived, or certainly will not. Returns it; None if it was not under way."""
        chunk = self.chunks.pop(key, None)
        if chunk is None:
            return None
        if chunk.in_order:
            self._arrived.add(chunk.session)
        if not self._is_backpressured(chunk.session):
            self._backpressured.discard(chunk.session)
        return chunk

    def left_to(self, session: bytes, number: int) -> bool:
        """Whether the chunk with this number was left for the session to read."""
        chunk = self.chunks.get((LEFT, number))
        return chunk is not None and chunk.session == session

    def unread_by(self, session: bytes) -> list[Key]:
        """The chunks that were left for the session to read and that it has not read yet."""
        return [
            key for key, chunk in self.chunks.items() if chunk.session == session and key[0] == LEFT
        ]

    def timed_out(self, now: float) -> set[bytes]:
        """Sessions with a late chunk. A chunk is late if it has not moved within `stall_timeout_s`. Chunks that
        arrive in order wait for the chunks before them, which may take longer over a slow link: they are late if
        no chunk of their session has arrived within that time."""
        until = now + self._stall_timeout_s
        moving = {s: end for s, end in self._moving_until.items() if end > now}
        self._moving_until = moving | dict.fromkeys(self._arrived, until)
        self._arrived.clear()
        return {
            chunk.session
            for chunk in self.chunks.values()
            if chunk.deadline <= now
            and not (chunk.in_order and chunk.session in self._moving_until)
        }

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the backpressured sessions are those with as many chunks as a session may have."""
        sessions = {chunk.session for chunk in self.chunks.values()}
        expected = {session for session in sessions if self._is_backpressured(session)}
        if expected != self._backpressured:
            raise RuntimeError(f"backpressured {self._backpressured}, wanted {expected}")

    def _is_backpressured(self, session: bytes) -> bool:
        chunks = [chunk for chunk in self.chunks.values() if chunk.session == session]
        return any(len(chunks) >= chunk.session_limit for chunk in chunks)


class SendPipeline:
    """Brings the bytes of chunks on their way. Owns the send slots. Used by the agent's thread only.

    A chunk takes the first of these ways that fits it:

    | way | if | what the consumer's bytes are read from | checksum in its header |
    |---|---|---|---|
    | pages left | the chunk may be read where it lies (`OutgoingChunk.direct`) | pages, by the consumer | of the pages (XXH3) |
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
        """The number of send slots that are not free."""
        return self._sending.slots - len(self._free_slots)

    @property
    def full(self) -> bool:
        """Whether no send slot is free."""
        return not self._free_slots

    @property
    def backpressured(self) -> Collection[bytes]:
        """Sessions that get no further chunk until one of theirs has ended."""
        return self.in_flight.backpressured

    def gather_after(self, request: str, fence: Any, tokens: int) -> None:
        """Gather the request's pages only after the device's work before `fence`. That work computes the first `tokens`
        tokens in all layers."""
        if fence is not None:
            self._fences[request] = fence
        self._computed[request] = max(tokens, self.computed(request))

    def computed(self, request: str) -> int:
        """The number of the request's tokens that are known to be computed in all layers."""
        return self._computed.get(request, 0)

    def forget(self, request: str) -> None:
        """Forget what `gather_after` said of this request."""
        self._fences.pop(request, None)
        self._computed.pop(request, None)

    def post(self, chunk: OutgoingChunk, path: SendPath, now: float) -> messages.Message | None:
        """Send a chunk by the first way that fits (table at `SendPipeline`). Fills in the second part of its record.

        Returns:
            The message that tells the consumer where to read the chunk; None if the chunk is written to it.

        Raises:
            RevokedError: the pages were taken back, before or while they were read.
            TransportError: the write cannot start. The chunk holds no send slot then.
        """
        chunk.deadline = now + self._config.stall_timeout_s
        payload: Payload | Pieces | None
        with self._gate.touching(chunk.request) as confirm:
            if chunk.direct and (payload := self._pieces(chunk)):
                chunk.nbytes, chunk.checksum = payload.nbytes, payload.checksum()
                confirm()
                return self._leave(chunk, payload)
            if (payload := self._in_place(chunk, path)) is not None:
                chunk.nbytes, chunk.checksum = len(payload), checksum_of(payload)
                confirm()  # if the pages change from here on, the checksum tells
                self._write(chunk, payload, path)
                return None
            payload, prepared = self._fill(chunk, path, confirm)
        try:  # the pages are no longer read: the engine need not wait for the rest
            if prepared is None:
                chunk.checksum = self._checksum(payload, path)
            if path.read:
                return self._leave(chunk, payload)
            self._write(chunk, payload, path, prepared)
        except BaseException:
            self._free(chunk)
            raise
        return None

    @property
    def begins_early(self) -> bool:
        """Whether a chunk can be gathered while the preceding chunk is posted."""
        return not self._cache.on_host and len(self._free_slots) > 1

    def post_next(self, chunk: OutgoingChunk, path: SendPath) -> None:
        """Announce the chunk that will probably be posted after the next one. `settle` must follow. The bytes gathered for
        it are used only if its gate is open when it is posted."""
        slot = self._slots(path).slot(self._free_slots[-2])
        fence = self._fences.get(chunk.request)
        self._cache.gather_next(chunk.route, chunk.planned, chunk.pages, slot, fence)

    def settle(self) -> None:
        """See `PagedCache.settle`."""
        self._cache.settle()

    def chunk_ended(self, key: Key) -> OutgoingChunk | None:
        """A chunk has arrived, or certainly will not: its send slot is free. None if it was not under way."""
        chunk = self.in_flight.chunk_ended(key)
        if chunk is not None:
            self._free(chunk)
        return chunk

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every send slot is free or under way exactly once. A session is
        backpressured exactly if it has as many chunks under way as it may have."""
        chunks = self.in_flight.chunks.values()
        used = [chunk.send_slot for chunk in chunks if chunk.send_slot is not None]
        if sorted([*self._free_slots, *used]) != list(range(self._sending.slots)):
            raise RuntimeError(
                f"send slots: {sorted(self._free_slots)} free and {sorted(used)} under way, "
                f"wanted each of 0-{self._sending.slots - 1} once"
            )
        self.in_flight.check_integrity()

    def _pieces(self, chunk: OutgoingChunk) -> Pieces | None:
        """The chunk's pages, as memory that the consumer may read; None if they are not in host memory, or too many."""
        route = chunk.route
        pieces = self._cache.pieces(
            route.source, route.source_head, route, chunk.planned, chunk.pages
        )
        if not pieces:
            return None
        pieces = pieces.joined()
        return pieces if len(pieces.addresses) <= messages.MAX_PIECES else None

    def _in_place(self, chunk: OutgoingChunk, path: SendPath) -> memoryview | None:
        """The chunk's pages, if the transport can write the chunk straight from them; otherwise None."""
        if path.read or not path.transport.copies:
            return None
        return self._cache.in_place(chunk.route, chunk.planned, chunk.pages)

    def _fill(
        self, chunk: OutgoingChunk, path: SendPath, confirm: Callable[[], None]
    ) -> tuple[Payload, Callable[[], int] | None]:
        """Bring a chunk into a free send slot; returns the payload there. If the chunk was sealed, and not gathered,
        also returns the function that starts its write.

        A chunk is never gathered straight into the landing slot: a producer that was given up can still write there,
        and the checksum would certify that producer's bytes.
        """
        chunk.send_slot = (
            self._free_slots.pop()
        )  # the one used last is still in the processor's cache
        try:
            slot, fence = self._slots(path).slot(chunk.send_slot), self._fences.get(chunk.request)
            if (prepared := self._seal(chunk, path, slot)) is not None:
                payload = slot[: chunk.nbytes]
            else:
                payload = self._cache.gather(chunk.route, chunk.planned, chunk.pages, slot, fence)
                chunk.nbytes = len(payload)
            confirm()
        except BaseException:
            self._free(chunk)
            raise
        return payload, prepared

    def _seal(
        self, chunk: OutgoingChunk, path: SendPath, slot: Payload
    ) -> Callable[[], int] | None:
        """Seal a chunk of whole pages into its send slot. Returns the function that starts the write; None if the
        chunk has to be gathered. A write that is never started ends the connection: numbers of records are missing
        then."""
        if path.read or not path.transport.prepares or not isinstance(slot, memoryview):
            return None
        pieces = self._pieces(chunk)
        if pieces is None or pieces.piece_bytes < LEAST_PIECE_BYTES:
            return None
        chunk.nbytes = pieces.nbytes
        payload = slot[: chunk.nbytes]
        return path.transport.prepare(path.link, self._header(chunk), pieces, chunk.slot, payload)

    def _slots(self, path: SendPath) -> Slab | DeviceSlab:
        """The send slots that chunks on this path are gathered into."""
        on_device = path.transport.device_slots(path.link)
        return on_device or (None if path.read else path.transport.sends_from) or self._sending

    def _checksum(self, payload: Payload, path: SendPath) -> bytes:
        """The checksum of the chunk that was gathered last; empty if its transport verifies every byte."""
        if checksum := self._cache.last_checksum:
            return checksum
        if path.transport.verifies and not path.read:
            return b""
        assert isinstance(payload, memoryview)  # a payload on a device was summed there
        return checksum_of(payload)

    def _write(
        self,
        chunk: OutgoingChunk,
        payload: Payload,
        path: SendPath,
        prepared: Callable[[], int] | None = None,
    ) -> None:
        """Start to write a chunk to the consumer. `prepared` starts the write of a sealed chunk."""
        if prepared is not None:
            key = path.transport.name, prepared()
        else:
            token = path.transport.write(path.link, self._header(chunk), payload, chunk.slot)
            key = path.transport.name, token
        if path.transport.sends_from is not None:
            chunk.session_limit, chunk.in_order = _MOST_WRITES, True
        self.in_flight.chunk_begun(key, chunk)

    def _leave(self, chunk: OutgoingChunk, payload: Payload | Pieces) -> messages.Message:
        """Leave a chunk for the consumer to read; returns the message that says where."""
        header, number = self._header(chunk), next(self._numbers)
        chunk.session_limit = _MOST_LEFT
        self.in_flight.chunk_begun((LEFT, number), chunk)
        if isinstance(payload, Pieces):
            return messages.LeftInPages(
                transfer=chunk.transfer,
                number=number,
                slot=chunk.slot,
                piece_bytes=payload.piece_bytes,
                addresses=payload.addresses.astype("<u8").tobytes(),
                header=header,
            )
        assert chunk.send_slot is not None
        return messages.LeftInSlot(
            transfer=chunk.transfer,
            number=number,
            send_slot=chunk.send_slot,
            slot=chunk.slot,
            nbytes=chunk.nbytes,
            header=header,
        )

    def _header(self, chunk: OutgoingChunk) -> bytes:
        return encode_header(chunk.header(self._epoch, self._cache.passed))

    def _free(self, chunk: OutgoingChunk) -> None:
        """The chunk's send slot is not used any more."""
        if chunk.send_slot is not None:
            self._free_slots.append(chunk.send_slot)


class ChunkSender:
    """Sends the chunks that a producer's state machine chooses, and reports how each ended. Used by the agent's thread
    only.

    Args:
        say: sends a message to a consumer.
        act: carries out the state machine's actions.
    """

    def __init__(
        self,
        resources: RankResources,
        producer: Producer,
        send_pipeline: SendPipeline,
        sessions: ConsumerSessions,
        say: Callable[[bytes, messages.Message], None],
        act: Callable[[list[Action]], None],
    ) -> None:
        self._telemetry = resources.telemetry
        self._steps = resources.steps
        self._producer = producer
        self._send_pipeline = send_pipeline
        self._sessions = sessions
        self._say = say
        self._act = act

    def ready(self) -> Iterator[OutgoingChunk]:
        """Chunks that can be sent now. Call `send` with each before the next is taken."""
        compiling = self._sessions.compiling
        while not self._send_pipeline.full:
            chunk = self._producer.next_send({*self._send_pipeline.backpressured, *compiling})
            if chunk is None:
                return
            yield chunk

    def send(self, chunk: OutgoingChunk, now: float) -> None:
        """Send a chunk, if its pages are still kept."""
        if not chunk.kept:
            self._producer.unsend(chunk)
            detail = f"tokens {chunk.planned.first_token}-{chunk.planned.stop_token} are not kept"
            self._act(self._producer.fail(chunk.session, chunk.transfer, Cause.WINDOW, detail))
            return
        self._begin_next()
        try:
            message = self._send_pipeline.post(chunk, self._sessions[chunk.session].path, now)
        except RevokedError:
            self._producer.unsend(chunk)
            return
        except TransportError as error:
            # Not the exception itself: its frames would keep the slot's memory.
            logger.warning("write for transfer %s cannot start: %s", chunk.transfer, str(error))
            self._act(self._producer.written(chunk.session, chunk.transfer, False, str(error)))
            return
        self._producer.gathered(chunk, self._steps.count)
        if chunk.early:  # counted first: a reader that sees all chunks sees the early ones, too
            self._telemetry.count("early_chunks")
        self._telemetry.count("sent_chunks")
        if message is not None:
            self._say(chunk.session, message)

    def settle(self) -> None:
        """Wait for gathers that were begun early. Must follow the last `send` of a turn."""
        self._send_pipeline.settle()

    def _begin_next(self) -> None:
        """Have a device gather the chunk that probably follows while this one is posted."""
        if not self._send_pipeline.begins_early:
            return
        following = self._producer.peek_send(
            {*self._send_pipeline.backpressured, *self._sessions.compiling}
        )
        if following is not None and following.kept:
            self._send_pipeline.post_next(following, self._sessions[following.session].path)

    def chunk_ended(self, key: Key, ok: bool, detail: str) -> None:
        """A chunk has arrived, or certainly will not."""
        chunk = self._send_pipeline.chunk_ended(key)
        if chunk is None:
            return
        if ok:
            self._telemetry.count("sent_bytes", chunk.nbytes)
        else:
            logger.warning("chunk of transfer %s failed: %s", chunk.transfer, detail)
        self._act(self._producer.written(chunk.session, chunk.transfer, ok, detail))
