# SPDX-License-Identifier: Apache-2.0
"""An incoming chunk, from the transport that delivered it into the pages of this engine.

`ChunkReceiver` takes what has landed, asks the state machine whether it fits the plan, and reports how it ended.
`ReceivePipeline` brings the bytes into pages and verifies them. Both pass one record on: `IncomingChunk`.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from pd_connector.agent.confined import confined
from pd_connector.agent.consuming.open_session import OpenSession, ReceivePath
from pd_connector.agent.consuming.open_sessions import OpenSessions
from pd_connector.agent.consuming.pair_counts import PairCounts
from pd_connector.agent.page_gate import AbandonedError, PageGate, RevokedError
from pd_connector.agent.resources import RankResources
from pd_connector.errors import Cause, MalformedMessageError, TransportError
from pd_connector.kv.coding import coarsest
from pd_connector.memory.destination import Destination
from pd_connector.memory.device_bytes import Payload
from pd_connector.memory.pieces import Pieces
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.consuming.audit import Distance
from pd_connector.protocol.consuming.consumer import Consumer
from pd_connector.protocol.consuming.incoming import Action, IncomingChunk, Load
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.header import decode_header
from pd_connector.protocol.wire.peers import Source
from pd_connector.telemetry import Telemetry
from pd_connector.transport.base import LEAST_PIECE_BYTES, Landed
from pd_kernels.checksum import checksum_of

logger = logging.getLogger("pd_connector.agent.consuming.receive_pipeline")

Key = tuple[Source, int]
"""The producer that leaves a chunk to be read, and the landing slot that was granted for it."""


class ChunkPages(Destination):
    """The pages of one chunk. They are written only while its load waits for it, and only while its
    request's gate is open. An engine that takes the pages back waits for one record at most."""

    def __init__(
        self,
        chunk: IncomingChunk,
        pieces: Pieces,
        gate: PageGate,
        awaited: Callable[[IncomingChunk], bool],
    ) -> None:
        self.nbytes = pieces.nbytes
        self._chunk = chunk
        self._pieces = pieces
        self._gate = gate
        self._awaited = awaited
        self._filled = 0

    @contextlib.contextmanager
    def memory(self, start: int, stop: int) -> Iterator[Sequence[memoryview]]:
        with contextlib.ExitStack() as touching:
            if not self._awaited(self._chunk):
                yield ()
                return
            try:
                touching.enter_context(self._gate.touching(self._chunk.request))
            except RevokedError:
                yield ()
                return
            yield list(self._pieces.buffers(start, stop))
            self._filled += stop - start

    def filled_with(self, chunk: IncomingChunk) -> bool:
        """Whether all of this chunk, and no other chunk, was written into these pages."""
        # The prompt may have been computed to its end since the chunk began to arrive.
        arrived = self._chunk._replace(payload=None, verified=True, early=chunk.early)
        return self._filled == self.nbytes and arrived == chunk._replace(payload=None)


