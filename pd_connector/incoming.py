# SPDX-License-Identifier: Apache-2.0
"""What a consumer knows of one transfer, and what it may do about it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pd_connector import wire
from pd_connector.errors import Cause
from pd_connector.geometry import Geometry, Shard
from pd_connector.memory import LOOPS, Pieces
from pd_connector.plan import Chunk, chunk_limit, plan
from pd_connector.route import Route, meet


class Source(NamedTuple):
    """Where a producer is reached. The engine id, if known, must be the one found there."""

    host: str
    port: int
    engine_id: str


class Peer(NamedTuple):
    """One rank of a producer, and what it is said to hold."""

    source: Source
    shard: Shard


class Load(NamedTuple):
    """A request for KV: prompt tokens [first_token, stop_token) into local pages."""

    request: str
    transfer: str
    peers: tuple[Peer, ...]  # all ranks of the producer
    identity: bytes
    first_token: int
    stop_token: int
    pages: tuple[Sequence[int], ...]  # local page ids by table, from the prompt's start; -1: none
    wait: bool  # the prefill may not have ended yet

    def pages_of(self, route: Route, chunk: Chunk) -> Sequence[int]:
        """Local page ids that hold the chunk's tokens, as far as there are any."""
        span = chunk.pages(route.destination.page_size)
        return self.pages[route.destination.table][span.start : span.stop]


class Dial(NamedTuple):
    """Open a session with this producer (nothing, where one stands or is being opened)."""

    source: Source


class Tell(NamedTuple):
    """Send this message to this producer."""

    source: Source
    message: wire.Message


class Place(NamedTuple):
    """A chunk fits the plan: bring it into these pages, verify its checksum, then call `placed`."""

    source: Source
    header: wire.ChunkHeader
    route: Route
    chunk: Chunk
    pages: Sequence[int]  # local page ids that hold the chunk's tokens, in prompt order
    slot: int
    payload: memoryview | Pieces  # here, or in the producer's memory
    authentic: bool = False  # by the transport: these are the bytes that the producer sent

    def problem(self, wanted: wire.ChunkHeader) -> tuple[Cause, str] | None:
        """Why this is not what the plan wants, or None. The checksum is left to whoever places."""
        chunk, nbytes = self.chunk, self.payload.nbytes
        if self.header != wanted or nbytes != wanted.nbytes:
            return Cause.CHUNK_MISMATCH, f"landed {self.header}, wanted {wanted}, {nbytes} bytes"
        count = len(chunk.pages(self.route.destination.page_size))
        if len(self.pages) != count or min(self.pages) < 0:
            return Cause.WINDOW, f"no page for tokens {chunk.first_token}-{chunk.stop_token} here"
        return None


class Held(NamedTuple):
    """A watched transfer can be loaded, or, with a cause, will not come."""

    request: str
    cause: Cause | None
    detail: str


class Finished(NamedTuple):
    """A load has ended; without a cause every page is in place and verified."""

    request: str
    cause: Cause | None
    detail: str
    nbytes: int = 0  # received and verified
    chunks: int = 0
    seconds: float = 0.0  # since the load began, or since the prefill ended where that was later


class Stalled(NamedTuple):
    """A producer has sent nothing for `stall_timeout_s`, of what it had and had slots for."""

    source: Source


Action = Dial | Tell | Place | Held | Finished | Stalled


@dataclass(slots=True)
class Session:
    """A session that stands, and what was learnt of its producer."""

    epoch: int
    slot_bytes: int  # of its slots
    routes: Sequence[Route]  # what passes between its rank and this one
    read: bool = False  # chunks are read from it, not written by it
    direct: bool = False  # and leased pages of it, where they lie
    bytes_per_s: float | None = None

    def header(self, load: Load, chunk: Chunk, checksum: bytes) -> wire.ChunkHeader:
        """What the header of this chunk must say."""
        route = self.routes[chunk.route]
        return wire.chunk_header(
            load.transfer,
            self.epoch,
            load.identity,
            chunk,
            route.codec,
            chunk.nbytes(route),
            checksum,
        )

    def opening(self, load: Load, stream: "Stream", slots: list[int]) -> wire.Open:
        """What asks its producer for this stream, into these slots to begin with."""
        return wire.Open(
            transfer=load.transfer,
            identity=load.identity,
            first_token=load.first_token,
            stop_token=load.stop_token,
            wait=load.wait,
            slots=slots,
            chunk_bytes=stream.chunk_bytes,
            readers=stream.readers,
            bytes_per_s=int(self.bytes_per_s or 0),
            direct=self.direct,
            lanes=LOOPS.loops is not None,
        )

    def measured(self, nbytes: int, seconds: float) -> None:
        """A transfer that had to wait for nothing took so long."""
        if nbytes and seconds > 0:
            rate = nbytes / seconds
            self.bytes_per_s = rate if self.bytes_per_s is None else (self.bytes_per_s + rate) / 2


