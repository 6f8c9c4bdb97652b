# SPDX-License-Identifier: Apache-2.0
"""The consumer ranks of each transfer of a producer: which watch it, which read it, and which have ended."""

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
"""Most slots that are kept of an opening whose number of chunks is not known yet."""
_TOO_MANY = Cause.UNKNOWN_TRANSFER, "too many transfers are asked for that are not announced here"
_OPENED = Cause.DUPLICATE, "already opened"


Key = tuple[SessionId, str]
"""A stream: the consumer it goes to, and the transfer."""


class Draining:
    """Ended streams whose last writes are still under way. Used by one thread.

    The consumer can use the slots of such a stream again when its last write has ended. `Cancelled` tells it so.
    """

    def __init__(self) -> None:
        self._writing: dict[Key, int] = {}
        self._waiting: set[Key] = set()  # streams whose consumer waits for `Cancelled`

    def __contains__(self, key: Key) -> bool:
        return key in self._writing

    def drain(self, session: SessionId, transfer: str, stream: OutgoingStream) -> None:
        """The stream has ended. It drains if writes of it are under way."""
        if stream.writing:
            self._writing[session, transfer] = stream.writing

    def written(self, session: SessionId, transfer: str) -> list[Action]:
        """A write of an ended stream has ended. After the last write, a consumer that waits gets its `Cancelled`."""
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
        """Send the consumer a `Cancelled` for this transfer: now, or when the last write has ended."""
        key = session, transfer
        if key not in self._writing:
            return [Reply(session, messages.Cancelled(transfer))]
        self._waiting.add(key)
        return []

    def lost(self, session: SessionId) -> None:
        """The consumer is gone: it gets no `Cancelled`."""
        self._waiting = {key for key in self._waiting if key[0] != session}

    def check_integrity(self) -> None:
        """Raises RuntimeError if counts disagree."""
        if idle := [key for key, writing in self._writing.items() if writing < 1]:
            raise RuntimeError(f"streams {idle} drain, but have no writes")
        if unknown := self._waiting - self._writing.keys():
            raise RuntimeError(f"{unknown} wait for streams that do not drain")


class Openings:
    """The consumers' half of all transfers of a producer. Used by one thread.

    A rank that opens a transfer becomes its reader. It stays a reader until it says `Done` or `Cancel`, is refused, or is
    gone. When all readers have ended, the transfer ends.

    Args:
        provisional: KV sent before the end of a prefill may turn out to be wrong. It is sent only to consumers that can
            wait for the end.
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
            outgoing = self._transfers.requested(session, transfer, now + self._config.lease_s)
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
            outgoing = self._transfers.requested(session, transfer, now + self._config.lease_s)
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
        """Check an opening against the engine's offer, and accept or refuse it. An accepted opening is accepted again,
        as complete, when the prefill has ended."""
        transfer, offer, stream = outgoing.transfer, outgoing.offer, outgoing.streams[session]
        if offer is None:
            return []
        accepted_before = stream.accepted
        if not accepted_before:
            slot_bytes = self._config.slot_bytes
            problem = offer.problem(stream.message, stream.routes, slot_bytes) or stream.prepare()
            if problem is not None:
                # The pages stay leased for a moment (`cancel`): another consumer may be meant.
                del outgoing.streams[session]
                outgoing.refused.add(session)
                return [_refusal(session, transfer, *problem)]
        elif (problem := offer.late_problem(stream.message, stream.routes)) is not None:
            return self.fail(session, transfer, *problem)
        provisional = not offer.final and (self._provisional or offer.provisional)
        stream.leased_only = provisional and not stream.message.provisional
        stream.accepted = True
        self._queue.enqueue(transfer, session)
        if accepted_before and not offer.final:
            return []
        accept = messages.Accept(
            transfer, stream.planned, offer.final, offer.final_token, provisional
        )
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
        refusal = _refusal(session, transfer, cause, detail)
        return [refusal, *self._reader_finished(outgoing, session, cause)]

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
                outgoing = self._transfers.requested(session, transfer, until)
            if outgoing is None:
                self._past.unwant(transfer, cause, now + self._config.lease_s)
                return [Reply(session, messages.Cancelled(transfer))]
        outgoing.watchers.discard(session)
        if session not in outgoing.streams:
            has_ended = session in outgoing.refused or session in outgoing.finished
            if session in outgoing.refused and outgoing.final and outgoing.waits:
                outgoing.expires = min(outgoing.expires, now + self._config.given_up_lease_s)
                self._transfers.schedule(outgoing)
            elif session in outgoing.refused:
                outgoing.given_up = True
            if has_ended or outgoing.full(readers):
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
        """End a transfer: its readers and watchers are refused, and its pages are freed.

        Args:
            request_ended: no further offer of it can come, as after its final offer.
        """
        transfer = outgoing.transfer
        self._transfers.remove(outgoing)
        self._past.remember(transfer, cause, request_ended=outgoing.final or request_ended)
        for session, stream in outgoing.streams.items():
            self._draining.drain(session, transfer, stream)
        actions: list[Action] = []
        if cause is not None:
            sessions = (*outgoing.streams, *outgoing.watchers)
            actions += [_refusal(session, transfer, cause, detail) for session in sessions]
        if outgoing.offer is not None and outgoing.offer.final:
            actions.append(Free(outgoing.offer.request, cause))
        return actions

    def check_integrity(self) -> None:
        """Raises RuntimeError if a reader's last opening still drains, or counts of writes disagree."""
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
        """A reader has ended. After the last reader the transfer ends."""
        transfer = outgoing.transfer
        stream = outgoing.streams.pop(session, None)
        if stream is not None:
            self._draining.drain(session, transfer, stream)
        outgoing.finished[session] = cause
        outgoing.moved = True
        if not outgoing.all_finished:
            return []
        # A prefill that is under way goes on. Its pages are freed when it ends.
        if outgoing.final or self._past.is_unwanted(transfer) or not outgoing.expected:
            return self.end_transfer(outgoing, outgoing.cause, "")
        return []


def _refusal(session: SessionId, transfer: str, cause: Cause, detail: str) -> Reply:
    return Reply(session, messages.Refuse(transfer, cause, detail))
