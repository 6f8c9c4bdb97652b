# SPDX-License-Identifier: Apache-2.0
"""The consumer's state machine: what it asks of producers, which slots it grants them, and which chunks it uses.

It has no sockets, no engine and no clock. Events come in as calls with the time, and actions go out. Each load ends in
exactly one `Finished`. `fetches` makes the messages to producers. `Landings` decides which chunks are used.
"""

from collections.abc import Mapping, Sequence

from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.kv.coding import RAW
from pd_connector.kv.geometry import Geometry, Shard
from pd_connector.memory.destination import Destination
from pd_connector.memory.device_bytes import Payload
from pd_connector.memory.pieces import Pieces
from pd_connector.memory.slab import SlotPool
from pd_connector.protocol.consuming.audit import AuditBook, Comparison, Counterpart
from pd_connector.protocol.consuming.codec_choice import CodecChoice
from pd_connector.protocol.consuming.fetches import Fetches
from pd_connector.protocol.consuming.grants import Grants
from pd_connector.protocol.consuming.incoming import (
    Action,
    Finished,
    Held,
    IncomingChunk,
    Load,
    ProducerSession,
)
from pd_connector.protocol.consuming.incoming_transfer import IncomingTransfer, streams
from pd_connector.protocol.consuming.incoming_transfers import IncomingTransfers
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.header import ChunkHeader
from pd_connector.protocol.wire.peers import Peer, Source


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

        A chunk of an ended transfer, or a chunk that came twice, is dropped: its slot may belong to another transfer
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
        """The header that the plan gives this chunk. Checksum and `passed` are copied from the producer's header: the
        plan does not have them."""
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


_UNHEARD = frozenset({Cause.SESSION_LIMIT, Cause.SESSION_LOST, Cause.UNREACHABLE})
"""Causes without a connection to the producer. Last messages are kept for its next session: otherwise its pages would stay
leased although no transfer needs them."""