@dataclass(slots=True)
class Stream:
    """What one rank of the producer sends."""

    readers: int  # ranks of this engine that read from it
    deadline: float = float("inf")
    opened: bool = False
    accepted: bool = False
    complete: bool = False  # the prefill has ended
    burst: bool = False  # it had ended before anything was sent
    slots: list[int] = field(default_factory=list)
    chunk_bytes: int = 0  # at most
    planned: int = 0
    missing: dict[int, Chunk] = field(default_factory=dict)
    first_landed: float = 0.0
    nbytes_after_first: int = 0

    @property
    def over(self) -> bool:
        return self.accepted and not self.missing

    @property
    def timeout(self) -> tuple[Cause, str]:
        """What a passed deadline means."""
        if not self.opened:
            return Cause.UNREACHABLE, "no session within connect_timeout_s"
        if not self.complete:
            return Cause.WAIT_TIMEOUT, "the prefill did not end in time"
        return Cause.STALLED, "no chunk within stall_timeout_s"

    def prepare(self, load: Load, session: Session, slot_bytes: int) -> tuple[Cause, str] | None:
        """Plan chunks that fit the slots of both sides; returns why there is no plan, if so."""
        span = load.first_token, load.stop_token
        self.chunk_bytes = chunk_limit(
            session.routes,
            load.stop_token - load.first_token,
            min(session.slot_bytes, slot_bytes),
            session.bytes_per_s,
            read=session.read,
            direct=session.direct,
        )
        try:
            chunks = plan(session.routes, *span, self.chunk_bytes, streamed=load.wait)
        except ValueError as error:
            return Cause.GEOMETRY, str(error)
        self.missing = {chunk.sequence: chunk for chunk in chunks}
        self.planned = len(chunks)
        return None

    def landed(self, nbytes: int, now: float) -> None:
        """Take note of the link's speed: of what came after the first chunk."""
        if self.first_landed:
            self.nbytes_after_first += nbytes
        else:
            self.first_landed = now


@dataclass(slots=True)
class Incoming:
    """One transfer of one request, from all ranks that hold a part of it."""

    request: str
    transfer: str
    streams: dict[Source, Stream]
    load: Load | None = None  # None: only held, no pages allocated yet
    watched: bool = False  # the engine wants to hear when there is something to load
    began: float = 0.0
    deadline: float = float("inf")  # of a watched hold
    nbytes: int = 0
    chunks: int = 0

    @property
    def over(self) -> bool:
        return all(stream.over for stream in self.streams.values())

    def accepted(self, source: Source, complete: bool, now: float) -> bool:
        """A rank has KV to send, or has computed all of it; returns whether that is news."""
        stream = self.streams[source]
        news = complete and not stream.complete
        if news:
            stream.complete = True
            stream.burst = not stream.accepted
            if self.load is not None and self.load.wait:
                self.began = now  # the prefill took until now, not the transfer
        stream.accepted = True
        return news

    def placed(self, source: Source, header: wire.ChunkHeader) -> None:
        """A chunk is in its pages, and was right."""
        del self.streams[source].missing[header.sequence]
        self.nbytes += header.nbytes
        self.chunks += 1

    def farewell(self, source: Source, cause: Cause | None) -> wire.Message:
        """What a rank is told at the end."""
        if cause is None:
            return wire.Done(self.transfer)
        return wire.Cancel(self.transfer, cause, self.streams[source].readers)

    def outcome(self, cause: Cause | None, detail: str, now: float) -> list[Action]:
        """What the engine is told at the end."""
        if self.load is not None:
            numbers = self.nbytes, self.chunks, now - self.began
            return [Finished(self.request, cause, detail, *numbers)]
        return [Held(self.request, cause, detail)] if self.watched else []


def streams(
    peers: Sequence[Peer], geometry: Geometry, shards: Sequence[Shard]
) -> dict[Source, Stream]:
    """A stream of each rank of a producer that holds a part of what this rank holds.

    Args:
        peers: all ranks of the producer.
        geometry: of this rank.
        shards: what all ranks of this engine hold.
    """
    heads = frozenset(group.heads for group in geometry.groups)
    return {
        peer.source: Stream(sum(meet(peer.shard, shard, heads) for shard in shards))
        for peer in peers
        if meet(peer.shard, geometry.shard, heads)
    }
