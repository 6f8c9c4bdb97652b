# SPDX-License-Identifier: Apache-2.0
"""Decides which landed chunk is used, and what follows when it is in its pages."""

from collections.abc import Mapping

from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.memory.destination import Destination
from pd_connector.memory.device_bytes import Payload
from pd_connector.memory.pieces import Pieces
from pd_connector.protocol.consuming.fetches import Fetches
from pd_connector.protocol.consuming.grants import Grants
from pd_connector.protocol.consuming.incoming import Action, IncomingChunk, ProducerSession
from pd_connector.protocol.consuming.incoming_transfer import IncomingTransfer
from pd_connector.protocol.consuming.incoming_transfers import IncomingTransfers
from pd_connector.protocol.wire.header import ChunkHeader
from pd_connector.protocol.wire.peers import Source


class Landings:
    """The chunks of all transfers of a consumer. Used by one thread.

    Args:
        sessions: with producers, as they come and go.
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
        """A chunk has landed. It is used only if its header fits the plan.

        A chunk of an ended transfer is dropped, and so is a chunk that came twice: another transfer may have its slot by
        now.

        Args:
            payload: as in `IncomingChunk`.
            problem: why the chunk was not read; empty if it was.
            verified: as in `transport.base.Landed`.
        """
        incoming = self._transfers.get(header.transfer)
        chunk = self._planned(header, slot, payload, verified=verified)
        if incoming is None or chunk is None:
            return []
        if problem:
            return self._fetches.finish(incoming, Cause.TRANSPORT, problem, now)
        if wrong := chunk.problem(self._header_by_plan(chunk)):
            return self._fetches.finish(incoming, *wrong, now)
        incoming.streams[chunk.source].landed(header.nbytes, now)
        return [chunk]

    def expected(self, header: ChunkHeader, slot: int) -> IncomingChunk | None:
        """The chunk that begins to arrive with this header, without its payload; None if it does not fit the plan.
        Call `awaits` before each write into its pages."""
        chunk = self._planned(header, slot, None, verified=False)
        return None if chunk is None or chunk.problem(self._header_by_plan(chunk)) else chunk

    def awaits(self, chunk: IncomingChunk) -> bool:
        """Whether a chunk that was `expected` can still be written into the same pages."""
        incoming = self._transfers.get(chunk.header.transfer)
        if incoming is None or incoming.load is None or incoming.load.request != chunk.request:
            return False
        stream = incoming.streams.get(chunk.source)
        return (
            stream is not None
            and stream.missing.get(chunk.header.sequence) is chunk.planned
            and self._grants.holds(chunk.header.transfer, chunk.source, chunk.slot)
        )

    def _planned(
        self,
        header: ChunkHeader,
        slot: int,
        payload: Payload | Pieces | Destination | None,
        *,
        verified: bool,
    ) -> IncomingChunk | None:
        """The chunk of the plan with the header's number, and its pages; None if no load waits for it."""
        incoming = self._transfers.get(header.transfer)
        if incoming is None or incoming.load is None:
            return None
        source = self._writer(incoming, header, slot)
        if source is None:
            return None
        stream = incoming.streams[source]
        planned = stream.missing.get(header.sequence)
        if planned is None:
            return None
        route = stream.routes[planned.route]
        return IncomingChunk(
            source=source,
            request=incoming.load.request,
            route=route,
            planned=planned,
            pages=incoming.load.pages_of(route, planned),
            slot=slot,
            header=header,
            payload=payload,
            verified=verified,
            comparison=incoming.comparison,
            early=not stream.complete,
        )

    def _header_by_plan(self, chunk: IncomingChunk) -> ChunkHeader:
        """The header that the plan has for this chunk. Checksum and `passed` are the producer's: no plan knows them."""
        header = chunk.header
        incoming = self._transfers.get(header.transfer)
        assert incoming is not None
        assert incoming.load is not None
        return self._sessions[chunk.source].header(
            incoming.load, chunk.route, chunk.planned, header.checksum, header.passed
        )

    def placed(
        self, chunk: IncomingChunk, problem: Cause | None, detail: str, now: float
    ) -> list[Action]:
        """A chunk has been written into its pages, or found wrong (`problem`)."""
        transfer, source = chunk.header.transfer, chunk.source
        incoming = self._transfers.get(transfer)
        if incoming is None or not self._grants.holds(transfer, source, chunk.slot):
            return []
        if problem is not None:
            return self._fetches.finish(incoming, problem, detail, now)
        stream = incoming.streams[source]
        incoming.placed(source, chunk.header)
        self._fetches.placed(source)
        self._grants.give_back(transfer, source, stream, chunk.slot)
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
        """The producer with the header's epoch that was granted this slot for this transfer. One producer can have several
        addresses, each with a session."""
        for source in incoming.streams:
            session = self._sessions.get(source)
            same_epoch = session is not None and session.epoch == header.epoch
            if same_epoch and self._grants.holds(header.transfer, source, slot):
                return source
        return None
