# SPDX-License-Identifier: Apache-2.0
"""What a producer knows of one transfer: its KV so far, and who reads it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pd_connector.errors import Cause
from pd_connector.plan.chunks import Chunk, plan
from pd_connector.plan.cuts import MIN_CHUNK_BYTES
from pd_connector.plan.route import Route
from pd_connector.plan.sizes import bytes_per_token
from pd_connector.protocol import messages

SessionId = bytes
"""The routing id of a consumer's connection."""


class Offer(NamedTuple):
    """KV of one request, as far as it has been computed. A later offer replaces it."""

    transfer: str
    request: str
    pages: tuple[Sequence[int], ...]  # page ids by table, from the prompt's start; -1: not kept
    identity: bytes
    prompt_tokens: int
    tokens: int  # [0, tokens) are computed in all layers
    final: bool  # the prefill has ended: from now on the pages are kept until they are freed

    def problem(self, message: messages.Open, slot_bytes: int) -> tuple[Cause, str] | None:
        """Why this KV is not what a consumer asks for, or None."""
        if message.identity != self.identity:
            return Cause.TOKENS, "the pages belong to other tokens, salt or adapter"
        if not message.first_token < message.stop_token <= self.prompt_tokens:
            asked = f"tokens {message.first_token}-{message.stop_token}"
            return Cause.TOKENS, f"{asked} of a prompt of {self.prompt_tokens}"
        least = min(slot_bytes, MIN_CHUNK_BYTES)
        if not least <= message.chunk_bytes <= slot_bytes:
            fits = f"{least} to {slot_bytes} (a slot)"
            return Cause.GEOMETRY, f"chunks of {message.chunk_bytes} bytes: here {fits}"
        return None


class Step(NamedTuple):
    """How far a prefill step that is under way has come."""

    tokens: int  # [0, tokens) will be computed when it has ended
    stop_layer: int  # and are so already in the model's layers below this one


class Reply(NamedTuple):
    """Send this message to the consumer of this session."""

    session: SessionId
    message: messages.Message


class Free(NamedTuple):
    """The pages of this request are no longer needed; without a cause they were delivered."""

    request: str
    cause: Cause | None


class Send(NamedTuple):
    """Bring this chunk to the consumer, on account of a landing slot that it has granted."""

    transfer: str
    request: str
    session: SessionId
    route: Route
    chunk: Chunk
    pages: Sequence[int]  # page ids that hold the chunk's tokens, in prompt order
    identity: bytes
    slot: int
    direct: bool  # it may be read where it lies: by this consumer, and the pages are leased
    early: bool  # some of what this consumer asked for is still to be computed

    @property
    def kept(self) -> bool:
        """Whether the engine still has all of these pages."""
        wanted = len(self.chunk.pages(self.route.source.page_size))
        return len(self.pages) == wanted and min(self.pages) >= 0


Action = Reply | Free


@dataclass(slots=True)
class _Lane:
    """Chunks of the same layers, by token: the first that is not computed holds up the rest."""

    last_layer: int  # in model numbering
    chunks: deque[Chunk] = field(default_factory=deque)


def _lane(chunk: Chunk) -> tuple[int, int, int]:
    return chunk.route, chunk.first_layer, chunk.stop_layer


