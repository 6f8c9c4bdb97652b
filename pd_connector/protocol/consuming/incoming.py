# SPDX-License-Identifier: Apache-2.0
"""The records that pass through a consumer's state machine: the engine's loads, its actions, the chunks that it receives, and
its sessions with producers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pd_connector.errors import Cause, Miss
from pd_connector.kv.coding import RAW
from pd_connector.memory.destination import Destination
from pd_connector.memory.device_bytes import Payload
from pd_connector.memory.pieces import Pieces
from pd_connector.plan.chunks import Chunk
from pd_connector.plan.route import Route
from pd_connector.protocol.consuming.audit import Comparison, Counterpart
from pd_connector.protocol.consuming.codec_choice import CodecChoice
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.final_token import FinalToken
from pd_connector.protocol.wire.header import ChunkHeader, header_of
from pd_connector.protocol.wire.peers import Peer, Source


class Load(NamedTuple):
    """A request for KV: prompt tokens [first_token, stop_token) into local pages. The range can be empty: then only the
    producer's final token is needed."""

    request: str
    transfer: str
    peers: tuple[Peer, ...]  # all ranks of the producer
    identity: bytes
    first_token: int
    stop_token: int
    pages: tuple[Sequence[int], ...]  # local page ids by table, from the prompt's start; -1: none
    wait: bool  # the prefill may not have ended yet
    engine_id: str = ""  # the producer must be this engine; "": any
    # An audit: the pages hold this KV already, computed here. Received KV is compared with them,
    # and no page is written. Pages that are not here (-1) are skipped.
    compares: bool = False
    adapter: str = ""  # name and content of the adapter that the KV was computed with
    # States are wanted as they stand after tokens [0, state_token); 0: none are. Each table of a `state` group lists
    # the one page that they go into. A load that does not compare wants them if this rank has such groups.
    state_token: int = 0

    def pages_of(self, route: Route, planned: Chunk) -> Sequence[int]:
        """Ids of the local pages that hold the chunk's tokens. Fewer if the load has fewer."""
        span = planned.destination_pages(route)
        return self.pages[route.destination.table][span.start : span.stop]


class Dial(NamedTuple):
    """Open a session with this producer, unless there is one."""

    source: Source
    addresses: int = 1  # of the transfer that needs the session


class Tell(NamedTuple):
    """Send this message to this producer."""

    source: Source
    message: messages.Message


class IncomingChunk(NamedTuple):
    """One chunk that a granted landing slot has received: the consumer's only record of it. As an action: copy it into
    these pages, verify its checksum, then call `Landings.placed`.

    Attributes:
        source: the producer's rank that sent it.
        request: the request whose pages these are.
        route: route of the chunk.
        planned: the plan's chunk with the number that the header says.
        pages: ids of this engine's pages that hold the chunk's tokens, in prompt order; -1: none.
        slot: the landing slot.
        header: the producer's header of the chunk.
        payload: the bytes here, or where they lie in the producer's memory (`Pieces`), or the pages here that they
            have already reached (`Destination`). None if they have not come yet.
        verified: as in `transport.base.Landed`.
        comparison: the audit that compares the chunk with these pages; None if the chunk is written into them.
        early: it came while the prompt was still computed.
    """

    source: Source
    request: str
    route: Route
    planned: Chunk
    pages: Sequence[int]
    slot: int
    header: ChunkHeader
    payload: Payload | Pieces | Destination | None
    verified: bool = False
    comparison: Comparison | None = None
    early: bool = False

    def problem(self, expected: ChunkHeader) -> tuple[Cause, str] | None:
        """What is wrong with the chunk, as (cause, detail), or None. Its checksum and codecs are checked when it is placed.

        Args:
            expected: the header by the plan.
        """
        if self.route.section is not None and self.header.stop_token != expected.stop_token:
            where = (
                f"after {self.header.stop_token} tokens landed, wanted after {expected.stop_token}"
            )
            return Cause.CHUNK_MISMATCH, f"a state {where}"
        nbytes = self.header.nbytes if self.payload is None else self.payload.nbytes
        if self.header != expected or nbytes != expected.nbytes:
            return Cause.CHUNK_MISMATCH, f"landed {self.header}, wanted {expected}, {nbytes} bytes"
        count = len(self.planned.destination_pages(self.route))
        gone = self.comparison is None and min(self.pages, default=-1) < 0
        if (len(self.pages) != count or gone) and self.route.section is not None:
            return Cause.WINDOW, f"pages {list(self.pages)} for a state here, wanted one"
        if len(self.pages) != count or gone:
            tokens = f"{self.planned.first_token}-{self.planned.stop_token}"
            return Cause.WINDOW, f"no page for tokens {tokens} here"
        return None


