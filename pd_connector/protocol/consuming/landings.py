# SPDX-License-Identifier: Apache-2.0
"""Which chunk that lands in a slot is believed, and what follows once it is in its pages."""

from collections.abc import Mapping

from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.memory.destination import Destination
from pd_connector.memory.device_bytes import Payload
from pd_connector.memory.pieces import Pieces
from pd_connector.protocol.consuming.fetches import Fetches
from pd_connector.protocol.consuming.grants import Grants
from pd_connector.protocol.consuming.incoming import Action, PlaceChunk, ProducerSession
from pd_connector.protocol.consuming.incoming_transfer import IncomingTransfer
from pd_connector.protocol.consuming.incoming_transfers import IncomingTransfers
from pd_connector.protocol.wire.header import ChunkHeader
from pd_connector.protocol.wire.peers import Source


class Landings:
    """The chunks of all transfers of a consumer. Used by one thread.

    Args:
        sessions: those that stand.
    """

    def __init__(
        self,
        config: Config,
        transfers: IncomingTransfers,
        sessions: Mapping[Source, ProducerSession],
        grants: Grants,
        fetches: Fetches,
    ) -> None:
        self._config = config
        self._transfers = transfers
        self._sessions = sessions
        self._grants = grants
        self._fetches = fetches

    def landed(
        self,
        header: ChunkHeader,
        slot: int,
        payload: Payload | Pieces | Destination,
        now: float,
        *,
        problem: str = "",
        verified: bool = False,
    ) -> list[Action]:
        """A chunk has landed. Its bytes are used only if its header fits the plan.

        A chunk of a transfer that has ended, or that came twice, is dropped: its slot may be
        another transfer's by now.

        Args:
            payload: the bytes in the slot, or the producer's pages they can be read from, or where they are
                already.
            problem: why the chunk will not come, if so.
            verified: as in `transport.base.Landed`.
        """
        incoming = self._transfers.get(header.transfer)
        place = self._place(header, slot, payload, verified=verified)
        if incoming is None or place is None:
            return []
        if problem:
            return self._fetches.finish(incoming, Cause.TRANSPORT, problem, now)
        if wrong := place.problem(self._wanted(place)):
            return self._fetches.finish(incoming, *wrong, now)
        incoming.streams[place.source].landed(header.nbytes, now)
        return [place]

    def expected(self, header: ChunkHeader, slot: int) -> PlaceChunk | None:
        """Where a chunk belongs that begins to arrive, if it fits the plan. It has not landed yet:
        `awaits` says whether it is still wanted there."""
        place = self._place(header, slot, None, verified=False)
        return None if place is None or place.problem(self._wanted(place)) else place

    def awaits(self, place: PlaceChunk) -> bool:
        """Whether a chunk that was `expected` is still wanted, in the same pages."""
        incoming = self._transfers.get(place.header.transfer)
        if incoming is None or incoming.load is None or incoming.load.request != place.request:
            return False
        stream = incoming.streams.get(place.source)
        return (
            stream is not None
            and stream.missing.get(place.header.sequence) is place.chunk
            and self._grants.holds(place.header.transfer, place.source, place.slot)
        )

    def _place(
        self,
        header: ChunkHeader,
        slot: int,
        payload: Payload | Pieces | Destination | None,
        *,
        verified: bool,
    ) -> PlaceChunk | None:
        """Where a chunk belongs; None if no load waits for it."""
        incoming = self._transfers.get(header.transfer)
        if incoming is None or incoming.load is None:
            return None
        source = self._writer(incoming, header, slot)
        if source is None:
            return None
        stream = incoming.streams[source]
        chunk = stream.missing.get(header.sequence)
        if chunk is None:
            return None
        route = stream.routes[chunk.route]
        return PlaceChunk(
            source=source,
            header=header,
            route=route,
            chunk=chunk,
            pages=incoming.load.pages_of(route, chunk),
            slot=slot,
            payload=payload,
            request=incoming.load.request,
            verified=verified,
            comparison=incoming.comparison,
            early=not stream.complete,
        )

    def _wanted(self, place: PlaceChunk) -> ChunkHeader:
        """What the plan says of this chunk."""
        incoming = self._transfers.get(place.header.transfer)
        assert incoming is not None
        assert incoming.load is not None
        session, told = self._sessions[place.source], place.header
        what = incoming.load, place.route, place.chunk
        return session.header(*what, told.checksum, told.passed)

    def placed(
        self, place: PlaceChunk, problem: Cause | None, detail: str, now: float
    ) -> list[Action]:
        """A chunk has been scattered, or found wrong (`problem`)."""
        transfer, source = place.header.transfer, place.source
        incoming = self._transfers.get(transfer)
        if incoming is None or not self._grants.holds(transfer, source, place.slot):
            return []
        if problem is not None:
            return self._fetches.finish(incoming, problem, detail, now)
        stream = incoming.streams[source]
        incoming.placed(source, place.header)
        self._fetches.placed(source)
        self._grants.give_back(transfer, source, stream, place.slot)
        if stream.complete:
            stream.deadline = now + self._config.stall_timeout_s
        return self._fetches.go_on(incoming, source, now)

    def states_placed(
        self, transfer: str, request: str, problem: Cause | None, detail: str, now: float
    ) -> list[Action]:
        """The states of a load are in their pages (`PlaceStates`), or could not be written (`problem`): it has ended."""
        incoming = self._transfers.get(transfer)
        if incoming is None or incoming.request != request or not incoming.received:
            return []
        return self._fetches.finish(incoming, problem, detail, now)

    def _writer(self, incoming: IncomingTransfer, header: ChunkHeader, slot: int) -> Source | None:
        """The producer that has the header's epoch and was granted this slot for this transfer.
        One producer may be known by several addresses, and each has a session."""
        for source in incoming.streams:
            session = self._sessions.get(source)
            known = session is not None and session.epoch == header.epoch
            if known and self._grants.holds(header.transfer, source, slot):
                return source
        return None
