# SPDX-License-Identifier: Apache-2.0
"""A producer's record of one transfer: the KV on offer, and the consumer ranks that watch, read or have finished."""

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
    expires: float  # it ends at this time, unless it is extended
    expected: bool = False  # this engine has queued its request
    offer: Offer | None = None
    step: Step | None = None  # of the prefill, if its layers are sent one by one
    streams: dict[SessionId, OutgoingStream] = field(default_factory=dict)
    watchers: set[SessionId] = field(default_factory=set)
    readers: int = 1  # consumer ranks that will open it
    finished: dict[SessionId, Cause | None] = field(
        default_factory=dict
    )  # readers that have ended, with their causes
    # Sessions whose opening was refused. Their `Cancel` is not that of the intended consumer.
    refused: set[SessionId] = field(default_factory=set)
    given_up: bool = False  # one of them has sent its `Cancel` before the prefill's end
    sessions: set[SessionId] = field(
        default_factory=set
    )  # all that watch it, read it or have tried to
    # The lease ends at this time in spite of heartbeats, if no chunk is sent before.
    lease_ends: float = float("inf")
    moved: bool = False  # since the last heartbeat a chunk was sent, or a reader has ended
    ends_early: bool = False  # `expires` is `lease_ends`

    @property
    def final(self) -> bool:
        """Whether the prefill has ended."""
        return self.offer is not None and self.offer.final

    @property
    def expiry(self) -> tuple[Cause, str]:
        """Cause and detail of its end when it has expired."""
        if self.final and self.ends_early:
            return Cause.LEASE_EVICTED, "no decode engine had room for it within wait_timeout_s"
        if self.final:
            return Cause.LEASE_EXPIRED, "the lease has expired"
        if self.expected:
            return Cause.WAIT_TIMEOUT, "prefill took too long"
        return Cause.UNKNOWN_TRANSFER, "no such prefill came"

    @property
    def all_finished(self) -> bool:
        """Whether every reader has ended, with success or without."""
        return len(self.finished) >= self.readers

    @property
    def cause(self) -> Cause | None:
        """The cause of the first reader that did not get everything; None if all did."""
        return next((cause for cause in self.finished.values() if cause is not None), None)

    @property
    def waits(self) -> bool:
        """Whether no reader has got a chunk, or has a slot for one."""
        return not self.finished and not any(stream.begun for stream in self.streams.values())

    def extend(self, until: float, lease_ends: float) -> None:
        """A heartbeat names the transfer: keep it until `until`, or until its lease ends.

        Args:
            lease_ends: the new end of the lease, if a chunk was sent since the last call.
        """
        if self.moved:
            self.lease_ends, self.moved = lease_ends, False
        self.ends_early = until > self.lease_ends
        self.expires = max(self.expires, min(until, self.lease_ends))

    def link_s(self, tokens: int) -> float:
        """Seconds that the slowest reader's link takes for the tokens from the last computed token up to `tokens`."""
        done = self.offer.tokens if self.offer else 0
        return max((stream.link_s(tokens - done) for stream in self.streams.values()), default=0.0)

    def offered_by(self, request: str) -> bool:
        """Whether this request has offered the transfer. Another request can have the same transfer name by mistake."""
        return self.offer is not None and self.offer.request == request

    def full(self, readers: int) -> bool:
        """Whether every reader has opened the transfer.

        Args:
            readers: number of readers according to another rank. The largest number that any rank has given counts.
        """
        return len(self.streams) + len(self.finished) >= max(self.readers, readers)

    def next_send(self, session: SessionId) -> OutgoingChunk | None:
        """Take the next computed chunk, if this session has granted a slot for it."""
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
        """If the prefill has begun, send `Ready` to all watchers, once."""
        if self.offer is None:
            return []
        replies = [Reply(session, messages.Ready(self.transfer)) for session in self.watchers]
        self.watchers.clear()
        return [*replies]

    def check_integrity(self) -> None:
        """Raises RuntimeError if it is in no legal state."""
        if self.offer is not None and self.offer.transfer != self.transfer:
            raise RuntimeError(f"has the offer of transfer {self.offer.transfer}")
        if self.step is not None and (self.offer is None or self.final):
            raise RuntimeError("a step is under way, but no prefill")
        if self.final and not self.expected:
            raise RuntimeError("the prefill has ended, and was never expected")
        opened = len(self.streams) + len(self.finished)
        if opened > self.readers:
            raise RuntimeError(
                f"{opened} readers read or have ended, wanted {self.readers} at most"
            )
        if self.final and self.all_finished:
            raise RuntimeError("all readers have ended, and its pages are still leased")
        for session, stream in self.streams.items():
            if stream.writing and self.offer is None and not self.expected:
                raise RuntimeError(f"reader {session!r} was sent KV that was not offered")
            stream.check_integrity()
