# SPDX-License-Identifier: Apache-2.0
"""Streams that a producer has ended while writes of theirs were under way."""

from pd_connector.protocol import messages
from pd_connector.protocol.outgoing import Action, OutgoingStream, Reply, SessionId

Key = tuple[SessionId, str]
"""A stream: the consumer it goes to, and the transfer."""


class Draining:
    """Until the last write of such a stream has ended, its slots are not the consumer's own
    again. Used by one thread."""

    def __init__(self) -> None:
        self._writing: dict[Key, int] = {}
        self._waiting: set[Key] = set()  # for a `Cancelled`

    def __contains__(self, key: Key) -> bool:
        return key in self._writing

    def add(self, session: SessionId, transfer: str, stream: OutgoingStream) -> None:
        """This stream is over; nothing, if none of its writes is under way."""
        if stream.writing:
            self._writing[session, transfer] = stream.writing

    def written(self, session: SessionId, transfer: str) -> list[Action]:
        """A write has ended of a stream that is over; with the last, who waits is told."""
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
        """Tell the consumer that nothing is written for this transfer any more: now, or when it
        has come true."""
        key = session, transfer
        if key not in self._writing:
            return [Reply(session, messages.Cancelled(transfer))]
        self._waiting.add(key)
        return []

    def lost(self, session: SessionId) -> None:
        """Nobody is there to be told."""
        self._waiting = {key for key in self._waiting if key[0] != session}
