# SPDX-License-Identifier: Apache-2.0
"""What a consumer knows of one transfer, and what it may do about it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pd_connector import wire
from pd_connector.errors import Cause
from pd_connector.geometry import Shard
from pd_connector.memory import Pieces
from pd_connector.plan import Chunk
from pd_connector.route import Route


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


@dataclass(slots=True)
class Session:
    """A session that stands, and what was learnt of its producer."""

    epoch: int
    slot_bytes: int
    routes: Sequence[Route]
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
    nbytes: int  # received and verified
    chunks: int
    seconds: float  # since the load began, or since the prefill ended where that was later


Action = Dial | Tell | Place | Held | Finished
