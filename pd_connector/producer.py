# SPDX-License-Identifier: Apache-2.0
"""The producer's state machine: which pages are leased to whom, and what is to be sent next.

No sockets, no engine, no clock: events come in as calls with the time, and what must happen goes
out as actions. A transfer has two halves that may come in either order, the offer (pages, from
this engine) and the opening (a consumer's `Open`). It streams when it has both.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pd_connector import codec, wire
from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.geometry import Geometry
from pd_connector.plan import Chunk, plan

_REMEMBERED_ENDS = 1024

Session = bytes
"""The routing id of a consumer's connection."""


class Reply(NamedTuple):
    """Send this message to the consumer of this session."""

    session: Session
    message: wire.Message


class Free(NamedTuple):
    """The pages of this request are no longer needed; without a cause they were delivered."""

    request: str
    cause: Cause | None


class Send(NamedTuple):
    """Gather this chunk and write it into the consumer's landing slot."""

    transfer: str
    request: str
    session: Session
    chunk: Chunk
    pages: Sequence[int]  # page ids of the chunk, in prompt order
    identity: bytes
    codec: str
    slot: int


Action = Reply | Free


class Offer(NamedTuple):
    """Computed pages of one request, to be kept until they are freed."""

    transfer: str
    request: str
    pages: Sequence[int]  # page ids in prompt order, the last possibly partly filled
    identity: bytes


@dataclass(slots=True)
class _Opening:
    session: Session
    message: wire.Open


@dataclass(slots=True)
class _Outgoing:
    expires: float
    expected: bool = False
    offer: Offer | None = None
    opening: _Opening | None = None
    codec: str = ""
    chunks: Sequence[Chunk] = ()
    next_chunk: int = 0
    writing: int = 0
    credits: deque[int] = field(default_factory=deque)
    # Sessions that asked and were refused: their `Cancel` is not the true consumer's.
    refused: set[Session] = field(default_factory=set)

    @property
    def sendable(self) -> bool:
        return bool(self.credits) and self.next_chunk < len(self.chunks)


