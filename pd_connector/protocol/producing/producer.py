# SPDX-License-Identifier: Apache-2.0
"""The producer's state machine: which pages are leased, and which chunk is sent next.

It has no sockets, no engine and no clock. Events come in as calls with the time, and actions go out. A transfer has two
halves, which come in either order:

- Offers come from this engine, one with each step of the prefill. They say what is computed. The final offer begins the
  lease. This file handles them.
- Openings (`Open`) come from each consumer rank that needs a part of the transfer. `openings` handles them.

Chunks that are both computed and opened are sent. `send_queue` finds the next one.
"""

from collections.abc import Collection, Sequence

from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.plan.route import Route
from pd_connector.protocol.producing.openings import Openings
from pd_connector.protocol.producing.outgoing import (
    Action,
    Free,
    Offer,
    OutgoingChunk,
    SessionId,
    Step,
)
from pd_connector.protocol.producing.outgoing_transfer import OutgoingTransfer
from pd_connector.protocol.producing.outgoing_transfers import OutgoingTransfers
from pd_connector.protocol.producing.past_transfers import PastTransfers
from pd_connector.protocol.producing.send_queue import SendQueue
from pd_connector.protocol.wire import messages

LAYERS_PAY_S = 0.005
"""Seconds. If the link needs this long or longer for a step's KV, the KV is sent layer by layer while the step computes.
Splitwise (section 4.2) has a fixed prompt length here."""


STARVED_S = 5.0
"""Seconds. If a consumer waits with pages for a prompt, and this engine computes nothing for this time, the oldest waiting
lease ends. Otherwise the two engines can wait for each other's pages: the lease for room at the consumer, and the prompt
for room here."""