class ReceivePipeline:
    """Brings chunks into pages. Used by the agent's thread only.

    Args:
        codecs: the codecs that this engine accepts; KV in another codec is not used.

    How a chunk gets into pages, by the type of `IncomingChunk.payload`:

    | payload | the producer's way (`SendPipeline`) | into pages | checksum that is compared |
    |---|---|---|---|
    | `Pieces` | pages left | the consumer copies page by page (`Transport.pull`) | of its own pages |
    | `Pieces`, in an audit | the same | none: copied beside them, and compared | of the copy |
    | `Destination` | sealed slot written | the transport has opened each record into them | none: tags |
    | bytes | any other, or a sealed slot that arrived in a landing slot | scattered; in an audit, compared | of the slot, after the copy; none if `verified` |
    | bytes of a state | the same | copied apart; `place_states` scatters all of a load at once | of the copy; none if `verified` |
    """

    def __init__(
        self,
        cache: PagedCache,
        gate: PageGate,
        telemetry: Telemetry,
        pairs: PairCounts,
        codecs: Sequence[str],
    ) -> None:
        self._codecs = codecs
        self._gate = gate
        self._cache = cache
        self._telemetry = telemetry
        self._pairs = pairs
        self._reading: dict[Key, int] = {}  # the number that `Taken` repeats
        self._loads: dict[str, tuple[str, Any]] = {}  # by transfer: (request, fence)
        # By request: chunks of states that were verified, each with a copy of its payload.
        self._states: dict[str, list[tuple[IncomingChunk, memoryview]]] = {}

    def fill_after(self, load: Load, fence: Any) -> None:
        """Fill the load's pages only after the device's work before `fence`, which may still write them for their
        previous request. Bytes of these pages that the load will not fill are cleared."""
        self._loads.setdefault(load.transfer, (load.request, fence))
        if not load.compares:
            with contextlib.suppress(RevokedError), self._gate.touching(load.request):
                self._cache.clear(load.pages, load.first_token, load.stop_token, fence)

    def forget(self, request: str) -> None:
        """Drop this request's fence (`fill_after`) and the states that were kept for it."""
        self._states.pop(request, None)
        self._loads = {t: load for t, load in self._loads.items() if load[0] != request}

    def is_reading(self, source: Source, slot: int) -> bool:
        """Whether a chunk that this producer left for this slot is being read."""
        return (source, slot) in self._reading

    def begin_read(
        self, source: Source, path: ReceivePath, left: messages.LeftInSlot | messages.LeftInPages
    ) -> Pieces | None:
        """Begin to read a chunk that the producer left.

        Returns:
            The producer's pages, if the chunk lies there; the caller copies it at once. None if it lies in a send
            slot: the transport has begun to read it.

        Raises:
            TransportError: the read cannot start.
        """
        self._reading[source, left.slot] = left.number
        if isinstance(left, messages.LeftInPages):
            addresses = np.frombuffer(left.addresses[: len(left.addresses) // 8 * 8], "<u8")
            return Pieces(addresses, left.piece_bytes)
        path.transport.read(path.expected, left.send_slot, left.nbytes, left.slot, left.header)
        return None

    def end_read(self, slot: int) -> list[tuple[Source, messages.Taken]]:
        """End the read for this landing slot: the chunk was read, or is not needed. Returns the messages for its
        producer."""
        keys = [key for key in self._reading if key[1] == slot]
        return [(key[0], messages.Taken(self._reading.pop(key))) for key in keys]

    def forget_reads(self, source: Source) -> None:
        """The session has ended: forget what this producer left to be read."""
        self._reading = {key: number for key, number in self._reading.items() if key[0] != source}

    def place(self, chunk: IncomingChunk, path: ReceivePath) -> tuple[Cause | None, str]:
        """Write one chunk into its pages, or compare it with them, and verify it. Returns what was wrong with it, as
        (cause, detail).

        The checksum is formed after the copy, because a peer that was given up may still write into the
        slot. The checksum shows what it writes before or during the copy. Wrong bytes in the load's own
        pages do no harm: the pages count only when every chunk was right.

        Raises AbandonedError if the engine has given the agent up: the pages may be another's.
        """
        request, fence = self._loads[chunk.header.transfer]
        passed = chunk.header.passed
        if passed not in self._codecs:
            return (
                Cause.CODEC,
                f"its KV was computed on KV that had passed in {passed}, which this engine does not permit",
            )
        try:
            with self._gate.touching(request):
                checksum, distances = self._fill(chunk, path, fence)
        except TransportError as error:
            return Cause.TRANSPORT, str(error)
        if checksum != chunk.header.checksum:
            detail = f"chunk {chunk.header.sequence} of transfer {chunk.header.transfer}"
            return Cause.CHECKSUM, f"{detail} is corrupt"
        if chunk.comparison is not None:
            chunk.comparison.note(chunk.route, distances, passed)
        else:
            self._cache.passed = coarsest((self._cache.passed, passed, chunk.route.error_of))
        self._telemetry.count("received_chunks")
        self._telemetry.count("received_bytes", chunk.header.nbytes)
        self._pairs.received(chunk)
        return None, ""

    def _fill(
        self, chunk: IncomingChunk, path: ReceivePath, fence: Any
    ) -> tuple[bytes, Sequence[Distance]]:
        """Fill the chunk's pages, or compare it with them (`ReceivePipeline` has the ways).

        Returns:
            The checksum of the bytes that were copied, and the distances if the chunk was compared.

        Raises:
            TransportError: the chunk cannot be copied.
        """
        payload = chunk.payload
        assert payload is not None  # it has landed
        if isinstance(payload, Destination):
            if not (isinstance(payload, ChunkPages) and payload.filled_with(chunk)):
                raise TransportError("its pages were taken back while it arrived")
            return b"", ()
        if isinstance(payload, Pieces):
            if chunk.comparison is None:
                return self._pull(chunk, payload, path), ()
            return self._pull_apart(chunk, payload, path, fence)
        if chunk.route.section is not None and chunk.comparison is None:
            return self._keep_state(chunk, payload), ()
        distances: Sequence[Distance] = ()
        if chunk.comparison is None:
            self._cache.scatter(chunk.route, chunk.planned, chunk.pages, payload, fence)
        else:
            distances = self._compare(chunk, payload, fence)
        if chunk.verified and not chunk.header.checksum:
            # Its transport has checked every byte, and no other process can write them.
            return b"", distances
        return self._cache.last_checksum or _checksum(payload), distances

    def _keep_state(self, chunk: IncomingChunk, payload: Payload) -> bytes:
        """Copy a chunk of a state out of its landing slot, so that the slot can be granted again at once. Returns the
        copy's checksum."""
        if isinstance(payload, memoryview):
            memory = memoryview(np.frombuffer(payload, np.uint8).copy().data)
        else:
            memory = payload.to_host()
        self._states.setdefault(chunk.request, []).append((chunk, memory))
        if chunk.verified and not chunk.header.checksum:
            return b""
        return checksum_of(memory)

    def place_states(self, request: str) -> None:
        """Write all states of a load into their pages, after its other chunks were verified.

        Raises:
            RevokedError: the request was dropped. No page has been written.
            AbandonedError: as for `place`.
        """
        kept = self._states.pop(request, [])
        with self._gate.touching(request):
            for chunk, payload in kept:
                _, fence = self._loads[chunk.header.transfer]
                self._cache.scatter(chunk.route, chunk.planned, chunk.pages, payload, fence)

    def destination(
        self, chunk: IncomingChunk, awaited: Callable[[IncomingChunk], bool]
    ) -> Destination | None:
        """The pages of a chunk that arrives over a transport that verifies it. None if the chunk has to be scattered,
        compared or summed when it is complete.

        Args:
            awaited: returns whether the load still waits for the chunk (`Landings.awaits`).
        """
        if chunk.comparison is not None or chunk.header.checksum:
            return None
        try:
            pieces = self._pieces(chunk)
        except IndexError:  # not a page of this cache: reported when the chunk has landed
            return None
        if pieces is None or pieces.piece_bytes < LEAST_PIECE_BYTES:
            return None
        return ChunkPages(chunk, pieces, self._gate, awaited)

    def _pull(self, chunk: IncomingChunk, payload: Pieces, path: ReceivePath) -> bytes:
        """Copy a chunk from the producer's pages into this engine's pages; returns the checksum of the latter.

        Raises TransportError if it cannot be copied.
        """
        pieces = self._pieces(chunk)
        if pieces is None:
            raise TransportError(
                "pages were left to be read, and those here are not in host memory"
            )
        self._telemetry.count("pulled_pieces", len(pieces.addresses))
        return path.transport.pull(path.expected, payload, pieces)

    def _pull_apart(
        self, chunk: IncomingChunk, payload: Pieces, path: ReceivePath, fence: Any
    ) -> tuple[bytes, list[Distance]]:
        """Copy a chunk from the producer's pages into new memory, and compare it with its own pages.

        Returns:
            The checksum of the copy, and the distances.

        Raises:
            TransportError: the chunk cannot be copied.
        """
        memory = np.empty(chunk.header.nbytes, np.uint8)
        pieces = Pieces(np.array([memory.ctypes.data], np.uint64), memory.nbytes)
        self._telemetry.count("pulled_pieces", len(payload.addresses))
        checksum = path.transport.pull(path.expected, payload, pieces)
        return checksum, self._compare(chunk, memoryview(memory.data).toreadonly(), fence)

    def _compare(self, chunk: IncomingChunk, payload: Payload, fence: Any) -> list[Distance]:
        return self._cache.compare(chunk.route, chunk.planned, chunk.pages, payload, fence)

    def _pieces(self, chunk: IncomingChunk) -> Pieces | None:
        """The chunk's own pages, as memory in the order of its payload; None if they are not in host memory.

        Raises IndexError if a page is outside this cache.
        """
        route = chunk.route
        return self._cache.pieces(
            route.destination, route.destination_head, route, chunk.planned, chunk.pages
        )


def _checksum(payload: Payload) -> bytes:
    assert isinstance(payload, memoryview)  # a payload on a device was summed there
    return checksum_of(payload)


class ChunkReceiver:
    """Takes chunks in: decodes their headers, asks the state machine of a consumer whether they fit the plan, and
    has them placed. Used by the agent's thread only.

    Args:
        act: carries out the state machine's actions.
    """

    def __init__(
        self,
        resources: RankResources,
        consumer: Consumer,
        receive_pipeline: ReceivePipeline,
        sessions: OpenSessions,
        act: Callable[[Sequence[Action], float], None],
    ) -> None:
        self._telemetry = resources.telemetry
        self._cache = resources.cache
        self._consumer = consumer
        self._receive_pipeline = receive_pipeline
        self._sessions = sessions
        self._act = act

    def read_left(
        self,
        session: OpenSession,
        left: messages.LeftInSlot | messages.LeftInPages,
        now: float,
    ) -> None:
        """Read a chunk that the producer left: from its send slot into the landing slot that was granted for it,
        or from its pages straight into ours.

        Raises TransportError if the read cannot start.
        """
        source = session.source
        granted = self._consumer.granted(source, left.transfer, left.slot)
        reading = self._receive_pipeline.is_reading(source, left.slot)
        if session.path is None or not granted or reading:
            self._sessions.send(session, messages.Taken(left.number))
            return
        payload = self._receive_pipeline.begin_read(source, session.path, left)
        if payload is not None:
            self._take_in(Landed(left.header, left.slot, payload), now)

    def landed(self, landed: Sequence[Landed], now: float) -> None:
        """Chunks have landed. Each is used only if it fits the plan and its checksum is right."""
        for number, landing in enumerate(landed, 1):
            following = landed[number] if number < len(landed) else None
            if following and not following.problem and isinstance(following.payload, Payload):
                self._cache.scatter_next(following.payload)
            give_up = partial(self._give_up, landing, now)
            with confined(self._telemetry, "taking in a chunk", give_up):
                self._take_in(landing, now)
        self._cache.settle()

    def destination(self, encoded: bytes, slot: int, nbytes: int) -> Destination | None:
        """The pages of a chunk that begins to arrive, if it may be decrypted into them."""
        try:
            header = decode_header(encoded)
        except MalformedMessageError:
            return None  # it will be dropped when it has landed
        landings = self._consumer.landings
        chunk = landings.expected(header, slot) if header.nbytes == nbytes else None
        return chunk and self._receive_pipeline.destination(chunk, landings.awaits)

    def place(self, chunk: IncomingChunk) -> tuple[Cause | None, str]:
        """Write a chunk into its pages. Returns what was wrong with it, as (cause, detail)."""
        session = self._sessions.get(chunk.source)
        assert session is not None
        assert session.path is not None  # it has been granted the slot
        path = session.path
        return self._placed(
            chunk.header.transfer, lambda: self._receive_pipeline.place(chunk, path)
        )

    def place_states(self, transfer: str, request: str) -> tuple[Cause | None, str]:
        """Write the states of a load into their pages. Returns what went wrong, as (cause, detail)."""

        def place() -> tuple[None, str]:
            self._receive_pipeline.place_states(request)
            return None, ""

        return self._placed(transfer, place)

    def _placed(
        self, transfer: str, place: Callable[[], tuple[Cause | None, str]]
    ) -> tuple[Cause | None, str]:
        """What `place` returns, or what its exception means."""
        try:
            return place()
        except RevokedError:
            return Cause.ABORTED, "the request was dropped"
        except AbandonedError:
            raise
        except Exception as error:  # a codec or transport, which may be another package's
            logger.exception("a chunk of transfer %s was not placed", transfer)
            self._telemetry.count("session_errors")
            return Cause.INTERNAL, f"the chunk could not be decoded or copied: {error!r}"

    def _take_in(self, landing: Landed, now: float) -> None:
        slot, problem = landing.slot, landing.problem
        try:
            header = decode_header(landing.header)
        except MalformedMessageError as error:
            # Not the exception itself: its frames would keep the slot's memory.
            logger.warning("chunk with an unreadable header dropped: %s", str(error))
            self._telemetry.count("stale_chunks", cause=Cause.MALFORMED_MESSAGE)
            self._tell_taken(slot)
            return
        if problem:
            logger.warning("chunk of transfer %s not read: %s", header.transfer, problem)
        actions = self._consumer.landings.landed(
            header, slot, landing.payload, now, problem=problem, verified=landing.verified
        )
        if not actions:
            self._telemetry.count("stale_chunks", cause=Cause.UNKNOWN_TRANSFER)
        self._act(actions, now)
        self._tell_taken(slot)

    def _give_up(self, landing: Landed, now: float) -> None:
        """An error with a chunk ends its transfer."""
        transfer = decode_header(landing.header).transfer
        detail = "an unexpected error, see this log"
        self._act(self._consumer.give_up(transfer, detail, now), now)
        self._tell_taken(landing.slot)

    def _tell_taken(self, slot: int) -> None:
        """Tell the producer that a chunk has been read, if one was left for this landing slot."""
        for source, taken in self._receive_pipeline.end_read(slot):
            if session := self._sessions.get(source):
                self._sessions.send(session, taken)
