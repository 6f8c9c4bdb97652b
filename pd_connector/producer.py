# SPDX-License-Identifier: Apache-2.0
"""The producer's state machine: which pages are leased to whom, and what is to be sent next.

No sockets, no engine, no clock: events come in as calls with the time, and what must happen goes
out as actions. A transfer has two halves that may come in either order, offers (KV, from this
engine, more with each step of its prefill) and openings (an `Open` of each consumer rank that
needs a part of it). What is both computed and opened is sent.
"""

from collections import deque
from collections.abc import Collection, Sequence

from pd_connector import wire
from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.outgoing import Action, Free, Offer, Outgoing, Reply, Send, Session, Step, Stream
from pd_connector.route import Route

LAYERS_PAY_S = 0.005
"""From how long a step's KV would take the link at its end, in seconds, it is sent layer by layer
while the step computes. Splitwise (section 4.2) has a fixed prompt length here."""
_REMEMBERED_ENDS = 1024


class Producer:
    """All transfers of one rank that produces. Used by one thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._transfers: dict[str, Outgoing] = {}
        self._ready: dict[tuple[str, Session], None] = {}
        # Streams that are over while writes of theirs are under way, and who waits to hear.
        self._draining: dict[tuple[Session, str], int] = {}
        self._awaiting_end: set[tuple[Session, str]] = set()
        # Ended lately: whoever opens one of them need not wait for a prefill that will not come.
        self._ended: dict[str, None] = {}
        # Cancelled before their prefill ended: the last offer, when it comes, is freed at once.
        self._unwanted: dict[str, float] = {}

    @property
    def transfers(self) -> int:
        """Transfers that are expected, offered or opened."""
        return len(self._transfers)

    @property
    def leased_pages(self) -> int:
        finals = (t.offer for t in self._transfers.values() if t.offer and t.offer.final)
        return sum(len(pages) for offer in finals for pages in offer.pages)

    def expect(self, transfer: str, now: float) -> None:
        """A request with this transfer has been queued here: openings may wait for it."""
        if transfer in self._unwanted:
            return
        self._ended.pop(transfer, None)
        outgoing = self._transfers.setdefault(transfer, Outgoing(expires=0.0))
        outgoing.expected = True
        outgoing.expires = max(outgoing.expires, now + self._config.wait_timeout_s)

    def offer(self, offer: Offer, now: float) -> list[Action]:
        """KV has been computed. The last offer of a prefill leases its pages to the consumer."""
        if offer.transfer in self._unwanted:
            if not offer.final:
                return []
            del self._unwanted[offer.transfer]
            return [Free(offer.request, Cause.ABORTED)]
        outgoing = self._transfers.setdefault(offer.transfer, Outgoing(expires=0.0))
        if outgoing.final or (outgoing.offer and not outgoing.offered_by(offer.request)):
            return [Free(offer.request, Cause.DUPLICATE)] if offer.final else []
        outgoing.offer = offer
        outgoing.step = None
        if not outgoing.expected:
            self.expect(offer.transfer, now)
        actions: list[Action] = []
        if offer.final:
            outgoing.expires = now + self._config.lease_s
            if outgoing.all_over:
                return self._end(offer.transfer, outgoing.cause, "")
        actions += self._tell_watchers(offer.transfer, outgoing)
        for session in list(outgoing.streams):
            actions += self._start(offer.transfer, outgoing, session)
        return actions

    def computed(
        self, transfer: str, request: str, tokens: int, stop_layer: int | None
    ) -> list[Action]:
        """The prefill has come further: to `tokens` tokens, in the model's layers below
        `stop_layer`, or in all of them."""
        outgoing = self._transfers.get(transfer)
        if outgoing is None or outgoing.final or not outgoing.offered_by(request):
            return []
        assert outgoing.offer is not None
        if stop_layer is None:
            outgoing.offer = outgoing.offer._replace(tokens=tokens)
        elif self._config.overlap == "layer" or outgoing.link_s(tokens) > LAYERS_PAY_S:
            outgoing.step = Step(tokens, stop_layer)
        for session in outgoing.streams:
            self._mark_ready(transfer, session)
        return self._tell_watchers(transfer, outgoing)

    def revoke(self, transfer: str, request: str) -> None:
        """The request's pages are no longer its own (it was preempted). What has been sent was
        right; the rest is offered again when it has been computed again."""
        outgoing = self._transfers.get(transfer)
        if outgoing is not None and not outgoing.final and outgoing.offered_by(request):
            outgoing.offer = None
            outgoing.step = None

    def withdraw(self, transfer: str, request: str) -> list[Action]:
        """The request, which had this transfer, has ended and offers no pages."""
        self._unwanted.pop(transfer, None)
        outgoing = self._transfers.get(transfer)
        if outgoing is None or outgoing.final:
            return []
        if outgoing.offer is not None and not outgoing.offered_by(request):
            return []
        return self._end(transfer, Cause.PREFILL_ENDED, "the prefill request ended early")

    def watch(self, session: Session, transfer: str, now: float) -> list[Action]:
        """A consumer wants to hear when the prefill has begun."""
        outgoing = self._transfers.get(transfer)
        if outgoing is None:
            if transfer in self._ended or transfer in self._unwanted:
                detail = "no such KV here (any more)"
                return [_refusal(session, transfer, Cause.UNKNOWN_TRANSFER, detail)]
            outgoing = Outgoing(expires=now + self._config.lease_s)
            self._transfers[transfer] = outgoing
        outgoing.watchers.add(session)
        return self._tell_watchers(transfer, outgoing)

    def open(
        self, session: Session, message: wire.Open, routes: Sequence[Route], now: float
    ) -> list[Action]:
        """A consumer rank asks for KV, which passes along these routes."""
        transfer = message.transfer
        outgoing = self._transfers.get(transfer)
        if (session, transfer) in self._draining:
            return [_refusal(session, transfer, Cause.DUPLICATE, "its last opening still ends")]
        if outgoing is None:
            if not message.wait or transfer in self._ended:
                return [_refusal(session, transfer, Cause.UNKNOWN_TRANSFER, "no such KV here")]
            outgoing = Outgoing(expires=now + self._config.lease_s)
            self._transfers[transfer] = outgoing
        taken = len(outgoing.streams) + len(outgoing.over)
        if session in outgoing.streams or taken >= max(outgoing.readers, message.readers):
            return [_refusal(session, transfer, Cause.DUPLICATE, "already opened")]
        outgoing.watchers.discard(session)
        outgoing.readers = max(outgoing.readers, message.readers)
        outgoing.streams[session] = Stream(message, routes, deque(message.slots))
        return self._start(transfer, outgoing, session)

    def credit(self, session: Session, transfer: str, slots: Sequence[int]) -> None:
        """A consumer grants slots; more than there are chunks left have no meaning."""
        stream = self._stream(session, transfer)
        if stream is not None:
            room = stream.unsent - len(stream.credits)
            stream.credits.extend(slots[: max(0, room)])
            self._mark_ready(transfer, session)

    def next_send(self, busy: Collection[Session] = ()) -> Send | None:
        """What to send now, in turn over all streams that have credit; None if nothing.

        The caller gathers before it calls anything else here: pages may be freed after that.

        Args:
            busy: sessions that take nothing now.
        """
        while True:
            free = (key for key in self._ready if key[1] not in busy)
            transfer, session = next(free, ("", b""))
            if not transfer:
                return None
            del self._ready[transfer, session]
            outgoing = self._transfers.get(transfer)
            stream = self._stream(session, transfer)
            if outgoing is None or stream is None or not stream.credits or not stream.accepted:
                continue
            lane = stream.next_lane(outgoing)
            if lane is None:
                continue
            assert outgoing.offer is not None
            chunk = lane.chunks.popleft()
            route = stream.routes[chunk.route]
            span = chunk.pages(route.source.page_size)
            stream.unsent -= 1
            stream.writing += 1
            self._mark_ready(transfer, session)
            return Send(
                transfer,
                outgoing.offer.request,
                session,
                route,
                chunk,
                outgoing.offer.pages[route.source.table][span.start : span.stop],
                outgoing.offer.identity,
                stream.credits.popleft(),
                stream.message.direct and outgoing.final and chunk.verbatim,
            )

    def unsend(self, send: Send) -> None:
        """What `next_send` gave cannot be gathered now, because its pages have been revoked. It
        is not given again before something has changed, an offer above all."""
        self._ready.pop((send.transfer, send.session), None)
        stream = self._stream(send.session, send.transfer)
        assert stream is not None  # nothing has happened since
        stream.writing -= 1
        stream.unsent += 1
        stream.credits.appendleft(send.slot)
        stream.put_back(send.chunk)

    def written(self, session: Session, transfer: str, ok: bool, detail: str) -> list[Action]:
        """A write has ended; `session` is the one it went to."""
        stream = self._stream(session, transfer)
        if stream is None:
            return self._drained(session, transfer)
        stream.writing -= 1
        return [] if ok else self.fail(session, transfer, Cause.TRANSPORT, detail)

    def fail(self, session: Session, transfer: str, cause: Cause, detail: str) -> list[Action]:
        """What this consumer wants cannot be sent."""
        if self._stream(session, transfer) is None:
            return []
        told: list[Action] = [_refusal(session, transfer, cause, detail)]
        return told + self._reader_over(transfer, session, cause)

    def done(self, session: Session, transfer: str) -> list[Action]:
        """The consumer has verified and placed everything."""
        if self._stream(session, transfer) is None:
            return []
        return self._reader_over(transfer, session, None)

    def cancel(
        self, session: Session, transfer: str, cause: Cause, now: float, readers: int = 1
    ) -> list[Action]:
        """A consumer does not want the transfer (any more); it may never have opened it."""
        answer = Reply(session, wire.Cancelled(transfer))
        outgoing = self._transfers.get(transfer)
        if outgoing is None:
            if (session, transfer) in self._draining:
                self._awaiting_end.add((session, transfer))
                return []
            if readers == 1:
                self._unwanted[transfer] = now + self._config.lease_s
                return [answer]
            outgoing = Outgoing(expires=now + self._config.lease_s)
            self._transfers[transfer] = outgoing
        outgoing.watchers.discard(session)
        if session not in outgoing.streams:
            full = len(outgoing.streams) + len(outgoing.over) >= max(outgoing.readers, readers)
            if session in outgoing.refused or session in outgoing.over or full:
                outgoing.refused.discard(session)
                return [answer]
        outgoing.readers = max(outgoing.readers, readers)
        if not outgoing.final and len(outgoing.over) + 1 >= outgoing.readers:
            self._unwanted[transfer] = now + self._config.wait_timeout_s
        actions = self._reader_over(transfer, session, cause)
        if (session, transfer) in self._draining:
            self._awaiting_end.add((session, transfer))
            return actions
        return [*actions, answer]

    def heartbeat(self, session: Session, transfers: Sequence[str], now: float) -> None:
        """A consumer speaks for transfers, opened or not: their leases are extended."""
        for transfer in transfers:
            outgoing = self._transfers.get(transfer)
            if outgoing is not None and outgoing.final:
                outgoing.expires = max(outgoing.expires, now + self._config.lease_s)

    def session_lost(self, session: Session) -> list[Action]:
        """A consumer is gone; what it had opened will not be fetched by anyone."""
        actions: list[Action] = []
        for transfer, outgoing in list(self._transfers.items()):
            outgoing.watchers.discard(session)
            outgoing.refused.discard(session)
            if session in outgoing.streams:
                actions += self._reader_over(transfer, session, Cause.SESSION_LOST)
        self._awaiting_end = {key for key in self._awaiting_end if key[0] != session}
        return actions

    def tick(self, now: float) -> list[Action]:
        """End what has expired."""
        actions: list[Action] = []
        for transfer, outgoing in list(self._transfers.items()):
            if outgoing.expires > now:
                continue
            if outgoing.final:
                actions += self._end(transfer, Cause.LEASE_EXPIRED, "the lease has expired")
            elif outgoing.expected:
                actions += self._end(transfer, Cause.WAIT_TIMEOUT, "prefill took too long")
            else:
                actions += self._end(transfer, Cause.UNKNOWN_TRANSFER, "no such prefill came")
        self._unwanted = {t: until for t, until in self._unwanted.items() if until > now}
        return actions

    def _start(self, transfer: str, outgoing: Outgoing, session: Session) -> list[Action]:
        """Check an opening against an offer, and accept or refuse it; tell when all is there."""
        offer, stream = outgoing.offer, outgoing.streams[session]
        if offer is None:
            return []
        if not stream.accepted:
            problem = offer.problem(stream.message, self._config.slot_bytes)
            if problem is None:
                try:
                    stream.prepare()
                except ValueError as error:
                    problem = Cause.GEOMETRY, str(error)
            if problem is not None:
                # The pages stay leased: who asked was not the consumer they are meant for.
                del outgoing.streams[session]
                outgoing.refused.add(session)
                return [_refusal(session, transfer, *problem)]
        known = stream.accepted
        stream.accepted = True
        self._mark_ready(transfer, session)
        if known and not offer.final:
            return []
        return [Reply(session, wire.Accept(transfer, stream.planned, offer.final))]

    def _tell_watchers(self, transfer: str, outgoing: Outgoing) -> list[Action]:
        if outgoing.offer is None:  # the prefill has not begun
            return []
        told = [Reply(session, wire.Ready(transfer)) for session in outgoing.watchers]
        outgoing.watchers.clear()
        return [*told]

    def _reader_over(self, transfer: str, session: Session, cause: Cause | None) -> list[Action]:
        """One consumer rank needs nothing more; with the last one the transfer is over."""
        outgoing = self._transfers[transfer]
        stream = outgoing.streams.pop(session, None)
        if stream is not None and stream.writing:
            self._draining[session, transfer] = stream.writing
        outgoing.over[session] = cause
        if not outgoing.all_over:
            return []
        # A prefill that is under way goes on to its end, where its pages are freed at once.
        if outgoing.final or transfer in self._unwanted or not outgoing.expected:
            return self._end(transfer, outgoing.cause, "")
        return []

    def _end(self, transfer: str, cause: Cause | None, detail: str) -> list[Action]:
        outgoing = self._transfers.pop(transfer)
        self._ended[transfer] = None
        if len(self._ended) > _REMEMBERED_ENDS:
            del self._ended[next(iter(self._ended))]
        actions: list[Action] = []
        for session, stream in outgoing.streams.items():
            if stream.writing:
                self._draining[session, transfer] = stream.writing
        if cause is not None:
            told = (*outgoing.streams, *outgoing.watchers)
            actions += [_refusal(session, transfer, cause, detail) for session in told]
        if outgoing.offer is not None and outgoing.offer.final:
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

    def _stream(self, session: Session, transfer: str) -> Stream | None:
        outgoing = self._transfers.get(transfer)
        return None if outgoing is None else outgoing.streams.get(session)

    def _mark_ready(self, transfer: str, session: Session) -> None:
        stream = self._stream(session, transfer)
        if stream is not None and stream.accepted and stream.credits:
            self._ready.setdefault((transfer, session))


def _refusal(session: Session, transfer: str, cause: Cause, detail: str) -> Reply:
    return Reply(session, wire.Refuse(transfer, cause, detail))