class Producer:
    """All transfers of one rank that produces. Used by one thread.

    Args:
        pages: number of pages of the engine's cache. At most `lease_share` of them are leased; None: no limit.
        late_revokes: pages may have changed before `revoke` is called. KV sent before the end of a prefill is
            provisional then, and goes only to consumers that can wait for the end.
    """

    def __init__(
        self, config: Config, pages: int | None = None, *, late_revokes: bool = False
    ) -> None:
        self._config = config
        self._most_leased = float("inf") if pages is None else config.lease_share * pages
        self._offered = 0.0  # time of the last offer, or of the last `_make_room`
        self._transfers = OutgoingTransfers()
        self._past = PastTransfers()
        self._queue = SendQueue(self._transfers)
        self._openings = Openings(
            config, self._transfers, self._past, self._queue, provisional=late_revokes
        )

    @property
    def transfers(self) -> int:
        """Transfers that are expected, offered or opened."""
        return len(self._transfers)

    @property
    def leased_pages(self) -> int:
        return self._transfers.leased_pages

    def expect(self, transfer: str, now: float) -> None:
        """This engine has queued a request with this transfer. Openings can wait for it."""
        if self._past.is_unwanted(transfer):
            return
        self._past.begin_again(transfer)
        outgoing = self._transfers.announced(transfer)
        if outgoing.final:  # another request has the same transfer: its pages will not be leased
            return
        outgoing.expected = True
        outgoing.expires = max(outgoing.expires, now + self._config.wait_timeout_s)
        self._transfers.schedule(outgoing)

    def offer(self, offer: Offer, now: float) -> list[Action]:
        """KV has been computed. The final offer of a prefill leases its pages to the consumer."""
        self._offered = now
        if self._past.is_unwanted(offer.transfer):
            if not offer.final:
                return []
            cause = self._past.why_unwanted(offer.transfer)
            self._past.forget_unwanted(offer.transfer)
            self._past.remember(offer.transfer, cause, request_ended=True)
            return [Free(offer.request, cause)]
        outgoing = self._transfers.announced(offer.transfer)
        if outgoing.final or (outgoing.offer and not outgoing.offered_by(offer.request)):
            return [Free(offer.request, Cause.DUPLICATE)] if offer.final else []
        if not outgoing.expected:
            self.expect(offer.transfer, now)
        outgoing.offer = offer
        outgoing.step = None
        actions: list[Action] = []
        if offer.final:
            given_up = outgoing.given_up and outgoing.waits
            lease_s = self._config.given_up_lease_s if given_up else self._config.lease_s
            outgoing.expires = now + lease_s
            outgoing.lease_ends = now + self._config.wait_timeout_s
            self._transfers.schedule(outgoing)
            self._transfers.lease(outgoing)
            if outgoing.all_finished:
                return self._openings.end_transfer(outgoing, outgoing.cause, "")
            actions += self._evict(outgoing)
        actions += outgoing.tell_watchers()
        for session in list(outgoing.streams):
            actions += self._openings.start(outgoing, session)
        return actions

    def computed(
        self, transfer: str, request: str, tokens: int, stop_layer: int | None
    ) -> list[Action]:
        """The prefill has computed `tokens` tokens.

        Args:
            stop_layer: the step still runs, and has computed these tokens only in the model's layers below this layer.
                None: in all layers.
        """
        outgoing = self._transfers.get(transfer)
        if outgoing is None or outgoing.final or not outgoing.offered_by(request):
            return []
        assert outgoing.offer is not None
        if stop_layer is None:
            outgoing.offer = outgoing.offer._replace(tokens=tokens)
        elif self._config.overlap == "layer" or outgoing.link_s(tokens) > LAYERS_PAY_S:
            outgoing.step = Step(tokens, stop_layer)
        for session in outgoing.streams:
            self._queue.enqueue(transfer, session)
        return outgoing.tell_watchers()

    def revoke(
        self, transfer: str, request: str, doubtful_since: float = float("inf")
    ) -> list[Action]:
        """The request was preempted: its pages belong to others now. When the request has been computed again, its KV
        is offered again. Chunks that were sent before are right, except for those since `doubtful_since`.

        Args:
            doubtful_since: a step of the engine. A chunk gathered in this step or later may hold another request's KV.
                Readers of such chunks are refused.
        """
        outgoing = self._transfers.get(transfer)
        if outgoing is None or outgoing.final or not outgoing.offered_by(request):
            return []
        outgoing.offer = None
        outgoing.step = None
        actions: list[Action] = []
        for session, stream in list(outgoing.streams.items()):
            if stream.last_gathered >= doubtful_since:
                detail = "the prefill was preempted, and its pages overwritten, as they were read"
                actions += self._openings.fail(session, transfer, Cause.PREEMPTED, detail)
        return actions

    def withdraw(self, transfer: str, request: str) -> list[Action]:
        """The request with this transfer has ended and leaves no pages, leased or not. Its readers are refused the rest."""
        self._past.forget_unwanted(transfer)
        outgoing = self._transfers.get(transfer)
        if outgoing is None:
            self._past.remember(transfer, Cause.PREFILL_ENDED, request_ended=True)
            return []
        if outgoing.offer is not None and not outgoing.offered_by(request):
            return []
        detail = "the prefill request ended early"
        ended = self._openings.end_transfer(
            outgoing, Cause.PREFILL_ENDED, detail, request_ended=True
        )
        return [action for action in ended if not isinstance(action, Free)]  # the engine knows

    def give_up(self, transfer: str, detail: str) -> list[Action]:
        """End this transfer because of an unexpected error, whatever its state."""
        outgoing = self._transfers.get(transfer)
        return self._openings.end_transfer(outgoing, Cause.INTERNAL, detail) if outgoing else []

    def watch(
        self, session: SessionId, transfer: str, now: float, *, keep: bool = False
    ) -> list[Action]:
        """A consumer waits for the begin of the prefill.

        Args:
            keep: see `messages.Watch`.
        """
        if keep:
            self._transfers.keep(session, transfer)
        return self._openings.watch(session, transfer, now)

    def open(
        self, session: SessionId, message: messages.Open, routes: Sequence[Route], now: float
    ) -> list[Action]:
        """A consumer rank opens a transfer, whose KV passes along these routes."""
        return self._openings.open(session, message, routes, now)

    def credit(self, session: SessionId, transfer: str, slots: Sequence[int]) -> None:
        """A consumer grants slots."""
        stream = self._transfers.stream(session, transfer)
        if stream is not None:
            stream.credit(slots)
            self._queue.enqueue(transfer, session)

    def next_send(self, busy: Collection[SessionId] = ()) -> OutgoingChunk | None:
        """The next chunk to send; None if there is none. Streams that have credit take turns.

        Gather the chunk before any other call here: that call may free its pages.

        Args:
            busy: sessions that cannot take a chunk now.
        """
        return self._queue.next_send(busy)

    def peek_send(self, busy: Collection[SessionId] = ()) -> OutgoingChunk | None:
        """The chunk that `next_send` will probably give next. Its pages may be freed before that."""
        return self._queue.peek(busy)

    def gathered(self, chunk: OutgoingChunk, step: int) -> None:
        """A chunk has been read from its pages and posted. `step` is the engine's count of steps after that."""
        stream = self._transfers.stream(chunk.session, chunk.transfer)
        if stream is not None:
            stream.last_gathered = step

    def unsend(self, chunk: OutgoingChunk) -> None:
        """The chunk that `next_send` gave cannot be gathered now: its pages have been revoked. `next_send` gives it
        again only after something has changed, such as an offer."""
        self._queue.unsend(chunk)

    def written(self, session: SessionId, transfer: str, ok: bool, detail: str) -> list[Action]:
        """A write to this session has ended.

        Args:
            ok: the chunk has arrived.
            detail: why it has not.
        """
        return self._openings.written(session, transfer, ok, detail)

    def fail(self, session: SessionId, transfer: str, cause: Cause, detail: str) -> list[Action]:
        """The transfer cannot be sent to this consumer: refuse it."""
        return self._openings.fail(session, transfer, cause, detail)

    def done(self, session: SessionId, transfer: str) -> list[Action]:
        """The consumer has verified and placed everything."""
        return self._openings.done(session, transfer)

    def cancel(
        self, session: SessionId, transfer: str, cause: Cause, now: float, readers: int = 1
    ) -> list[Action]:
        """A consumer cancels the transfer. It need not have opened it."""
        return self._openings.cancel(session, transfer, cause, now, readers)

    def heartbeat(self, transfers: Sequence[str], now: float) -> None:
        """A consumer still needs these transfers, opened or not: extend their leases."""
        for transfer in transfers:
            outgoing = self._transfers.get(transfer)
            if outgoing is not None and outgoing.final:
                config = self._config
                outgoing.extend(now + config.lease_s, now + config.wait_timeout_s)

    def session_lost(self, session: SessionId) -> list[Action]:
        """A consumer is gone. It fetches none of its transfers."""
        return self._openings.session_lost(session)

    def end_all(self, cause: Cause, detail: str) -> list[Action]:
        """End every transfer: no KV computed so far can be used any more."""
        actions: list[Action] = []
        for outgoing in list(self._transfers):
            actions += self._openings.end_transfer(outgoing, cause, detail)
        return actions

    def tick(self, now: float) -> list[Action]:
        """End the transfers that have expired."""
        actions: list[Action] = []
        for outgoing in self._transfers.due(now):
            if outgoing.expires <= now:
                actions += self._openings.end_transfer(outgoing, *outgoing.expiry)
            else:
                self._transfers.schedule(outgoing)
        self._past.tick(now)
        return actions + self._make_room(now)

    def check_integrity(self) -> None:
        """Raises RuntimeError if a transfer is in no legal state, or counts disagree."""
        leased: dict[str, str] = {}
        self._transfers.check_integrity()
        for outgoing in self._transfers:
            transfer = outgoing.transfer
            try:
                outgoing.check_integrity()
            except RuntimeError as error:
                raise RuntimeError(f"transfer {outgoing.transfer}: {error}") from None
            if outgoing.offer is not None and outgoing.final:
                other = leased.setdefault(outgoing.offer.request, transfer)
                if other != transfer:
                    raise RuntimeError(
                        f"request {outgoing.offer.request} is leased to {other} and {transfer}"
                    )
        self._openings.check_integrity()

    def _evict(self, new: OutgoingTransfer) -> list[Action]:
        """If too many pages are leased, end the oldest transfers whose fetch has not begun. Decode engines that do not
        fetch, or have no room, then cannot hold this engine's cache."""
        actions: list[Action] = []
        while self._transfers.leased_pages > self._most_leased:
            oldest = self._transfers.oldest_waiting(but=new)
            if oldest is None:
                break
            detail = "more than lease_share of the cache was leased"
            actions += self._openings.end_transfer(oldest, Cause.LEASE_EVICTED, detail)
        return actions

    def _make_room(self, now: float) -> list[Action]:
        """End the oldest waiting lease, if this engine has no room for a prompt that a consumer waits for (`STARVED_S`)."""
        if not self.leased_pages or now < self._offered + STARVED_S:
            return []
        self._offered = now
        if not any(t.expected and t.streams and not t.final for t in self._transfers):
            return []
        oldest = self._transfers.oldest_waiting()
        if oldest is None:
            return []
        detail = "a consumer has pages for another prompt, which this engine has no room to compute"
        return self._openings.end_transfer(oldest, Cause.LEASE_EVICTED, detail)
