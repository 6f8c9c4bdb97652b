# SPDX-License-Identifier: Apache-2.0
"""Chunks on their way in: which are being read, and how they come into pages and are verified."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

from pd_connector import wire
from pd_connector.errors import Cause, TransportError
from pd_connector.incoming import Load, Place, Source
from pd_connector.integrity import checksum
from pd_connector.memory import Pieces
from pd_connector.pages import PagedCache
from pd_connector.telemetry import Telemetry
from pd_connector.transport.base import Transport

Key = tuple[Source, int]
"""Who offers a chunk, and the landing slot that goes with it."""


class Way(NamedTuple):
    """How chunks come from a producer."""

    transport: Transport
    expected: Hashable  # of the transport


class Inbox:
    """Used by the agent's thread only."""

    def __init__(self, cache: PagedCache, telemetry: Telemetry) -> None:
        self._cache = cache
        self._telemetry = telemetry
        self._reading: dict[Key, int] = {}  # the number of the offer
        self._fences: dict[str, tuple[str, Any]] = {}  # by transfer: its request, and the fence

    def fence(self, load: Load, fence: Any) -> None:
        """What may still write the load's pages, for whoever had them before, is done when they
        are filled."""
        if fence is not None:
            self._fences[load.transfer] = load.request, fence

    def forget(self, request: str) -> None:
        self._fences = {t: known for t, known in self._fences.items() if known[0] != request}

    def reads(self, source: Source, slot: int) -> bool:
        """Whether a chunk that this producer offered is being read, with this slot."""
        return (source, slot) in self._reading

    def read(
        self, source: Source, way: Way, offered: wire.Offered | wire.OfferedPages
    ) -> Pieces | None:
        """Begin to read a chunk; returns where it lies, if it is in pages and needs no slot.

        Raises TransportError if the read cannot start.
        """
        self._reading[source, offered.slot] = offered.offer
        if isinstance(offered, wire.OfferedPages):
            addresses = np.frombuffer(offered.addresses[: len(offered.addresses) // 8 * 8], "<u8")
            return Pieces(addresses, offered.piece_bytes, offered.lanes)
        way.transport.read(
            way.expected, offered.send_slot, offered.nbytes, offered.slot, offered.header
        )
        return None

    def taken(self, slot: int) -> list[tuple[Source, wire.Taken]]:
        """What was offered with this landing slot has been read, or is not wanted; returns who
        must be told so."""
        keys = [key for key in self._reading if key[1] == slot]
        return [(key[0], wire.Taken(self._reading.pop(key))) for key in keys]

    def lost(self, source: Source) -> None:
        """The session has ended: nobody is there to be told."""
        self._reading = {key: offer for key, offer in self._reading.items() if key[0] != source}

    def place(self, place: Place, way: Way) -> tuple[Cause | None, str]:
        """Scatter and verify one chunk; returns what was wrong with it.

        In this order: a peer that was given up may write into the slot at any moment, and what it
        writes before or during the copy is seen in the checksum. Wrong bytes do no harm in the
        load's own pages, for these count only when all of it was right.
        """
        if isinstance(place.payload, Pieces):
            try:
                found = self._pull(place, place.payload, way)
            except TransportError as error:
                return Cause.TRANSPORT, str(error)
        else:
            _, fence = self._fences.get(place.header.transfer, ("", None))
            self._cache.scatter(place.route, place.chunk, place.pages, place.payload, fence)
            if place.authentic and not place.header.checksum:
                found = b""  # its transport has checked every byte, where nobody else can write
            else:
                found = self._cache.checksum or checksum(place.payload)
        if found != place.header.checksum:
            detail = f"chunk {place.header.sequence} of transfer {place.header.transfer}"
            return Cause.CHECKSUM, f"{detail} is corrupt"
        self._telemetry.count("received_chunks")
        self._telemetry.count("received_bytes", place.header.nbytes)
        return None, ""

    def _pull(self, place: Place, theirs: Pieces, way: Way) -> bytes:
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
        return way.transport.pull(way.expected, theirs, ours)