class Producer:
    """All transfers of one rank that produces. Used by one thread."""

    def __init__(self, config: Config, geometry: Geometry) -> None:
        self._config = config
        self._geometry = geometry
        self._transfers: dict[str, _Outgoing] = {}
        self._ready: deque[str] = deque()
        # Transfers that are over while writes of theirs are under way, and who waits to hear.
        self._draining: dict[tuple[Session, str], int] = {}
        self._awaiting_end: set[tuple[Session, str]] = set()
        # Ended lately: whoever opens one of them need not wait for a prefill that will not come.
        self._ended: dict[str, None] = {}
        # Cancelled before their pages existed: the offer, when it comes, is freed at once.
        self._unwanted: dict[str, float] = {}

    @property
    def transfers(self) -> int:
        """Transfers that are expected, offered or opened."""
        return len(self._transfers)

    @property
    def leased_pages(self) -> int:
        return sum(len(t.offer.pages) for t in self._transfers.values() if t.offer)

    def expect(self, transfer: str, now: float) -> None:
        """A request with this transfer has been queued here: openings may wait for it."""
        if transfer in self._unwanted:
            return
        self._ended.pop(transfer, None)
        outgoing = self._transfers.setdefault(transfer, _Outgoing(expires=0.0))
        outgoing.expected = True
        outgoing.expires = max(outgoing.expires, now + self._config.wait_timeout_s)

    def offer(self, offer: Offer, now: float) -> list[Action]:
        """The pages of a finished prefill are there, and kept until they are freed."""
        if self._unwanted.pop(offer.transfer, None) is not None:
            return [Free(offer.request, Cause.ABORTED)]
        outgoing = self._transfers.setdefault(offer.transfer, _Outgoing(expires=0.0))
        if outgoing.offer is not None:
            return [Free(offer.request, Cause.DUPLICATE)]
        outgoing.offer = offer
        outgoing.expires = now + self._config.lease_s
        return self._start(offer.transfer, outgoing) if outgoing.opening else []

    def withdraw(self, transfer: str) -> list[Action]:
        """The request with this transfer has ended and offers no pages."""
        outgoing = self._transfers.get(transfer)
        if outgoing is None or outgoing.offer is not None:
            return []
        return self._end(transfer, Cause.PREFILL_ENDED, "the prefill request ended early")

    def open(self, session: Session, message: wire.Open, now: float) -> list[Action]:
        """A consumer asks for pages."""
        transfer = message.transfer
        outgoing = self._transfers.get(transfer)
        if (session, transfer) in self._draining:
            return [_refusal(session, transfer, Cause.DUPLICATE, "its last opening still ends")]
        if outgoing is None:
            if not message.wait or transfer in self._ended:
                return [_refusal(session, transfer, Cause.UNKNOWN_TRANSFER, "no such pages here")]
            outgoing = _Outgoing(expires=now + self._config.lease_s)
            self._transfers[transfer] = outgoing
        if outgoing.opening is not None:
            return [_refusal(session, transfer, Cause.DUPLICATE, "already opened")]
        outgoing.opening = _Opening(session, message)
        outgoing.credits.extend(message.slots)
        return self._start(transfer, outgoing) if outgoing.offer else []

    def credit(self, session: Session, transfer: str, slots: Sequence[int]) -> None:
        """A consumer grants slots; more than there are chunks left have no meaning."""
        outgoing = self._opened_by(session, transfer)
        if outgoing is not None:
            room = len(outgoing.chunks) - outgoing.next_chunk - len(outgoing.credits)
            outgoing.credits.extend(slots[: max(0, room)])
            self._mark_ready(transfer, outgoing)

    def next_send(self) -> Send | None:
        """What to send now, in turn over all transfers that have credit; None if nothing.

        The caller gathers before it calls anything else here: pages may be freed after that.
        """
        while self._ready:
            transfer = self._ready.popleft()
            outgoing = self._transfers.get(transfer)
            if outgoing is None or not outgoing.sendable:
                continue
            assert outgoing.offer is not None
            assert outgoing.opening is not None
            chunk = outgoing.chunks[outgoing.next_chunk]
            outgoing.next_chunk += 1
            outgoing.writing += 1
            self._mark_ready(transfer, outgoing)
            return Send(
                transfer,
                outgoing.offer.request,
                outgoing.opening.session,
                chunk,
                outgoing.offer.pages[chunk.first_page : chunk.stop_page],
                outgoing.offer.identity,
                outgoing.codec,
                outgoing.credits.popleft(),
            )
        return None

    def written(self, session: Session, transfer: str, ok: bool, detail: str) -> list[Action]:
        """A write has ended; `session` is the one it went to."""
        outgoing = self._opened_by(session, transfer)
        if outgoing is not None:
            outgoing.writing -= 1
            return [] if ok else self._end(transfer, Cause.TRANSPORT, detail)
        return self._drained(session, transfer)

    def done(self, session: Session, transfer: str) -> list[Action]:
        """The consumer has verified and placed everything."""
        if self._opened_by(session, transfer) is None:
            return []
        return self._end(transfer, None, "")

    def cancel(self, session: Session, transfer: str, cause: Cause, now: float) -> list[Action]:
        """A consumer does not want the transfer (any more); it may never have opened it."""
        answer = Reply(session, wire.Cancelled(transfer))
        outgoing = self._transfers.get(transfer)
        if outgoing is None:
            if (session, transfer) in self._draining:
                self._awaiting_end.add((session, transfer))
                return []
            self._unwanted[transfer] = now + self._config.lease_s
            return [answer]
        if outgoing.opening is not None and outgoing.opening.session != session:
            return [answer]
        if outgoing.opening is None and session in outgoing.refused:
            outgoing.refused.discard(session)
            return [answer]
        if outgoing.offer is None:
            self._unwanted[transfer] = now + self._config.wait_timeout_s
        actions = self._end(transfer, cause, "", tell=False)
        if (session, transfer) in self._draining:
            self._awaiting_end.add((session, transfer))
            return actions
        return [*actions, answer]

    def heartbeat(self, session: Session, transfers: Sequence[str], now: float) -> None:
        """A consumer speaks for transfers, opened or not: their leases are extended."""
        for transfer in transfers:
            outgoing = self._transfers.get(transfer)
            if outgoing is not None and outgoing.offer is not None:
                outgoing.expires = max(outgoing.expires, now + self._config.lease_s)

    def session_lost(self, session: Session) -> list[Action]:
        """A consumer is gone; what it had opened will not be fetched by anyone."""
        actions: list[Action] = []
        for transfer, outgoing in list(self._transfers.items()):
            if outgoing.opening is not None and outgoing.opening.session == session:
                actions += self._end(transfer, Cause.SESSION_LOST, "", tell=False)
            outgoing.refused.discard(session)
        self._awaiting_end = {key for key in self._awaiting_end if key[0] != session}
        return actions

    def tick(self, now: float) -> list[Action]:
        """End what has expired."""
        actions: list[Action] = []
        for transfer, outgoing in list(self._transfers.items()):
            if outgoing.expires > now:
                continue
            if outgoing.offer is not None:
                actions += self._end(transfer, Cause.LEASE_EXPIRED, "the lease has expired")
            elif outgoing.expected:
                actions += self._end(transfer, Cause.WAIT_TIMEOUT, "prefill took too long")
            else:
                actions += self._end(transfer, Cause.UNKNOWN_TRANSFER, "no such prefill came")
        self._unwanted = {t: until for t, until in self._unwanted.items() if until > now}
        return actions

    def _start(self, transfer: str, outgoing: _Outgoing) -> list[Action]:
        assert outgoing.offer is not None
        assert outgoing.opening is not None
        session, message = outgoing.opening.session, outgoing.opening.message
        chosen = codec.negotiate(message.codecs)
        slot_bytes = message.slot_bytes or self._config.slot_bytes
        problem: tuple[Cause, str] | None = None
        if message.identity != outgoing.offer.identity:
            problem = Cause.TOKENS, "the pages belong to other tokens, salt or adapter"
        elif not message.first_page < message.stop_page <= len(outgoing.offer.pages):
            problem = (
                Cause.TOKENS,
                f"pages {message.first_page}-{message.stop_page} of {len(outgoing.offer.pages)}",
            )
        elif not self._geometry.page_bytes <= slot_bytes <= self._config.slot_bytes:
            fits = f"{self._geometry.page_bytes} (a page) to {self._config.slot_bytes} (a slot)"
            problem = Cause.GEOMETRY, f"chunks of {slot_bytes} bytes: here {fits}"
        elif chosen is None:
            problem = Cause.GEOMETRY, f"codecs {message.codecs} / {list(codec.CODECS)}"
        if problem is not None or chosen is None:
            # The pages stay leased: whoever asked was not the consumer they are meant for.
            outgoing.opening = None
            outgoing.refused.add(session)
            outgoing.credits.clear()
            return [_refusal(session, transfer, *(problem or (Cause.INTERNAL, "")))]
        outgoing.codec = chosen.name
        outgoing.chunks = plan(self._geometry, message.first_page, message.stop_page, slot_bytes)
        self._mark_ready(transfer, outgoing)
        return [Reply(session, wire.Accept(transfer, chosen.name, len(outgoing.chunks)))]

    def _end(
        self, transfer: str, cause: Cause | None, detail: str, *, tell: bool = True
    ) -> list[Action]:
        outgoing = self._transfers.pop(transfer)
        self._ended[transfer] = None
        if len(self._ended) > _REMEMBERED_ENDS:
            del self._ended[next(iter(self._ended))]
        actions: list[Action] = []
        if outgoing.opening is not None:
            if outgoing.writing:
                self._draining[outgoing.opening.session, transfer] = outgoing.writing
            if cause is not None and tell:
                actions.append(_refusal(outgoing.opening.session, transfer, cause, detail))
        if outgoing.offer is not None:
            actions.append(Free(outgoing.offer.request, cause))
        return actions

    def _drained(self, session: Session, transfer: str) -> list[Action]:
        key = (session, transfer)
        if key not in self._draining:
            return []
        self._draining[key] -= 1
        if self._draining[key]:
            return []
        del self._draining[key]
        if key not in self._awaiting_end:
            return []
        self._awaiting_end.discard(key)
        return [Reply(session, wire.Cancelled(transfer))]

    def _opened_by(self, session: Session, transfer: str) -> _Outgoing | None:
        outgoing = self._transfers.get(transfer)
        if outgoing is None or outgoing.opening is None or outgoing.opening.session != session:
            return None
        return outgoing

    def _mark_ready(self, transfer: str, outgoing: _Outgoing) -> None:
        if outgoing.sendable and transfer not in self._ready:
            self._ready.append(transfer)


def _refusal(session: Session, transfer: str, cause: Cause, detail: str) -> Reply:
    return Reply(session, wire.Refuse(transfer, cause, detail))
