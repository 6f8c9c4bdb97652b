# SPDX-License-Identifier: Apache-2.0
"""Incoming chunks: which are being read, and how they get into pages and are verified."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pd_connector.agent.page_gate import PageGate, RevokedError
from pd_connector.errors import Cause, TransportError
from pd_connector.kv.checksum import checksum
from pd_connector.memory.destination import Destination
from pd_connector.memory.pieces import Pieces
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.consuming.audit import Distance
from pd_connector.protocol.consuming.incoming import Load, PlaceChunk
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.peers import Source
from pd_connector.telemetry import Telemetry
from pd_connector.transport.base import LEAST_PIECE_BYTES, Transport

Key = tuple[Source, int]
"""The producer that offers a chunk, and the landing slot that was granted for it."""


class ReceivePath(NamedTuple):
    """How chunks come from a producer."""

    transport: Transport
    expected: Hashable  # the transport's handle of the producer


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
        same = self._place._replace(payload=None, verified=True)
        return self._filled == self.nbytes and same == place._replace(payload=None)


class Inbox:
    """Used by the agent's thread only."""

    def __init__(self, cache: PagedCache, gate: PageGate, telemetry: Telemetry) -> None:
        self._gate = gate
        self._cache = cache
        self._telemetry = telemetry
        self._reading: dict[Key, int] = {}  # the number of the offer
        self._loads: dict[str, tuple[str, Any]] = {}  # by transfer: its request, and the fence

    def begin(self, load: Load, fence: Any) -> None:
        """The load's pages are filled after the work that `fence` stands for: it may still write
        them for the request that had them before."""
        self._loads.setdefault(load.transfer, (load.request, fence))

    def forget(self, request: str) -> None:
        self._loads = {t: known for t, known in self._loads.items() if known[0] != request}

    def reads(self, source: Source, slot: int) -> bool:
        """Whether a chunk that this producer offered with this slot is being read."""
        return (source, slot) in self._reading

    def read(
        self, source: Source, path: ReceivePath, offered: messages.Offered | messages.OfferedPages
    ) -> Pieces | None:
        """Begin to read a chunk. Returns where it lies, if it is read from pages, at once.

        Raises TransportError if the read cannot start.
        """
        self._reading[source, offered.slot] = offered.offer
        if isinstance(offered, messages.OfferedPages):
            addresses = np.frombuffer(offered.addresses[: len(offered.addresses) // 8 * 8], "<u8")
            return Pieces(addresses, offered.piece_bytes)
        path.transport.read(
            path.expected, offered.send_slot, offered.nbytes, offered.slot, offered.header
        )
        return None

    def taken(self, slot: int) -> list[tuple[Source, messages.Taken]]:
        """The chunk that was offered with this landing slot has been read, or is not wanted.
        Returns whom to tell, and what."""
        keys = [key for key in self._reading if key[1] == slot]
        return [(key[0], messages.Taken(self._reading.pop(key))) for key in keys]

    def lost(self, source: Source) -> None:
        """The session has ended: forget what this producer offered."""
        self._reading = {key: offer for key, offer in self._reading.items() if key[0] != source}

    def place(self, place: PlaceChunk, path: ReceivePath) -> tuple[Cause | None, str]:
        """Scatter, or compare, and verify one chunk; returns what was wrong with it.

        The checksum is formed after the copy, because a peer that was given up may still write into the
        slot. The checksum shows what it writes before or during the copy. Wrong bytes in the load's own
        pages do no harm: the pages count only when every chunk was right.

        Raises AbandonedError if the engine has given the agent up: the pages may be another's.
        """
        request, fence = self._loads[place.header.transfer]
        distances: list[Distance] = []
        with self._gate.touching(request):
            if isinstance(place.payload, Pieces):
                try:
                    if place.comparison is None:
                        found = self._pull(place, place.payload, path)
                    else:
                        found, distances = self._pull_apart(place, place.payload, path, fence)
                except TransportError as error:
                    return Cause.TRANSPORT, str(error)
            elif isinstance(place.payload, Destination):
                if not (isinstance(place.payload, ChunkPages) and place.payload.filled_as(place)):
                    return Cause.TRANSPORT, "its pages were taken back while it arrived"
                found = b""
            else:
                assert place.payload is not None
                where = place.route, place.chunk, place.pages, place.payload, fence
                if place.comparison is None:
                    self._cache.scatter(*where)
                else:
                    distances = self._cache.compare(*where)
                if place.verified and not place.header.checksum:
                    # Its transport has checked every byte, and nobody else can write them.
                    found = b""
                else:
                    found = self._cache.last_checksum or _checksum(place)
        if found != place.header.checksum:
            detail = f"chunk {place.header.sequence} of transfer {place.header.transfer}"
            return Cause.CHECKSUM, f"{detail} is corrupt"
        if place.comparison is not None:
            place.comparison.add(place.route, distances)
        self._telemetry.count("received_chunks")
        self._telemetry.count("received_bytes", place.header.nbytes)
        return None, ""

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
                "pages were offered to be read, and those here are not in host memory"
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
        found = path.transport.pull(path.expected, theirs, whole)
        payload = memoryview(memory.data).toreadonly()
        where = place.route, place.chunk, place.pages, payload, fence
        return found, self._cache.compare(*where)


def _checksum(place: PlaceChunk) -> bytes:
    assert isinstance(place.payload, memoryview)  # what lies on a device was summed there
    return checksum(place.payload)
