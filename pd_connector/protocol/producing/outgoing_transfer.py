# SPDX-License-Identifier: Apache-2.0
"""What a producer knows of one transfer: its KV so far, and who reads it."""

from dataclasses import dataclass, field

from pd_connector.errors import Cause
from pd_connector.protocol.producing.outgoing import (
    Action,
    Offer,
    OutgoingChunk,
    Reply,
    SessionId,
    Step,
)
from pd_connector.protocol.producing.outgoing_stream import OutgoingStream
from pd_connector.protocol.wire import messages


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
    finished: dict[SessionId, Cause | None] = field(default_factory=dict)  # readers that are done
    # Sessions that asked and were refused: their `Cancel` is not the true consumer's.
    refused: set[SessionId] = field(default_factory=set)
    sessions: set[SessionId] = field(default_factory=set)  # all that have asked for it
    # When its lease ends although a consumer speaks for it, if no chunk is sent by then.
    lease_ends: float = float("inf")
    moved: bool = False  # a chunk was sent, or a reader has ended, since the last heartbeat
    ends_early: bool = False  # for that reason

    @property
    def final(self) -> bool:
        """Whether the prefill has ended."""
        return self.offer is not None and self.offer.final

    @property
    def expiry(self) -> tuple[Cause, str]:
        """What it means that it has expired."""
        if self.final and self.ends_early:
            return Cause.LEASE_EVICTED, "no decode engine had room for it within wait_timeout_s"
        if self.final:
            return Cause.LEASE_EXPIRED, "the lease has expired"
        if self.expected:
            return Cause.WAIT_TIMEOUT, "prefill took too long"
        return Cause.UNKNOWN_TRANSFER, "no such prefill came"

    @property
    def all_finished(self) -> bool:
        """Whether every reader has ended, well or badly."""
        return len(self.finished) >= self.readers

    @property
    def cause(self) -> Cause | None:
        """The first reason for which a reader did not get everything."""
        return next((cause for cause in self.finished.values() if cause is not None), None)

    @property
    def waits(self) -> bool:
        """Whether no consumer has begun to fetch it, nor has room for any of it."""
        return not self.finished and not any(stream.begun for stream in self.streams.values())

    def extend(self, until: float, lease_ends: float) -> None:
        """A consumer speaks for it: keep it until then, or until its lease ends.

        Args:
            lease_ends: when the lease ends if it has moved since the last call.
        """
        if self.moved:
            self.lease_ends, self.moved = lease_ends, False
        self.ends_early = until > self.lease_ends
        self.expires = max(self.expires, min(until, self.lease_ends))

    def link_s(self, tokens: int) -> float:
        """How long the slowest reader's link takes from what is computed to `tokens`, in seconds."""
        done = self.offer.tokens if self.offer else 0
        return max((stream.link_s(tokens - done) for stream in self.streams.values()), default=0.0)

    def offered_by(self, request: str) -> bool:
        """Whether it is this request's KV; another one may have the same transfer by mistake."""
        return self.offer is not None and self.offer.request == request

    def full(self, readers: int) -> bool:
        """Whether all ranks have asked for the transfer, if a rank says that there are `readers` of them."""
        return len(self.streams) + len(self.finished) >= max(self.readers, readers)

    def next_send(self, session: SessionId) -> OutgoingChunk | None:
        """Take the next chunk that this session has granted a slot for, if it is computed."""
        stream, offer = self.streams.get(session), self.offer
        if stream is None or offer is None or not stream.credits or not stream.accepted:
            return None
        if stream.leased_only:
            return None
        planned = stream.take_chunk(offer, self.step)
        if planned is None:
            return None
        self.moved = True
        route = stream.routes[planned.route]
        span = planned.source_pages(route)
        if route.section is not None and planned.first_token != offer.state_token:
            span = range(1, 2)  # the states at `boundary_token`
        return OutgoingChunk(
            transfer=self.transfer,
            request=offer.request,
            session=session,
            route=route,
            planned=planned,
            pages=offer.pages[route.source.table][span.start : span.stop],
            identity=offer.identity,
            slot=stream.credits.popleft(),
            direct=stream.message.direct and offer.final and planned.verbatim,
            early=offer.tokens < stream.message.stop_token,
        )

    def tell_watchers(self) -> list[Action]:
        """Tell who waits that the prefill has begun, if it has."""
        if self.offer is None:
            return []
        told = [Reply(session, messages.Ready(self.transfer)) for session in self.watchers]
        self.watchers.clear()
        return [*told]

    def check_integrity(self) -> None:
        """Raises RuntimeError if it is in no legal state."""
        if self.offer is not None and self.offer.transfer != self.transfer:
            raise RuntimeError(f"has the offer of transfer {self.offer.transfer}")
        if self.step is not None and (self.offer is None or self.final):
            raise RuntimeError("a step is under way, but no prefill")
        if self.final and not self.expected:
            raise RuntimeError("the prefill has ended, and was never expected")
        asked = len(self.streams) + len(self.finished)
        if asked > self.readers:
            raise RuntimeError(f"{asked} readers read or have ended, wanted {self.readers} at most")
        if self.final and self.all_finished:
            raise RuntimeError("all readers have ended, and its pages are still leased")
        for session, stream in self.streams.items():
            if stream.writing and self.offer is None and not self.expected:
                raise RuntimeError(f"reader {session!r} was sent KV that was not offered")
            stream.check_integrity()
