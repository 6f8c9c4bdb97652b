# SPDX-License-Identifier: Apache-2.0
"""Incoming chunks: which are being read, and how they get into pages and are verified."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pd_connector.agent.consuming.pair_counts import PairCounts
from pd_connector.agent.page_gate import PageGate, RevokedError
from pd_connector.errors import Cause, TransportError
from pd_connector.kv.coding import coarsest
from pd_connector.memory.destination import Destination
from pd_connector.memory.device_bytes import Payload
from pd_connector.memory.pieces import Pieces
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.consuming.audit import Distance
from pd_connector.protocol.consuming.incoming import Load, PlaceChunk
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.peers import Source
from pd_connector.telemetry import Telemetry
from pd_connector.transport.base import LEAST_PIECE_BYTES, Transport
from pd_kernels.checksum import checksum_of

Key = tuple[Source, int]
"""The producer that leaves a chunk to be read, and the landing slot that was granted for it."""


class ReceivePath(NamedTuple):
    """How chunks come from a producer."""

    transport: Transport
    expected: Hashable  # the transport's handle of the producer
    own: bool = False  # only this process writes into landing slots: it reads chunks from the producer's memory


class ChunkPages(Destination):
    """The pages of one chunk. They are written only while its load waits for it, and only while its
    request's gate is open: an engine that wants them back waits for one record at most."""

    def __init__(
        self,
        place: PlaceChunk,
        pieces: Pieces,
        gate: PageGate,
        awaited: Callable[[PlaceChunk], bool],
    ) -> None:
        self.nbytes = pieces.nbytes
        self._place = place
        self._pieces = pieces
        self._gate = gate
        self._awaited = awaited
        self._filled = 0

    @contextlib.contextmanager
    def memory(self, start: int, stop: int) -> Iterator[Sequence[memoryview]]:
        with contextlib.ExitStack() as touching:
            if not self._awaited(self._place):
                yield ()
                return
            try:
                touching.enter_context(self._gate.touching(self._place.request))
            except RevokedError:
                yield ()
                return
            yield list(self._pieces.buffers(start, stop))
            self._filled += stop - start

    def filled_as(self, place: PlaceChunk) -> bool:
        """Whether all of this chunk, and no other one, was written into these pages."""
        # The prompt may have been computed to its end since the chunk began to arrive.
        same = self._place._replace(payload=None, verified=True, early=place.early)
        return self._filled == self.nbytes and same == place._replace(payload=None)


