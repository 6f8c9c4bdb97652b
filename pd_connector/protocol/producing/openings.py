# SPDX-License-Identifier: Apache-2.0
"""What consumer ranks have asked a producer for: who watches, who reads, and who has ended."""

from collections import deque
from collections.abc import Sequence

import msgspec

from pd_connector.config import Config
from pd_connector.errors import Cause
from pd_connector.plan.route import Route
from pd_connector.protocol.producing.outgoing import Action, Free, Reply, SessionId
from pd_connector.protocol.producing.outgoing_stream import OutgoingStream
from pd_connector.protocol.producing.outgoing_transfer import OutgoingTransfer
from pd_connector.protocol.producing.outgoing_transfers import OutgoingTransfers
from pd_connector.protocol.producing.past_transfers import PastTransfers
from pd_connector.protocol.producing.send_queue import SendQueue
from pd_connector.protocol.wire import messages

_MOST_EARLY_SLOTS = 64
"""Slots of an opening that are kept until it is known how many chunks there will be."""
_TOO_MANY = Cause.UNKNOWN_TRANSFER, "too many transfers are asked for that are not announced here"
_OPENED = Cause.DUPLICATE, "already opened"


Key = tuple[SessionId, str]
"""A stream: the consumer it goes to, and the transfer."""


class Draining:
    """Streams with writes that have not ended, and who waits for that. Used by one thread.

    A consumer may use the slots of such a stream again when the last write into them has ended.
    """

    def __init__(self) -> None:
        self._writing: dict[Key, int] = {}
        self._waiting: set[Key] = set()  # for a `Cancelled`

    def __contains__(self, key: Key) -> bool:
        return key in self._writing

    def drain(self, session: SessionId, transfer: str, stream: OutgoingStream) -> None:
        """This stream has ended. Nothing is kept of it if none of its writes is under way."""
        if stream.writing:
            self._writing[session, transfer] = stream.writing

    def written(self, session: SessionId, transfer: str) -> list[Action]:
        """A write of an ended stream has ended. With the last one, who waits is told."""
        key = session, transfer
        if key not in self._writing:
            return []
        self._writing[key] -= 1
        if self._writing[key]:
            return []
        del self._writing[key]
        if key not in self._waiting:
            return []
        self._waiting.discard(key)
        return [Reply(session, messages.Cancelled(transfer))]

    def confirm(self, session: SessionId, transfer: str) -> list[Action]:
        """Tell the consumer that nothing is written for this transfer any more: now, or as soon as
        that is so."""
        key = session, transfer
        if key not in self._writing:
            return [Reply(session, messages.Cancelled(transfer))]
        self._waiting.add(key)
        return []

    def lost(self, session: SessionId) -> None:
        """The consumer is gone, so no message is owed."""
        self._waiting = {key for key in self._waiting if key[0] != session}

    def check_integrity(self) -> None:
        """Raises RuntimeError if counts disagree."""
        if idle := [key for key, writing in self._writing.items() if writing < 1]:
            raise RuntimeError(f"streams {idle} drain, but have no writes")
        if unknown := self._waiting - self._writing.keys():
            raise RuntimeError(f"{unknown} wait for streams that do not drain")


