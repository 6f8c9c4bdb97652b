# SPDX-License-Identifier: Apache-2.0
"""The consumer's state machine: what is asked of whom, which slots are granted, what is believed.

It has no sockets, no engine and no clock. Events come in as calls with the time; what must happen
goes out as actions. Each load ends in exactly one `Finished`.
"""

from collections.abc import Sequence

from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.kv.geometry import Geometry, Shard
from pd_connector.memory.pieces import Pieces
from pd_connector.memory.slab import SlotPool
from pd_connector.plan.route import uncovered
from pd_connector.protocol import messages
from pd_connector.protocol.grants import Grants
from pd_connector.protocol.header import ChunkHeader
from pd_connector.protocol.incoming import (
    Action,
    Dial,
    Finished,
    Held,
    Load,
    PlaceChunk,
    ProducerSession,
    Stalled,
    Tell,
)
from pd_connector.protocol.incoming_transfer import IncomingTransfer, streams
from pd_connector.protocol.incoming_transfers import IncomingTransfers
from pd_connector.protocol.peers import Peer, Source


class Consumer:
    """All transfers of one rank that consumes. Used by one thread.

    Args:
        pool: landing slots; granted to producers, and home again when a transfer has ended.
        one_sided: whether a peer may still write into a slot after its session has ended.
        shards: what the ranks of this engine hold, this one included.
        needs_words: whether a load is of no use without the producer's last words.
    """

    def __init__(
        self,
        config: Config,
        geometry: Geometry,
        pool: SlotPool,
        one_sided: bool,
        shards: Sequence[Shard] = (),
        *,
        needs_words: bool = False,
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._shards = tuple(shards) or (geometry.shard,)
        self._grants = Grants(config, pool)
        self._one_sided = one_sided
        self._needs_words = needs_words
        self._transfers = IncomingTransfers()
        self._sessions: dict[Source, ProducerSession] = {}
        # Last messages to producers whose session does not stand yet.
        self._unsent: dict[Source, list[messages.Message]] = {}

    @property
    def transfers(self) -> int:
        """Transfers that are held or loading."""
        return len(self._transfers)

    def wanted(self, source: Source) -> list[str]:
        """Transfers that heartbeats to this producer name: those that are still wanted."""
        return self._transfers.of_source(source)

    def wants(self, source: Source) -> bool:
        """Whether any transfer of this producer is wanted."""
        return self._transfers.has_source(source)

    def hold(
        self,
        request: str,
        transfer: str,
        peers: Sequence[Peer],
        watch: bool,
        now: float,
        engine_id: str = "",
    ) -> list[Action]:
        """A request that will load this transfer waits for pages: keep the producer's leased.

        Args:
            engine_id: the producer must be this engine; "": any.
            watch: the request asks for pages only when `Held` says that there is KV to load.
        """
        if transfer in self._transfers:
            return [Held(request, Cause.DUPLICATE, transfer)] if watch else []
        incoming = self._new(request, transfer, peers, engine_id, now)
        if watch and not incoming.streams:
            return [Held(request, Cause.GEOMETRY, self._nothing_of_ours(peers))]
        self._transfers.add(incoming)
        if watch:
            incoming.watched = True
            incoming.deadline = now + self._config.wait_timeout_s
            self._transfers.schedule(incoming)
        return self._ask_all(incoming, now)

    def load(self, load: Load, now: float) -> list[Action]:
        """Fetch KV. A transfer is loaded at most once at a time."""
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
        incoming.watched = False
        incoming.deadline = float("inf")
        incoming.began = now
        for stream in incoming.streams.values():
            stream.deadline = now + self._config.connect_timeout_s
        self._transfers.schedule(incoming)
        return self._ask_all(incoming, now)

    def drop(self, request: str, cause: Cause, now: float) -> list[Action]:
        """The request no longer wants its transfer; the producer is told so."""
        incoming = self._transfers.of_request(request)
        if incoming is None:
            return []
        incoming.watched = False
        return self._finish(incoming, cause, "", now)

    def session_up(self, source: Source, session: ProducerSession, now: float) -> list[Action]:
        """A session stands: open what waited for it."""
        self._sessions[source] = session
        actions = self._send_unsent(source)
        for transfer in self.wanted(source):
            if incoming := self._transfers.get(transfer):
                actions += self._ask(incoming, source, now)
        return actions

    def pulse(self, source: Source, engine_age_s: float, now: float) -> list[Action]:
        """A producer's agent lives, and says how long ago its engine began its last step. What
        waits for a prefill there for longer than `engine_timeout_s` is given up, if the engine has
        made no step in that time."""
        limit_s = self._config.engine_timeout_s
        if engine_age_s <= limit_s:
            return []
        actions: list[Action] = []
        detail = f"the producer's engine has made no step for {engine_age_s:.0f} s"
        for transfer in self.wanted(source):
            incoming = self._transfers.get(transfer)
            if incoming is None or incoming.since + limit_s > now:
                continue
            waits = incoming.load is not None and not incoming.streams[source].complete
            if waits or incoming.watched:
                actions += self._finish(incoming, Cause.ENGINE_HUNG, detail, now)
        return actions

    def session_down(
        self, source: Source, cause: Cause, detail: str, now: float, *, silenced: bool = False
    ) -> list[Action]:
        """A session ends or could not be opened: its transfers fail.

        With `silenced` the producer certainly writes no more, and its slots are home at once.
        """
        self._sessions.pop(source, None)
        slots: list[int] = []
        actions: list[Action] = []
        for transfer in self.wanted(source):
            incoming = self._transfers.get(transfer)
            if incoming is None:
                continue
            slots += incoming.streams[source].slots
            actions += self._finish(incoming, cause, detail, now)
        self._grants.session_lost(source, slots, silenced=silenced or not self._one_sided)
        # Also where the two did not agree: pages need not be kept for who will not take them.
        return self._send_unsent(source) + actions + self._grants.grant_free(now)

    def ready(self, source: Source, transfer: str) -> list[Action]:
        """The prefill of a watched transfer has begun."""
        incoming = self._transfers.get(transfer)
        if incoming is None or not incoming.watched or source not in incoming.streams:
            return []
        incoming.watched = False
        incoming.deadline = float("inf")
        return [Held(incoming.request, None, "")]

    def accept(self, source: Source, message: messages.Accept, now: float) -> list[Action]:
        """The producer has KV to send, or has computed all of it."""
        incoming = self._transfers.get(message.transfer)
        stream = incoming.streams.get(source) if incoming else None
        if incoming is None or stream is None or not stream.opened:
            return []
        stream.provisional = message.provisional and not message.complete
        # Chunks into slots granted with `Open` may have overtaken this message.
        if message.chunks != stream.planned:
            detail = f"producer plans {message.chunks} chunks, {stream.planned} wanted"
            return self._finish(incoming, Cause.CHUNK_MISMATCH, detail, now)
        if message.words is not None and incoming.load is not None:
            if problem := message.words.problem(incoming.transfer, incoming.load.identity):
                return self._finish(incoming, *problem, now)
            incoming.words = message.words
        if incoming.accepted(source, message.complete, now):
            stream.deadline = now + self._config.stall_timeout_s
            self._transfers.schedule(incoming)
        return self._go_on(incoming, source, now)

    def refuse(self, source: Source, message: messages.Refuse, now: float) -> list[Action]:
        """The producer will send no (more) KV."""
        incoming = self._transfers.get(message.transfer)
        if incoming is None or source not in incoming.streams:
            return []
        if not (incoming.watched or incoming.streams[source].opened):
            return []
        cause = Cause(message.cause) if message.cause in list(Cause) else Cause.TRANSPORT
        return self._finish(incoming, cause, f"refused by producer: {message.detail}", now)

    def cancelled(self, source: Source, transfer: str, now: float) -> list[Action]:
        """The producer confirms that it writes nothing for this transfer any more."""
        self._grants.confirmed(transfer, source)
        return self._grants.grant_free(now)

    def granted(self, source: Source, transfer: str, slot: int) -> bool:
        """Whether this slot was granted to this producer, for a chunk of this transfer."""
        return self._grants.holds(transfer, source, slot)

    def landed(
        self,
        header: ChunkHeader,
        slot: int,
        payload: memoryview | Pieces,
        now: float,
        *,
        problem: str = "",
        authentic: bool = False,
    ) -> list[Action]:
        """A chunk has landed. Its bytes are used only if its header fits the plan.

        A chunk of a transfer that has ended, or that came twice, is dropped: its slot may be
        another transfer's by now.

        Args:
            payload: the bytes in the slot, or the producer's pages, from which they can be read.
            problem: why the chunk will not come, if so.
            authentic: as in `transport.base.Landed`.
        """
        incoming = self._transfers.get(header.transfer)
        source = self._writer(header, slot)
        if source is None or incoming is None or incoming.load is None:
            return []
        stream = incoming.streams[source]
        chunk = stream.missing.get(header.sequence)
        if chunk is None:
            return []
        if problem:
            return self._finish(incoming, Cause.TRANSPORT, problem, now)
        load, session = incoming.load, self._sessions[source]
        route = session.routes[chunk.route]
        pages = load.pages_of(route, chunk)
        place = PlaceChunk(
            source, header, route, chunk, pages, slot, payload, load.request, authentic
        )
        if wrong := place.problem(session.header(load, chunk, header.checksum)):
            return self._finish(incoming, *wrong, now)
        stream.landed(header.nbytes, now)
        return [place]

    def placed(
        self, place: PlaceChunk, problem: Cause | None, detail: str, now: float
    ) -> list[Action]:
        """A chunk has been scattered, or found wrong (`problem`)."""
        transfer, source = place.header.transfer, place.source
        incoming = self._transfers.get(transfer)
        if incoming is None or not self._grants.holds(transfer, source, place.slot):
            return []
        if problem is not None:
            return self._finish(incoming, problem, detail, now)
        stream = incoming.streams[source]
        incoming.placed(source, place.header)
        self._grants.give_back(stream, place.slot)
        if stream.complete:
            stream.deadline = now + self._config.stall_timeout_s
        return self._go_on(incoming, source, now)

    def tick(self, now: float) -> list[Action]:
        """Fail what has been silent for too long, and free slots whose quarantine is over."""
        actions: list[Action] = []
        for incoming in self._transfers.due(now):
            if incoming.transfer not in self._transfers:  # it has ended with another
                continue
            if incoming.deadline <= now:
                detail = "no KV within wait_timeout_s"
                actions += self._finish(incoming, Cause.WAIT_TIMEOUT, detail, now)
                continue
            for source, stream in incoming.streams.items():
                if stream.received or (stream.complete and not stream.slots):
                    stream.deadline = now + self._config.stall_timeout_s  # it waits for us
                if stream.deadline <= now:
                    cause, detail = stream.timeout
                    actions += self._finish(incoming, cause, detail, now)
                    if cause is Cause.STALLED:
                        actions.append(Stalled(source))
                    break
            else:
                self._transfers.schedule(incoming)
        self._grants.tick(now)
        return actions + self._grants.grant_free(now)

    def check_integrity(self) -> None:
        """Raises RuntimeError if a transfer is in no legal state, or a slot is not in exactly one
        place."""
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
        if unsent := self._unsent.keys() & self._sessions.keys():
            raise RuntimeError(f"messages to {sorted(unsent)} are kept back, and sessions stand")
        self._grants.check_integrity(streams)

    def _new(
        self, request: str, transfer: str, peers: Sequence[Peer], engine_id: str, now: float
    ) -> IncomingTransfer:
        parts = streams(peers, self._geometry, self._shards, waits_for_words=self._needs_words)
        return IncomingTransfer(request, transfer, parts, engine_id=engine_id, since=now)

    def _nothing_of_ours(self, peers: Sequence[Peer]) -> str:
        shards = [peer.shard for peer in peers]
        return f"none of the producer's ranks {shards} holds a part of {self._geometry.shard}"

    def _ask_all(self, incoming: IncomingTransfer, now: float) -> list[Action]:
        return [action for s in incoming.streams for action in self._ask(incoming, s, now)]

    def _ask(self, incoming: IncomingTransfer, source: Source, now: float) -> list[Action]:
        """Ask a producer for what is wanted of it, or for a session first."""
        session = self._sessions.get(source)
        if session is None:
            return [Dial(source, len(incoming.streams))]
        if incoming.transfer not in self._transfers:  # ended by a failure with another rank
            return []
        if incoming.engine_id not in ("", session.engine_id):
            detail = f"engine {session.engine_id} answers, {incoming.engine_id} was wanted"
            return self._finish(incoming, Cause.UNREACHABLE, f"{detail} (restarted since?)", now)
        if incoming.watched:
            return [Tell(source, messages.Watch(incoming.transfer))]
        if incoming.load is None or incoming.streams[source].opened:
            return []
        return self._open(incoming, source, now)

    def _open(self, incoming: IncomingTransfer, source: Source, now: float) -> list[Action]:
        load, stream, session = incoming.load, incoming.streams[source], self._sessions[source]
        assert load is not None
        if problem := stream.prepare(load, session, self._config.slot_bytes):
            return self._finish(incoming, *problem, now)
        stream.opened = True
        limit_s = self._config.wait_timeout_s if load.wait else self._config.stall_timeout_s
        stream.deadline = now + limit_s
        self._transfers.schedule(incoming)
        # A prefill that has not ended would leave its slots unused.
        wanted = 0 if load.wait else stream.planned
        slots = self._grants.take(load.transfer, source, stream, wanted)
        return [Tell(source, stream.opening(load, session, slots))]

    def _go_on(self, incoming: IncomingTransfer, source: Source, now: float) -> list[Action]:
        """Let a rank send more. When all have sent their parts the load has ended."""
        stream = incoming.streams[source]
        if not stream.received:
            self._grants.wait(incoming.transfer, source, stream)
            return self._grants.grant_free(now)
        if stream.burst:
            seconds = now - stream.first_landed
            self._sessions[source].measured(stream.nbytes_after_first, seconds)
        if not incoming.received:
            return self._grants.grant_free(now)
        known = tuple(self._sessions[source].routes for source in incoming.streams)
        if missing := uncovered(known, self._geometry):
            detail = f"no rank of the producer has sent {missing}"
            return self._finish(incoming, Cause.GEOMETRY, detail, now)
        if self._needs_words and incoming.words is None:
            detail = "the producer told nothing but KV, which this engine cannot go on from"
            return self._finish(incoming, Cause.WORDS, detail, now)
        return self._finish(incoming, None, "", now)

    def _finish(
        self, incoming: IncomingTransfer, cause: Cause | None, detail: str, now: float
    ) -> list[Action]:
        transfer = incoming.transfer
        self._transfers.remove(transfer)
        until = now + self._config.lease_s
        actions: list[Action] = []
        for source, stream in incoming.streams.items():
            message = incoming.last_message(source, cause)
            if source in self._sessions:
                actions.append(Tell(source, message))
            else:
                self._unsent.setdefault(source, []).append(message)
            cancelled = cause is not None and source in self._sessions
            self._grants.end(transfer, source, stream, until, cancelled=cancelled)
        return actions + incoming.outcome(cause, detail, now) + self._grants.grant_free(now)

    def _send_unsent(self, source: Source) -> list[Action]:
        return [Tell(source, message) for message in self._unsent.pop(source, [])]

    def _writer(self, header: ChunkHeader, slot: int) -> Source | None:
        """The producer that has the header's epoch and was granted this slot for this transfer.
        One producer may be known by several addresses, and each has a session."""
        incoming = self._transfers.get(header.transfer)
        for source in incoming.streams if incoming else ():
            session = self._sessions.get(source)
            known = session is not None and session.epoch == header.epoch
            if known and self._grants.holds(header.transfer, source, slot):
                return source
        return None
