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
    Stream,
    Tell,
)
from pd_connector.memory import Pieces
from pd_connector.plan import chunk_limit, plan
from pd_connector.route import Route, meet, uncovered
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
        self._shard = geometry.shard
        self._shards = tuple(shards) or (geometry.shard,)
        self._heads = frozenset(group.heads for group in geometry.groups)
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
        incoming = Incoming(request, transfer, self._streams(peers), watched=watch)
        if watch and not incoming.streams:
            return [Held(request, Cause.GEOMETRY, self._nothing_of_ours(peers))]
        self._transfers[transfer] = incoming
        actions: list[Action] = []
        if watch:
            incoming.deadline = now + self._config.wait_timeout_s
        for source in incoming.streams:
            if source not in self._sessions:
                actions.append(Dial(source))
            elif watch:
                actions.append(Tell(source, wire.Watch(transfer)))
        return actions

    def load(self, load: Load, now: float) -> list[Action]:
        """Fetch KV. A transfer is loaded at most once at a time."""
        transfer = load.transfer
        incoming = self._transfers.get(transfer)
        if incoming is not None and (incoming.load or incoming.request != load.request):
            return [Finished(load.request, Cause.DUPLICATE, transfer, 0, 0, 0.0)]
        streams = incoming.streams if incoming else self._streams(load.peers)
        if any(self._grants.ends(transfer, source) for source in streams):
            self._transfers.pop(transfer, None)
            detail = f"{transfer}: its last load still ends"
            return [Finished(load.request, Cause.DUPLICATE, detail, 0, 0, 0.0)]
        if not streams:
            detail = self._nothing_of_ours(load.peers)
            return [Finished(load.request, Cause.GEOMETRY, detail, 0, 0, 0.0)]
        incoming = incoming or Incoming(load.request, transfer, streams)
        self._transfers[transfer] = incoming
        incoming.load = load
        incoming.watched = False
        incoming.deadline = float("inf")
        incoming.began = now
        actions: list[Action] = []
        for source, stream in list(streams.items()):
            stream.deadline = now + self._config.connect_timeout_s
            if source not in self._sessions:
                actions.append(Dial(source))
            elif transfer in self._transfers:
                actions += self._open(incoming, source, now)
        return actions

    def drop(self, request: str, cause: Cause, now: float) -> list[Action]:
        """The request no longer wants its transfer; the producer is told so."""
        for incoming in list(self._transfers.values()):
            if incoming.request == request:
                incoming.watched = False
                return self._finish(incoming, cause, "", now)
        return []

    def session_up(
        self,
        source: Source,
        epoch: int,
        routes: Sequence[Route],
        slot_bytes: int,
        now: float,
        *,
        read: bool = False,
        direct: bool = False,
    ) -> list[Action]:
        """A session stands: open what waited for it.

        Args:
            routes: what passes between its producer's rank and this one.
            slot_bytes: size of the producer's slots.
            read: chunks are read from the producer, not written by it.
            direct: and its leased pages where they lie.
        """
        session = Session(epoch, min(slot_bytes, self._config.slot_bytes), routes, read, direct)
        self._sessions[source] = session
        farewells = self._farewells.pop(source, [])
        actions: list[Action] = [Tell(source, message) for message in farewells]
        for incoming in list(self._transfers.values()):
            stream = incoming.streams.get(source)
            if stream is None:
                continue
            if incoming.load and not stream.opened:
                actions += self._open(incoming, source, now)
            elif incoming.watched:
                actions.append(Tell(source, wire.Watch(incoming.transfer)))
        return actions

    def session_down(
        self, source: Source, cause: Cause, detail: str, now: float, *, silenced: bool = False
    ) -> list[Action]:
        """A session has ended or could not be opened: its transfers fail.

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
        self._farewells.pop(source, None)
        return actions + self._grants.deal(now)

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
        found = self._opened_at(source, message.transfer)
        if found is None:
            return []
        incoming, stream = found
        # Chunks into slots granted with `Open` may have overtaken this message.
        if message.chunks != stream.planned:
            detail = f"producer plans {message.chunks} chunks, {stream.planned} wanted"
            return self._finish(incoming, Cause.CHUNK_MISMATCH, detail, now)
        if message.complete and not stream.complete:
            stream.complete = True
            stream.burst = not stream.accepted
            if incoming.load is not None and incoming.load.wait:
                incoming.began = now  # the prefill took until now, not the transfer
            stream.deadline = now + self._config.stall_timeout_s
        stream.accepted = True
        if stream.over:
            return self._stream_over(incoming, source, now)
        self._grants.want(message.transfer, source, stream)
        return self._grants.deal(now)

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
        wanted = session.header(load, chunk, header.checksum)
        if header != wanted or payload.nbytes != wanted.nbytes:
            detail = f"landed {header}, wanted {wanted}, {payload.nbytes} bytes"
            return self._finish(incoming, Cause.CHUNK_MISMATCH, detail, now)
        route = session.routes[chunk.route]
        stream.landed(header.nbytes, now)
        span = chunk.pages(route.destination.page_size)
        pages = load.pages[route.destination.table][span.start : span.stop]
        if len(pages) != len(span) or min(pages) < 0:
            detail = f"no page for tokens {chunk.first_token}-{chunk.stop_token} here"
            return self._finish(incoming, Cause.WINDOW, detail, now)
        return [Place(source, header, route, chunk, pages, slot, payload)]

    def placed(self, place: Place, problem: Cause | None, detail: str, now: float) -> list[Action]:
        """A chunk has been scattered, or found wrong (`problem`)."""
        transfer, source = place.header.transfer, place.source
        incoming = self._transfers.get(transfer)
        if incoming is None or not self._grants.holds(transfer, source, place.slot):
            return []
        if problem is not None:
            return self._finish(incoming, problem, detail, now)
        stream = incoming.streams[source]
        del stream.missing[place.chunk.sequence]
        self._grants.give_back(stream, place.slot)
        incoming.nbytes += place.header.nbytes
        incoming.chunks += 1
        if stream.complete:
            stream.deadline = now + self._config.stall_timeout_s
        if stream.over:
            return self._stream_over(incoming, source, now)
        self._grants.want(transfer, source, stream)
        return self._grants.deal(now)

    def tick(self, now: float) -> list[Action]:
        """Fail what has been silent for too long, and free slots whose quarantine is over."""
        actions: list[Action] = []
        for incoming in list(self._transfers.values()):
            if incoming.deadline <= now:
                detail = "no KV within wait_timeout_s"
                actions += self._finish(incoming, Cause.WAIT_TIMEOUT, detail, now)
                continue
            for stream in incoming.streams.values():
                if stream.over or (stream.complete and not stream.slots):
                    stream.deadline = now + self._config.stall_timeout_s  # it waits for us
                if stream.deadline <= now:
                    actions += self._finish(incoming, *stream.timeout, now)
                    break
        self._grants.tick(now)
        return actions + self._grants.deal(now)

    def _streams(self, peers: Sequence[Peer]) -> dict[Source, Stream]:
        """The ranks of a producer that hold a part of what this rank holds."""
        return {
            peer.source: Stream(sum(meet(peer.shard, shard, self._heads) for shard in self._shards))
            for peer in peers
            if meet(peer.shard, self._shard, self._heads)
        }

    def _nothing_of_ours(self, peers: Sequence[Peer]) -> str:
        shards = [peer.shard for peer in peers]
        return f"none of the producer's ranks {shards} holds a part of {self._shard}"

    def _open(self, incoming: Incoming, source: Source, now: float) -> list[Action]:
        load, stream = incoming.load, incoming.streams[source]
        assert load is not None
        session = self._sessions[source]
        tokens = load.stop_token - load.first_token
        limit = chunk_limit(
            session.routes,
            tokens,
            session.slot_bytes,
            session.bytes_per_s,
            read=session.read,
        )
        try:
            span = load.first_token, load.stop_token
            chunks = plan(session.routes, *span, limit, streamed=load.wait)
        except ValueError as error:
            return self._finish(incoming, Cause.GEOMETRY, str(error), now)
        stream.missing = {chunk.sequence: chunk for chunk in chunks}
        stream.planned = len(chunks)
        stream.opened = True
        patience = self._config.wait_timeout_s if load.wait else self._config.stall_timeout_s
        stream.deadline = now + patience
        # A prefill that has not ended would only sit on its slots.
        wanted = 0 if load.wait else len(chunks)
        message = wire.Open(
            transfer=load.transfer,
            identity=load.identity,
            first_token=load.first_token,
            stop_token=load.stop_token,
            wait=load.wait,
            slots=self._grants.take(load.transfer, source, stream, wanted),
            chunk_bytes=limit,
            readers=stream.readers,
            bytes_per_s=int(session.bytes_per_s or 0),
            direct=session.direct,
        )
        return [Tell(source, message)]

    def _stream_over(self, incoming: Incoming, source: Source, now: float) -> list[Action]:
        """One rank has sent its part; with the last of them the load has ended."""
        stream = incoming.streams[source]
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
            over: wire.Message = wire.Done(transfer)
            if cause is not None:
                over = wire.Cancel(transfer, cause, stream.readers)
            if source in self._sessions:
                actions.append(Tell(source, over))
            else:
                self._farewells.setdefault(source, []).append(over)
            cancelled = cause is not None and source in self._sessions
            self._grants.over(transfer, source, stream, until, cancelled=cancelled)
        if incoming.load is not None:
            seconds = now - incoming.began
            numbers = incoming.nbytes, incoming.chunks, seconds
            actions.append(Finished(incoming.request, cause, detail, *numbers))
        elif incoming.watched:
            actions.append(Held(incoming.request, cause, detail))
        return actions + self._grants.deal(now)

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

    def _opened_at(self, source: Source, transfer: str) -> tuple[Incoming, Stream] | None:
        incoming = self._transfers.get(transfer)
        stream = incoming.streams.get(source) if incoming else None
        if incoming is None or stream is None or not stream.opened:
            return None
        return incoming, stream
