# SPDX-License-Identifier: Apache-2.0
"""The consumer's state machine: what is asked of whom, which slots are granted, what is believed.

No sockets, no engine, no clock: events come in as calls with the time, and what must happen goes
out as actions. Each load ends in exactly one `Finished`.
"""

from collections.abc import Sequence

from pd_connector import wire
from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.geometry import Geometry, Shard
from pd_connector.grants import Grants
from pd_connector.incoming import (
    Action,
    Dial,
    Finished,
    Held,
    Incoming,
    Load,
    Peer,
    Place,
    Session,
    Source,
    Stalled,
    Tell,
    streams,
)
from pd_connector.memory import Pieces
from pd_connector.route import uncovered
from pd_connector.slab import SlotPool


class Consumer:
    """All transfers of one rank that consumes. Used by one thread.

    Args:
        pool: landing slots; granted to producers, and home again when a transfer has ended.
        one_sided: whether a peer may still write into a slot after its session has ended.
        shards: what the ranks of this engine hold, this one included.
    """

    def __init__(
        self,
        config: Config,
        geometry: Geometry,
        pool: SlotPool,
        one_sided: bool,
        shards: Sequence[Shard] = (),
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._shards = tuple(shards) or (geometry.shard,)
        self._grants = Grants(config, pool)
        self._one_sided = one_sided
        self._transfers: dict[str, Incoming] = {}
        self._sessions: dict[Source, Session] = {}
        # For producers whose session does not stand yet.
        self._farewells: dict[Source, list[wire.Message]] = {}

    @property
    def transfers(self) -> int:
        """Transfers that are held or loading."""
        return len(self._transfers)

    def wanted(self, source: Source) -> list[str]:
        """Transfers to speak for in heartbeats to this producer."""
        return [t for t, incoming in self._transfers.items() if source in incoming.streams]

    def hold(
        self, request: str, transfer: str, peers: Sequence[Peer], watch: bool, now: float
    ) -> list[Action]:
        """A request that will load this transfer waits for room: keep its pages leased. With
        `watch` it asks for room only when told by `Held` that there is KV to load."""
        if transfer in self._transfers:
            return [Held(request, Cause.DUPLICATE, transfer)] if watch else []
        incoming = self._new(request, transfer, peers)
        if watch and not incoming.streams:
            return [Held(request, Cause.GEOMETRY, self._nothing_of_ours(peers))]
        self._transfers[transfer] = incoming
        if watch:
            incoming.watched = True
            incoming.deadline = now + self._config.wait_timeout_s
        return [action for s in incoming.streams for action in self._ask(incoming, s, now)]

    def load(self, load: Load, now: float) -> list[Action]:
        """Fetch KV. A transfer is loaded at most once at a time."""
        transfer = load.transfer
        incoming = self._transfers.get(transfer)
        if incoming is not None and (incoming.load or incoming.request != load.request):
            return [Finished(load.request, Cause.DUPLICATE, transfer)]
        incoming = incoming or self._new(load.request, transfer, load.peers)
        if any(self._grants.ends(transfer, source) for source in incoming.streams):
            self._transfers.pop(transfer, None)
            detail = f"{transfer}: its last load still ends"
            return [Finished(load.request, Cause.DUPLICATE, detail)]
        if not incoming.streams:
            return [Finished(load.request, Cause.GEOMETRY, self._nothing_of_ours(load.peers))]
        self._transfers[transfer] = incoming
        incoming.load = load
        incoming.watched = False
        incoming.deadline = float("inf")
        incoming.began = now
        actions: list[Action] = []
        for source, stream in incoming.streams.items():
            stream.deadline = now + self._config.connect_timeout_s
            actions += self._ask(incoming, source, now)
        return actions

    def drop(self, request: str, cause: Cause, now: float) -> list[Action]:
        """The request no longer wants its transfer; the producer is told so."""
        for incoming in list(self._transfers.values()):
            if incoming.request == request:
                incoming.watched = False
                return self._finish(incoming, cause, "", now)
        return []

    def session_up(self, source: Source, session: Session, now: float) -> list[Action]:
        """A session stands: open what waited for it."""
        self._sessions[source] = session
        actions = self._say_farewells(source)
        for incoming in list(self._transfers.values()):
            if source in incoming.streams:
                actions += self._ask(incoming, source, now)
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
            incoming = self._transfers[transfer]
            slots += incoming.streams[source].slots
            actions += self._finish(incoming, cause, detail, now)
        self._grants.lost(source, slots, silenced=silenced or not self._one_sided)
        # Also where the two did not agree: pages need not be kept for who will not take them.
        return self._say_farewells(source) + actions + self._grants.deal(now)

    def ready(self, source: Source, transfer: str) -> list[Action]:
        """The prefill of a watched transfer has begun."""
        incoming = self._transfers.get(transfer)
        if incoming is None or not incoming.watched or source not in incoming.streams:
            return []
        incoming.watched = False
        incoming.deadline = float("inf")
        return [Held(incoming.request, None, "")]

    def accept(self, source: Source, message: wire.Accept, now: float) -> list[Action]:
        """The producer has KV to send, or has computed all of it."""
        incoming = self._transfers.get(message.transfer)
        stream = incoming.streams.get(source) if incoming else None
        if incoming is None or stream is None or not stream.opened:
            return []
        # Chunks into slots granted with `Open` may have overtaken this message.
        if message.chunks != stream.planned:
            detail = f"producer plans {message.chunks} chunks, {stream.planned} wanted"
            return self._finish(incoming, Cause.CHUNK_MISMATCH, detail, now)
        if incoming.accepted(source, message.complete, now):
            stream.deadline = now + self._config.stall_timeout_s
        return self._go_on(incoming, source, now)

    def refuse(self, source: Source, message: wire.Refuse, now: float) -> list[Action]:
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
        self._grants.stopped(transfer, source)
        return self._grants.deal(now)

    def granted(self, source: Source, transfer: str, slot: int) -> bool:
        """Whether this slot was granted to this producer, for a chunk of this transfer."""
        return self._grants.holds(transfer, source, slot)

    def landed(
        self,
        header: wire.ChunkHeader,
        slot: int,
        payload: memoryview | Pieces,
        now: float,
        *,
        problem: str = "",
        authentic: bool = False,
    ) -> list[Action]:
        """A chunk has landed, or can be read where it lies, or, with a `problem`, will not come.
        Nothing of it is believed before it fits the plan.

        A chunk of a transfer that is over, or that came twice, is dropped: its slot belongs to
        someone else by now.
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
        place = Place(source, header, route, chunk, pages, slot, payload, authentic)
        if wrong := place.problem(session.header(load, chunk, header.checksum)):
            return self._finish(incoming, *wrong, now)
        stream.landed(header.nbytes, now)
        return [place]

    def placed(self, place: Place, problem: Cause | None, detail: str, now: float) -> list[Action]:
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
        for incoming in list(self._transfers.values()):
            if incoming.deadline <= now:
                detail = "no KV within wait_timeout_s"
                actions += self._finish(incoming, Cause.WAIT_TIMEOUT, detail, now)
                continue
            for source, stream in incoming.streams.items():
                if stream.over or (stream.complete and not stream.slots):
                    stream.deadline = now + self._config.stall_timeout_s  # it waits for us
                if stream.deadline <= now:
                    cause, detail = stream.timeout
                    actions += self._finish(incoming, cause, detail, now)
                    if cause is Cause.STALLED:
                        actions.append(Stalled(source))
                    break
        self._grants.tick(now)
        return actions + self._grants.deal(now)

    def _new(self, request: str, transfer: str, peers: Sequence[Peer]) -> Incoming:
        return Incoming(request, transfer, streams(peers, self._geometry, self._shards))

    def _nothing_of_ours(self, peers: Sequence[Peer]) -> str:
        shards = [peer.shard for peer in peers]
        return f"none of the producer's ranks {shards} holds a part of {self._geometry.shard}"

    def _ask(self, incoming: Incoming, source: Source, now: float) -> list[Action]:
        """Ask a producer for what is wanted of it, or for a session first."""
        if source not in self._sessions:
            return [Dial(source)]
        if incoming.watched:
            return [Tell(source, wire.Watch(incoming.transfer))]
        ended = incoming.transfer not in self._transfers  # by a failure with another rank
        if incoming.load is None or ended or incoming.streams[source].opened:
            return []
        return self._open(incoming, source, now)

    def _open(self, incoming: Incoming, source: Source, now: float) -> list[Action]:
        load, stream, session = incoming.load, incoming.streams[source], self._sessions[source]
        assert load is not None
        if problem := stream.prepare(load, session, self._config.slot_bytes):
            return self._finish(incoming, *problem, now)
        stream.opened = True
        patience = self._config.wait_timeout_s if load.wait else self._config.stall_timeout_s
        stream.deadline = now + patience
        # A prefill that has not ended would only sit on its slots.
        wanted = 0 if load.wait else stream.planned
        slots = self._grants.take(load.transfer, source, stream, wanted)
        return [Tell(source, session.opening(load, stream, slots))]

    def _go_on(self, incoming: Incoming, source: Source, now: float) -> list[Action]:
        """Let a rank send more. When all have sent their parts the load has ended."""
        stream = incoming.streams[source]
        if not stream.over:
            self._grants.want(incoming.transfer, source, stream)
            return self._grants.deal(now)
        if stream.burst:
            seconds = now - stream.first_landed
            self._sessions[source].measured(stream.nbytes_after_first, seconds)
        if not incoming.over:
            return self._grants.deal(now)
        known = tuple(self._sessions[source].routes for source in incoming.streams)
        if missing := uncovered(known, self._geometry):
            detail = f"no rank of the producer has sent {missing}"
            return self._finish(incoming, Cause.GEOMETRY, detail, now)
        return self._finish(incoming, None, "", now)

    def _finish(
        self, incoming: Incoming, cause: Cause | None, detail: str, now: float
    ) -> list[Action]:
        transfer = incoming.transfer
        del self._transfers[transfer]
        until = now + self._config.lease_s
        actions: list[Action] = []
        for source, stream in incoming.streams.items():
            farewell = incoming.farewell(source, cause)
            if source in self._sessions:
                actions.append(Tell(source, farewell))
            else:
                self._farewells.setdefault(source, []).append(farewell)
            cancelled = cause is not None and source in self._sessions
            self._grants.over(transfer, source, stream, until, cancelled=cancelled)
        return actions + incoming.outcome(cause, detail, now) + self._grants.deal(now)

    def _say_farewells(self, source: Source) -> list[Action]:
        return [Tell(source, message) for message in self._farewells.pop(source, [])]

    def _writer(self, header: wire.ChunkHeader, slot: int) -> Source | None:
        """The producer that calls itself so and has this slot, for this transfer. One producer
        may be known by several names, of which each has a session."""
        incoming = self._transfers.get(header.transfer)
        for source in incoming.streams if incoming else ():
            session = self._sessions.get(source)
            known = session is not None and session.epoch == header.epoch
            if known and self._grants.holds(header.transfer, source, slot):
                return source
        return None