class PlaceStates(NamedTuple):
    """All other chunks of this load are verified and in pages. Write its states, which were kept apart, into their
    pages, then call `Landings.states_placed`."""

    transfer: str
    request: str


class Held(NamedTuple):
    """The KV of a watched transfer can be loaded. With a cause: it will not come."""

    request: str
    cause: Cause | None
    detail: str


class Finished(NamedTuple):
    """A load has ended. Without a cause every page is filled and verified. A load from the pool that broke off has a cause,
    and its first pages are filled nevertheless."""

    request: str
    cause: Cause | None
    detail: str
    nbytes: int = 0  # received and verified
    chunks: int = 0
    seconds: float = 0.0  # since the load began, or since the prefill ended if that was later
    final_token: FinalToken | None = None  # from the producer's engine
    comparison: Comparison | None = None  # of a load that compares: its distances
    stop_token: int = 0  # of a load from the pool: tokens before this one are filled and verified
    miss: Miss | None = None  # of a load from the pool: what is wrong with the chunk at that token
    source: Source | None = None  # of a load from a producer: its first rank that sends


class Stalled(NamedTuple):
    """A producer with computed chunks and free slots has sent nothing for `stall_timeout_s`. Its transfer has ended."""

    source: Source


Action = Dial | Tell | IncomingChunk | PlaceStates | Held | Finished | Stalled


@dataclass(slots=True)
class ProducerSession:
    """A session with a producer's rank: what the handshake agreed on, and the measured rate."""

    epoch: int
    slot_bytes: int  # of its send slots
    routes: Sequence[Route]  # along which KV passes from its rank to this one
    read: bool = False  # chunks are read from it, not written by it
    direct: bool = False  # leased pages are read in place, too
    writes_late: bool = False  # it may write into its slots after this session has ended
    way: str = ""  # transport and direction, for the log
    bytes_per_s: float | None = None
    engine_id: str = ""
    model: bytes = b""  # digest of all that the producer says of its model
    model_text: str = ""  # the same for the log
    plain: Sequence[Route] = ()  # the same routes in `raw`, if there is a choice
    choice: CodecChoice | None = None  # between `routes` and `plain`

    def counterpart(self, source: Source, *, coded: bool) -> Counterpart:
        """The producer's key in audits, with the path of its KV (coded or not)."""
        codecs = sorted({route.codec for route in (self.routes if coded else self.plain)})
        path = ", ".join((self.way, *codecs))
        return Counterpart(source, self.epoch, self.engine_id, self.model, self.model_text, path)

    def counterparts(self, source: Source) -> list[Counterpart]:
        """The producer with each path that a transfer of this session can take; the next transfer's path first."""
        ways = (self.coded, not self.coded) if self.choice is not None else (self.coded,)
        return [self.counterpart(source, coded=coded) for coded in ways]

    @property
    def coded(self) -> bool:
        """Whether the next transfer is coded."""
        return self.choice is None or self.choice.coded

    def header(
        self, load: Load, route: Route, planned: Chunk, checksum: bytes, passed: str = RAW.name
    ) -> ChunkHeader:
        """The header that this chunk of a route must have."""
        return header_of(
            planned,
            transfer=load.transfer,
            epoch=self.epoch,
            identity=load.identity,
            codec=route.codec,
            nbytes=planned.nbytes(route),
            checksum=checksum,
            passed=passed,
        )

    def measured(self, nbytes: int, seconds: float, *, coded: bool = True) -> None:
        """A transfer that never waited for its prefill took this long for `nbytes` after its first chunk."""
        if not nbytes or seconds <= 0:
            return
        rate = nbytes / seconds
        if self.choice is not None:
            self.choice.measured(coded=coded, wire_bytes_per_s=rate)
            self.bytes_per_s = self.choice.wire_bytes_per_s
        else:
            self.bytes_per_s = rate if self.bytes_per_s is None else (self.bytes_per_s + rate) / 2