class Consumer:
    """All transfers of one rank that consumes. Used by one thread.

    Args:
        pool: the landing slots.
        one_sided: a peer can still write into a slot after its session has ended.
        shards: what the ranks of this engine hold, this one included.
        needs_final_token: a load is of no use without the producer's final token.
        audits: results of audits. KV is loaded only from producers that have passed; None: from all.

    Attributes:
        landings: takes the chunks that arrive.
    """

    def __init__(
        self,
        config: Config,
        geometry: Geometry,
        pool: SlotPool,
        one_sided: bool,
        shards: Sequence[Shard] = (),
        *,
        needs_final_token: bool = False,
        audits: AuditBook | None = None,
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._shards = tuple(shards) or (geometry.shard,)
        self._one_sided = one_sided
        self._needs_final_token = needs_final_token
        self._audits = audits
        self._transfers = IncomingTransfers()
        self._sessions: dict[Source, ProducerSession] = {}
        self._grants = Grants(config, pool, self._sessions)
        self._fetches = Fetches(
            config,
            geometry,
            self._transfers,
            self._sessions,
            self._grants,
            needs_final_token=needs_final_token,
            audits=audits,
        )
        self.landings = Landings(
            config, self._transfers, self._sessions, self._grants, self._fetches
        )

    @property
    def transfers(self) -> int:
        """Transfers that are held or loading."""
        return len(self._transfers)

    def transfers_of(self, source: Source) -> tuple[str, ...]:
        """Names of this producer's transfers that have not ended. Heartbeats name them."""
        return self._transfers.of_source(source)

    def wants(self, source: Source) -> bool:
        """Whether a transfer of this producer has not ended."""
        return self._transfers.has_source(source)

    def producers(self) -> list[Counterpart]:
        """The ranks of producers that have a session, once for each path of their KV."""
        return [
            counterpart
            for source, session in self._sessions.items()
            for counterpart in session.counterparts(source)
        ]

    def unaudited(self, source: Source, adapter: str) -> str:
        """A path of this producer's KV that has not passed an audit. "": all have passed, or there is no session."""
        return self._fetches.unaudited(source, adapter)

    def codec(self, source: Source, *, coded: bool) -> str:
        """The codec of this producer's KV, in a transfer that is coded or not."""
        session = self._sessions.get(source)
        routes = session.routes if session and coded else ()
        kv = {route.codec for route in routes if route.section is None}
        return "+".join(sorted(kv)) or RAW.name

    def codec_choice(self, source: Source) -> CodecChoice | None:
        """The choice between coded and plain transfers of this producer; None if there is none."""
        session = self._sessions.get(source)
        return session.choice if session else None

    def hold(
        self,
        request: str,
        transfer: str,
        peers: Sequence[Peer],
        watch: bool,
        now: float,
        engine_id: str = "",
        *,
        keep: bool = False,
    ) -> list[Action]:
        """A request waits for pages, and will load this transfer then. Keep the producer's pages leased.

        Args:
            engine_id: the producer must be this engine; "": any.
            watch: whether the engine allocates pages only after `Held`, which reports that there is KV to load.
            keep: whether it is an audit. The transfer can be held already.
        """
        held = self._transfers.get(transfer)
        if held is not None and keep and held.request == request and held.load is None:
            held.keep = True
            return self._fetches.ask_all(held, now)
        if held is not None:
            return [Held(request, Cause.DUPLICATE, transfer)] if watch else []
        incoming = self._new(request, transfer, peers, engine_id, now)
        if watch and not incoming.streams:
            return [Held(request, Cause.GEOMETRY, self._nothing_of_ours(peers))]
        self._transfers.add(incoming)
        if watch:
            incoming.watched = True
            incoming.deadline = now + self._config.wait_timeout_s
            self._transfers.schedule(incoming)
        return self._fetches.ask_all(incoming, now)

    def load(self, load: Load, now: float) -> list[Action]:
        """Fetch KV. A transfer can have one load at a time."""
        transfer = load.transfer
        incoming = self._transfers.get(transfer)
        if incoming is not None and (incoming.load or incoming.request != load.request):
            return [Finished(load.request, Cause.DUPLICATE, transfer)]
        incoming = incoming or self._new(load.request, transfer, load.peers, load.engine_id, now)
        if any(self._grants.is_ending(transfer, source) for source in incoming.streams):
            self._transfers.remove(transfer)
            detail = f"{transfer}: its last load still ends"
            return [Finished(load.request, Cause.DUPLICATE, detail)]
        if not incoming.streams:
            return [Finished(load.request, Cause.GEOMETRY, self._nothing_of_ours(load.peers))]
        self._transfers.add(incoming)
        incoming.load = load
        incoming.comparison = self._comparison(load) if load.compares else None
        incoming.watched = False
        incoming.deadline = float("inf")
        incoming.began = now
        for stream in incoming.streams.values():
            stream.deadline = now + self._config.connect_timeout_s
        self._transfers.schedule(incoming)
        return self._fetches.ask_all(incoming, now)

    def drop(self, request: str, cause: Cause, now: float) -> list[Action]:
        """The request does not need its transfer any more. The producer gets a `Cancel`."""
        incoming = self._transfers.of_request(request)
        if incoming is None:
            return []
        incoming.watched = False
        return self._fetches.finish(incoming, cause, "", now)

    def give_up(self, transfer: str, detail: str, now: float) -> list[Action]:
        """End this transfer because of an unexpected error, whatever its state."""
        incoming = self._transfers.get(transfer)
        return self._fetches.finish(incoming, Cause.INTERNAL, detail, now) if incoming else []

    def session_up(self, source: Source, session: ProducerSession, now: float) -> list[Action]:
        """A session has begun: open the transfers that waited for it."""
        self._sessions[source] = session
        actions = self._fetches.send_unsent(source)
        for transfer in self.transfers_of(source):
            if incoming := self._transfers.get(transfer):
                actions += self._fetches.ask(incoming, source, now)
        return actions

    def pulse(self, source: Source, engine_age_s: float, now: float) -> list[Action]:
        """A producer has answered a heartbeat. Its engine began its last step `engine_age_s` seconds ago."""
        return self._fetches.pulse(source, engine_age_s, now)

    def session_down(
        self, source: Source, cause: Cause, detail: str, now: float, *, silenced: bool = False
    ) -> list[Action]:
        """A session has ended, or could not be opened: its transfers fail.

        Args:
            silenced: the producer certainly writes no more. Its slots are free at once.
        """
        session = self._sessions.pop(source, None)
        slots: list[int] = []
        actions: list[Action] = []
        for transfer in self.transfers_of(source):
            incoming = self._transfers.get(transfer)
            if incoming is None:
                continue
            stream = incoming.streams[source]
            slots += stream.slots
            if session is not None and cause is Cause.STALLED and stream.opened:
                self._fetches.stalled(source, session, incoming, now)
            actions += self._fetches.finish(incoming, cause, detail, now)
        self._grants.session_lost(source, slots, silenced=silenced or not self._one_sided)
        # Also if the handshake failed: the producer need not keep pages for a consumer that will not fetch.
        last = [] if cause in _UNHEARD else self._fetches.send_unsent(source)
        return last + actions + self._grants.grant_free(now)

    def ready(self, source: Source, transfer: str) -> list[Action]:
        """The prefill of a watched transfer has begun."""
        incoming = self._transfers.get(transfer)
        if incoming is None or not incoming.watched or source not in incoming.streams:
            return []
        incoming.watched = False
        incoming.deadline = float("inf")
        return [Held(incoming.request, None, "")]

    def accept(self, source: Source, message: messages.Accept, now: float) -> list[Action]:
        """The producer has KV to send, or its prefill has ended."""
        return self._fetches.accept(source, message, now)

    def refuse(self, source: Source, message: messages.Refuse, now: float) -> list[Action]:
        """The producer sends no (further) KV."""
        incoming = self._transfers.get(message.transfer)
        if incoming is None or source not in incoming.streams:
            return []
        if not (incoming.watched or incoming.streams[source].opened):
            return []
        cause = Cause(message.cause) if message.cause in list(Cause) else Cause.TRANSPORT
        return self._fetches.finish(incoming, cause, f"refused by producer: {message.detail}", now)

    def cancelled(self, source: Source, transfer: str, now: float) -> list[Action]:
        """The producer confirms that its last write for this transfer has ended."""
        self._grants.confirmed(transfer, source)
        return self._grants.grant_free(now)

    def granted(self, source: Source, transfer: str, slot: int) -> bool:
        """Whether this slot was granted to this producer, for a chunk of this transfer."""
        return self._grants.holds(transfer, source, slot)

    def tick(self, now: float) -> list[Action]:
        """End transfers whose deadlines have passed, and free slots whose quarantine is over."""
        actions: list[Action] = []
        for incoming in self._transfers.due(now):
            if incoming.transfer not in self._transfers:  # it has ended with another
                continue
            actions += self._fetches.look_after(incoming, now)
        self._grants.tick(now)
        self._fetches.forget_unsent(now)
        return actions + self._grants.grant_free(now)

    def check_integrity(self) -> None:
        """Raises RuntimeError if a transfer's record contradicts itself, or a slot is not in exactly one place."""
        streams = {}
        self._transfers.check_integrity()
        for incoming in self._transfers:
            try:
                incoming.check_integrity()
                for source, stream in incoming.streams.items():
                    if stream.opened and source not in self._sessions:
                        raise RuntimeError(f"{source} was asked for KV, and has no session")
                    streams[incoming.transfer, source] = stream
            except RuntimeError as error:
                raise RuntimeError(f"transfer {incoming.transfer}: {error}") from None
        self._fetches.check_integrity()
        self._grants.check_integrity(streams)

    def _new(
        self, request: str, transfer: str, peers: Sequence[Peer], engine_id: str, now: float
    ) -> IncomingTransfer:
        parts = streams(
            peers, self._geometry, self._shards, waits_for_final_token=self._needs_final_token
        )
        return IncomingTransfer(request, transfer, parts, engine_id=engine_id, since=now)

    def _comparison(self, load: Load) -> Comparison:
        experts = self._audits is not None and self._audits.experts
        return Comparison(load.adapter, experts=experts, states=load.state_token > 0)

    def _nothing_of_ours(self, peers: Sequence[Peer]) -> str:
        shards = [peer.shard for peer in peers]
        return f"none of the producer's ranks {shards} holds a part of {self._geometry.shard}"