@dataclass(slots=True)
class OutgoingStream:
    """One consumer rank that has opened the transfer."""

    message: messages.Open
    routes: Sequence[Route]
    credits: deque[int]
    planned: int = 0
    unsent: int = 0
    token_bytes: float = 0.0  # on the wire, in all layers
    accepted: bool = False
    writing: int = 0
    lanes: dict[tuple[int, int, int], _Lane] = field(default_factory=dict)  # route, layers

    def prepare(self) -> tuple[Cause, str] | None:
        """Plan the chunks; returns why there is no plan, if so."""
        m = self.message
        span = m.first_token, m.stop_token
        try:
            chunks = plan(self.routes, *span, m.chunk_bytes, streamed=m.wait)
        except ValueError as error:
            return Cause.GEOMETRY, str(error)
        for chunk in chunks:
            key = _lane(chunk)
            if key not in self.lanes:
                self.lanes[key] = _Lane(chunk.layers(self.routes[chunk.route])[-1])
            self.lanes[key].chunks.append(chunk)
        self.planned = self.unsent = len(chunks)
        self.token_bytes = bytes_per_token(self.routes)
        return None

    def unsend(self, send: Send) -> None:
        """What `OutgoingTransfer.next_send` gave comes next again."""
        self.writing -= 1
        self.unsent += 1
        self.credits.appendleft(send.slot)
        self.lanes[_lane(send.chunk)].chunks.appendleft(send.chunk)

    def credit(self, slots: Sequence[int]) -> None:
        """Take slots that were granted; more than there are chunks left have no meaning."""
        room = self.unsent - len(self.credits)
        self.credits.extend(slots[: max(0, room)])

    def link_s(self, tokens: int) -> float:
        """How long the link takes for so many tokens, in seconds; endless if it was not measured."""
        rate = self.message.bytes_per_s
        return self.token_bytes * tokens / rate if rate else float("inf")

    def next_lane(self, outgoing: "OutgoingTransfer") -> _Lane | None:
        """The lane whose next chunk comes first in the plan and has been computed."""
        offer, step = outgoing.offer, outgoing.step
        if offer is None:
            return None
        best: _Lane | None = None
        for lane in self.lanes.values():
            if not lane.chunks:
                continue
            chunk = lane.chunks[0]
            ready = chunk.stop_token <= offer.tokens or (
                step is not None
                and chunk.stop_token <= step.tokens
                and lane.last_layer < step.stop_layer
            )
            if ready and (best is None or chunk.sequence < best.chunks[0].sequence):
                best = lane
        return best


@dataclass(slots=True)
class OutgoingTransfer:
    """One transfer."""

    transfer: str
    expires: float
    expected: bool = False
    offer: Offer | None = None
    step: Step | None = None
    streams: dict[SessionId, OutgoingStream] = field(default_factory=dict)
    watchers: set[SessionId] = field(default_factory=set)
    readers: int = 1  # consumer ranks that will ask for it
    over: dict[SessionId, Cause | None] = field(default_factory=dict)  # those that are done
    # Sessions that asked and were refused: their `Cancel` is not the true consumer's.
    refused: set[SessionId] = field(default_factory=set)

    @property
    def final(self) -> bool:
        return self.offer is not None and self.offer.final

    @property
    def expiry(self) -> tuple[Cause, str]:
        """What it means that it has expired."""
        if self.final:
            return Cause.LEASE_EXPIRED, "the lease has expired"
        if self.expected:
            return Cause.WAIT_TIMEOUT, "prefill took too long"
        return Cause.UNKNOWN_TRANSFER, "no such prefill came"

    def link_s(self, tokens: int) -> float:
        """How long the slowest reader's link takes from what is computed to `tokens`, in seconds."""
        done = self.offer.tokens if self.offer else 0
        return max((stream.link_s(tokens - done) for stream in self.streams.values()), default=0.0)

    def offered_by(self, request: str) -> bool:
        """Whether it is this request's KV; another one may have the same transfer by mistake."""
        return self.offer is not None and self.offer.request == request

    def full(self, readers: int) -> bool:
        """Whether as many ranks have asked for it as will, if one says that they are `readers`."""
        return len(self.streams) + len(self.over) >= max(self.readers, readers)

    def next_send(self, session: SessionId) -> Send | None:
        """Take the next chunk that this session has granted a slot for, if it is computed."""
        stream = self.streams.get(session)
        if stream is None or not stream.credits or not stream.accepted:
            return None
        lane = stream.next_lane(self)
        if lane is None:
            return None
        assert self.offer is not None
        chunk = lane.chunks.popleft()
        route = stream.routes[chunk.route]
        span = chunk.pages(route.source.page_size)
        stream.unsent -= 1
        stream.writing += 1
        return Send(
            self.transfer,
            self.offer.request,
            session,
            route,
            chunk,
            self.offer.pages[route.source.table][span.start : span.stop],
            self.offer.identity,
            stream.credits.popleft(),
            direct=stream.message.direct and self.final and chunk.verbatim,
            early=self.offer.tokens < stream.message.stop_token,
        )

    def tell_watchers(self) -> list[Action]:
        """Tell who waits that the prefill has begun, if it has."""
        if self.offer is None:
            return []
        told = [Reply(session, messages.Ready(self.transfer)) for session in self.watchers]
        self.watchers.clear()
        return [*told]

    @property
    def all_over(self) -> bool:
        """Whether every reader has ended, well or badly."""
        return len(self.over) >= self.readers

    @property
    def cause(self) -> Cause | None:
        """The first reason for which a reader did not get everything."""
        return next((cause for cause in self.over.values() if cause is not None), None)