class ReceivePipeline:
    """Used by the agent's thread only.

    Args:
        codecs: in which KV may have passed that is used here.

    How a chunk gets into pages, by the type of `PlaceChunk.payload`:

    | payload | the producer's way (`SendPipeline`) | into pages | checksum that is compared |
    |---|---|---|---|
    | `Pieces` | pages left | the consumer copies page by page (`Transport.pull`) | of its own pages |
    | `Pieces`, in an audit | the same | none: copied beside them, and compared | of the copy |
    | `Destination` | sealed slot written | the transport has opened each record into them | none: tags |
    | bytes | any other, or a sealed slot that arrived in a landing slot | scattered; in an audit, compared | of the slot, after the copy; none if `verified` |
    | bytes of a state | the same | copied apart; `place_states` scatters all of the load at once | of the copy; none if `verified` |
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
        self._loads: dict[str, tuple[str, Any]] = {}  # by transfer: its request, and the fence
        # By request: chunks of states that were verified, each with a copy of its payload.
        self._states: dict[str, list[tuple[PlaceChunk, memoryview]]] = {}

    def fill_after(self, load: Load, fence: Any) -> None:
        """The load's pages are filled after the work that `fence` stands for: it may still write
        them for the request that had them before."""
        self._loads.setdefault(load.transfer, (load.request, fence))

    def forget(self, request: str) -> None:
        self._states.pop(request, None)
        self._loads = {t: known for t, known in self._loads.items() if known[0] != request}

    def is_reading(self, source: Source, slot: int) -> bool:
        """Whether a chunk that this producer left for this slot is being read."""
        return (source, slot) in self._reading

    def begin_read(
        self, source: Source, path: ReceivePath, left: messages.LeftInSlot | messages.LeftInPages
    ) -> Pieces | None:
        """Begin to read a chunk. Returns where it lies, if it is read from pages, at once.

        Raises TransportError if the read cannot start.
        """
        self._reading[source, left.slot] = left.number
        if isinstance(left, messages.LeftInPages):
            addresses = np.frombuffer(left.addresses[: len(left.addresses) // 8 * 8], "<u8")
            return Pieces(addresses, left.piece_bytes)
        path.transport.read(path.expected, left.send_slot, left.nbytes, left.slot, left.header)
        return None

    def end_read(self, slot: int) -> list[tuple[Source, messages.Taken]]:
        """The chunk that was left for this landing slot has been read, or is not wanted.
        Returns whom to tell, and what."""
        keys = [key for key in self._reading if key[1] == slot]
        return [(key[0], messages.Taken(self._reading.pop(key))) for key in keys]

    def forget_reads(self, source: Source) -> None:
        """The session has ended: forget what this producer left to be read."""
        self._reading = {key: number for key, number in self._reading.items() if key[0] != source}

    def place(self, place: PlaceChunk, path: ReceivePath) -> tuple[Cause | None, str]:
        """Scatter, or compare, and verify one chunk; returns what was wrong with it.

        The checksum is formed after the copy, because a peer that was given up may still write into the
        slot. The checksum shows what it writes before or during the copy. Wrong bytes in the load's own
        pages do no harm: the pages count only when every chunk was right.

        Raises AbandonedError if the engine has given the agent up: the pages may be another's.
        """
        request, fence = self._loads[place.header.transfer]
        passed = place.header.passed
        if passed not in self._codecs:
            return (
                Cause.CODEC,
                f"its KV was computed on KV that had passed in {passed}, which this engine does not permit",
            )
        try:
            with self._gate.touching(request):
                checksum, distances = self._fill(place, path, fence)
        except TransportError as error:
            return Cause.TRANSPORT, str(error)
        if checksum != place.header.checksum:
            detail = f"chunk {place.header.sequence} of transfer {place.header.transfer}"
            return Cause.CHECKSUM, f"{detail} is corrupt"
        if place.comparison is not None:
            place.comparison.note(place.route, distances, passed)
        else:
            self._cache.passed = coarsest((self._cache.passed, passed, place.route.error_of))
        self._telemetry.count("received_chunks")
        self._telemetry.count("received_bytes", place.header.nbytes)
        self._pairs.received(place)
        return None, ""

    def _fill(
        self, place: PlaceChunk, path: ReceivePath, fence: Any
    ) -> tuple[bytes, Sequence[Distance]]:
        """Fill the chunk's pages, or compare with them, in the way that `ReceivePipeline` says; returns the checksum of what
        was copied, and the distances if it was compared.

        Raises TransportError if it cannot be copied.
        """
        payload = place.payload
        assert payload is not None  # it has landed
        if isinstance(payload, Destination):
            if not (isinstance(payload, ChunkPages) and payload.filled_as(place)):
                raise TransportError("its pages were taken back while it arrived")
            return b"", ()
        if isinstance(payload, Pieces):
            if place.comparison is None:
                return self._pull(place, payload, path), ()
            return self._pull_apart(place, payload, path, fence)
        if place.route.section is not None and place.comparison is None:
            return self._keep_state(place, payload), ()
        distances: Sequence[Distance] = ()
        where = place.route, place.chunk, place.pages, payload, fence
        if place.comparison is None:
            self._cache.scatter(*where)
        else:
            distances = self._cache.compare(*where)
        if place.verified and not place.header.checksum:
            # Its transport has checked every byte, and no other process can write them.
            return b"", distances
        return self._cache.last_checksum or _checksum(payload), distances

    def _keep_state(self, place: PlaceChunk, payload: Payload) -> bytes:
        """Copy a chunk of a state out of its landing slot, which is lent again at once; returns the checksum of the
        copy."""
        if isinstance(payload, memoryview):
            memory = memoryview(np.frombuffer(payload, np.uint8).copy().data)
        else:
            memory = payload.to_host()
        self._states.setdefault(place.request, []).append((place, memory))
        if place.verified and not place.header.checksum:
            return b""
        return checksum_of(memory)

    def place_states(self, request: str) -> None:
        """Write all states of a load into their pages: the rest of it is verified.

        Raises RevokedError if the request was dropped, AbandonedError as `place` does.
        """
        kept = self._states.pop(request, [])
        with self._gate.touching(request):
            for place, payload in kept:
                _, fence = self._loads[place.header.transfer]
                self._cache.scatter(place.route, place.chunk, place.pages, payload, fence)

    def destination(
        self, place: PlaceChunk, awaited: Callable[[PlaceChunk], bool]
    ) -> Destination | None:
        """The pages of a chunk that arrives over a transport that verifies it; None where it has to
        be scattered, or compared, or summed when it is complete.

        Args:
            awaited: whether the chunk is still wanted in these pages.
        """
        if place.comparison is not None or place.header.checksum:
            return None
        route = place.route
        where = route.destination, route.destination_head, route, place.chunk, place.pages
        try:
            pieces = self._cache.pieces(*where)
        except IndexError:  # not a page of this cache: that is told when the chunk has landed
            return None
        if pieces is None or pieces.piece_bytes < LEAST_PIECE_BYTES:
            return None
        return ChunkPages(place, pieces, self._gate, awaited)

    def _pull(self, place: PlaceChunk, theirs: Pieces, path: ReceivePath) -> bytes:
        """Copy a chunk from the producer's pages into ours; returns the checksum of ours.

        Raises TransportError if it cannot be copied.
        """
        route = place.route
        ours = self._cache.pieces(
            route.destination, route.destination_head, route, place.chunk, place.pages
        )
        if ours is None:
            raise TransportError(
                "pages were left to be read, and those here are not in host memory"
            )
        self._telemetry.count("pulled_pieces", len(ours.addresses))
        return path.transport.pull(path.expected, theirs, ours)

    def _pull_apart(
        self, place: PlaceChunk, theirs: Pieces, path: ReceivePath, fence: Any
    ) -> tuple[bytes, list[Distance]]:
        """Copy a chunk from the producer's pages into memory of its own, and compare it with ours.

        Raises TransportError if it cannot be copied.
        """
        memory = np.empty(place.header.nbytes, np.uint8)
        whole = Pieces(np.array([memory.ctypes.data], np.uint64), memory.nbytes)
        self._telemetry.count("pulled_pieces", len(theirs.addresses))
        checksum = path.transport.pull(path.expected, theirs, whole)
        payload = memoryview(memory.data).toreadonly()
        where = place.route, place.chunk, place.pages, payload, fence
        return checksum, self._cache.compare(*where)


def _checksum(payload: Payload) -> bytes:
    assert isinstance(payload, memoryview)  # what lies on a device was summed there
    return checksum_of(payload)