class Openings:
    """The consumers' half of all transfers of a producer. Used by one thread.

    A rank that has opened a transfer is one of its readers until it has said `Done` or `Cancel`, or
    was refused, or is gone. When all readers have ended, the transfer ends.

    Args:
        provisional: what comes before the end of a prefill may turn out to be wrong. It is sent
            only to consumers that can wait for the end.
    """

    def __init__(
        self,
        config: Config,
        transfers: OutgoingTransfers,
        past: PastTransfers,
        queue: SendQueue,
        *,
        provisional: bool,
    ) -> None:
        self._config = config
        self._transfers = transfers
        self._past = past
        self._queue = queue
        self._provisional = provisional
        self._draining = Draining()

    def watch(self, session: SessionId, transfer: str, now: float) -> list[Action]:
        """See `Producer.watch`."""
        outgoing = self._transfers.get(transfer)
        if outgoing is None:
            if self._past.is_over(transfer):
                return [_refusal(session, transfer, *self._past.why_not(transfer))]
            outgoing = self._transfers.asked(session, transfer, now + self._config.lease_s)
        if outgoing is None:
            return [_refusal(session, transfer, *_TOO_MANY)]
        if outgoing.all_finished:
            return [_refusal(session, transfer, *_OPENED)]
        self._transfers.touch(session, outgoing)
        outgoing.watchers.add(session)
        return outgoing.tell_watchers()

    def open(
        self, session: SessionId, message: messages.Open, routes: Sequence[Route], now: float
    ) -> list[Action]:
        """See `Producer.open`."""
        transfer = message.transfer
        outgoing = self._transfers.get(transfer)
        if (session, transfer) in self._draining:
            return [_refusal(session, transfer, Cause.DUPLICATE, "its last opening still ends")]
        if outgoing is None:
            if not message.wait or self._past.is_over(transfer):
                return [_refusal(session, transfer, *self._past.why_not(transfer))]
            outgoing = self._transfers.asked(session, transfer, now + self._config.lease_s)
        if outgoing is None:
            return [_refusal(session, transfer, *_TOO_MANY)]
        if session in outgoing.streams or outgoing.full(message.readers):
            return [_refusal(session, transfer, *_OPENED)]
        self._transfers.touch(session, outgoing)
        outgoing.watchers.discard(session)
        outgoing.readers = max(outgoing.readers, message.readers)
        slots = message.slots if outgoing.offer else message.slots[:_MOST_EARLY_SLOTS]
        kept = msgspec.structs.replace(message, slots=[])
        outgoing.streams[session] = OutgoingStream(kept, routes, deque(slots))
        return self.start(outgoing, session)

    def start(self, outgoing: OutgoingTransfer, session: SessionId) -> list[Action]:
        """Check an opening against an offer, and accept or refuse it; tell when all is there."""
        transfer, offer, stream = outgoing.transfer, outgoing.offer, outgoing.streams[session]
        if offer is None:
            return []
        known = stream.accepted
        if not known:
            slot_bytes = self._config.slot_bytes
            problem = offer.problem(stream.message, stream.routes, slot_bytes) or stream.prepare()
            if problem is not None:
                # The pages stay leased for a moment (`cancel`): they may be meant for another consumer.
                del outgoing.streams[session]
                outgoing.refused.add(session)
                return [_refusal(session, transfer, *problem)]
        provisional = not offer.final and (self._provisional or offer.provisional)
        stream.leased_only = provisional and not stream.message.provisional
        stream.accepted = True
        self._queue.enqueue(transfer, session)
        if known and not offer.final:
            return []
        accept = messages.Accept(transfer, stream.planned, offer.final, offer.final_token, provisional)
        return [Reply(session, accept)]

    def written(self, session: SessionId, transfer: str, ok: bool, detail: str) -> list[Action]:
        """See `Producer.written`."""
        stream = self._transfers.stream(session, transfer)
        if stream is None:
            return self._draining.written(session, transfer)
        stream.writing -= 1
        return [] if ok else self.fail(session, transfer, Cause.TRANSPORT, detail)

    def fail(self, session: SessionId, transfer: str, cause: Cause, detail: str) -> list[Action]:
        """See `Producer.fail`."""
        outgoing = self._transfers.get(transfer)
        if outgoing is None or session not in outgoing.streams:
            return []
        told: list[Action] = [_refusal(session, transfer, cause, detail)]
        return told + self._reader_finished(outgoing, session, cause)

    def done(self, session: SessionId, transfer: str) -> list[Action]:
        """See `Producer.done`."""
        outgoing = self._transfers.get(transfer)
        if outgoing is None or session not in outgoing.streams:
            return []
        return self._reader_finished(outgoing, session, None)

    def cancel(
        self, session: SessionId, transfer: str, cause: Cause, now: float, readers: int
    ) -> list[Action]:
        """See `Producer.cancel`."""
        outgoing = self._transfers.get(transfer)
        if outgoing is None:
            if (session, transfer) in self._draining:
                return self._draining.confirm(session, transfer)
            if readers > 1 and not self._past.is_over(transfer):
                until = now + self._config.lease_s
                outgoing = self._transfers.asked(session, transfer, until)
            if outgoing is None:
                self._past.unwant(transfer, cause, now + self._config.lease_s)
                return [Reply(session, messages.Cancelled(transfer))]
        outgoing.watchers.discard(session)
        if session not in outgoing.streams:
            known = session in outgoing.refused or session in outgoing.finished
            if session in outgoing.refused and outgoing.final and outgoing.waits:
                # Mostly no other consumer comes. A consumer that waits says so with each heartbeat.
                outgoing.expires = min(outgoing.expires, now + 2 * self._config.heartbeat_s)
                self._transfers.schedule(outgoing)
            if known or outgoing.full(readers):
                outgoing.refused.discard(session)
                return self._draining.confirm(session, transfer)
        outgoing.readers = max(outgoing.readers, readers)
        if not outgoing.final and len(outgoing.finished) + 1 >= outgoing.readers:
            self._past.unwant(transfer, cause, now + self._config.wait_timeout_s)
        actions = self._reader_finished(outgoing, session, cause)
        return actions + self._draining.confirm(session, transfer)

    def session_lost(self, session: SessionId) -> list[Action]:
        """See `Producer.session_lost`."""
        actions: list[Action] = []
        for outgoing in self._transfers.lose(session):
            outgoing.watchers.discard(session)
            outgoing.refused.discard(session)
            if session in outgoing.streams:
                actions += self._reader_finished(outgoing, session, Cause.SESSION_LOST)
        self._draining.lost(session)
        return actions

    def end_transfer(
        self,
        outgoing: OutgoingTransfer,
        cause: Cause | None,
        detail: str,
        *,
        request_ended: bool = False,
    ) -> list[Action]:
        """End a transfer: who reads or watches it is refused, and its pages may be freed.

        Args:
            request_ended: no offer of it can come any more, as after its last one.
        """
        transfer = outgoing.transfer
        self._transfers.remove(outgoing)
        self._past.remember(transfer, cause, request_ended=outgoing.final or request_ended)
        for session, stream in outgoing.streams.items():
            self._draining.drain(session, transfer, stream)
        actions: list[Action] = []
        if cause is not None:
            told = (*outgoing.streams, *outgoing.watchers)
            actions += [_refusal(session, transfer, cause, detail) for session in told]
        if outgoing.offer is not None and outgoing.offer.final:
            actions.append(Free(outgoing.offer.request, cause))
        return actions

    def check_integrity(self) -> None:
        """Raises RuntimeError if a stream is read while its last opening still ends, or counts of
        writes disagree."""
        for outgoing in self._transfers:
            for session in outgoing.streams:
                if (session, outgoing.transfer) in self._draining:
                    raise RuntimeError(
                        f"transfer {outgoing.transfer}: reader {session!r} reads it while its last "
                        "opening still ends"
                    )
        self._draining.check_integrity()

    def _reader_finished(
        self, outgoing: OutgoingTransfer, session: SessionId, cause: Cause | None
    ) -> list[Action]:
        """One consumer rank needs nothing more. When all have ended, the transfer ends."""
        transfer = outgoing.transfer
        stream = outgoing.streams.pop(session, None)
        if stream is not None:
            self._draining.drain(session, transfer, stream)
        outgoing.finished[session] = cause
        outgoing.moved = True
        if not outgoing.all_finished:
            return []
        # A prefill that is under way goes on to its end, where its pages are freed at once.
        if outgoing.final or self._past.is_unwanted(transfer) or not outgoing.expected:
            return self.end_transfer(outgoing, outgoing.cause, "")
        return []


def _refusal(session: SessionId, transfer: str, cause: Cause, detail: str) -> Reply:
    return Reply(session, messages.Refuse(transfer, cause, detail))
