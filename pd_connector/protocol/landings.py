# SPDX-License-Identifier: Apache-2.0
"""Which chunk that lands in a slot is believed, and what follows once it is in its pages."""

from collections.abc import Mapping

from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.memory.device_bytes import Payload
from pd_connector.memory.pieces import Pieces
from pd_connector.protocol.fetches import Fetches
from pd_connector.protocol.grants import Grants
from pd_connector.protocol.header import ChunkHeader
from pd_connector.protocol.incoming import Action, PlaceChunk, ProducerSession
from pd_connector.protocol.incoming_transfer import IncomingTransfer
from pd_connector.protocol.incoming_transfers import IncomingTransfers
from pd_connector.protocol.peers import Source


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
        payload: Payload | Pieces,
        now: float,
        *,
        problem: str,
        authentic: bool,
    ) -> list[Action]:
        """See `Consumer.landed`."""
        incoming = self._transfers.get(header.transfer)
        if incoming is None or incoming.load is None:
            return []
        source = self._writer(incoming, header, slot)
        if source is None:
            return []
        stream = incoming.streams[source]
        chunk = stream.missing.get(header.sequence)
        if chunk is None:
            return []
        if problem:
            return self._fetches.finish(incoming, Cause.TRANSPORT, problem, now)
        load, session = incoming.load, self._sessions[source]
        route = stream.routes[chunk.route]
        pages = load.pages_of(route, chunk)
        place = PlaceChunk(
            source=source,
            header=header,
            route=route,
            chunk=chunk,
            pages=pages,
            slot=slot,
            payload=payload,
            request=load.request,
            authentic=authentic,
            comparison=incoming.comparison,
        )
        if wrong := place.problem(session.header(load, route, chunk, header.checksum)):
            return self._fetches.finish(incoming, *wrong, now)
        stream.landed(header.nbytes, now)
        return [place]

    def placed(
        self, place: PlaceChunk, problem: Cause | None, detail: str, now: float
    ) -> list[Action]:
        """See `Consumer.placed`."""
        transfer, source = place.header.transfer, place.source
        incoming = self._transfers.get(transfer)
        if incoming is None or not self._grants.holds(transfer, source, place.slot):
            return []
        if problem is not None:
            return self._fetches.finish(incoming, problem, detail, now)
        stream = incoming.streams[source]
        incoming.placed(source, place.header)
        self._grants.give_back(stream, place.slot)
        if stream.complete:
            stream.deadline = now + self._config.stall_timeout_s
        return self._fetches.go_on(incoming, source, now)

    def _writer(self, incoming: IncomingTransfer, header: ChunkHeader, slot: int) -> Source | None:
        """The producer that has the header's epoch and was granted this slot for this transfer.
        One producer may be known by several addresses, and each has a session."""
        for source in incoming.streams:
            session = self._sessions.get(source)
            known = session is not None and session.epoch == header.epoch
            if known and self._grants.holds(header.transfer, source, slot):
                return source
        return None
