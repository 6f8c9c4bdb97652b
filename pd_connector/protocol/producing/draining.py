# SPDX-License-Identifier: Apache-2.0
"""Streams that a producer has ended while writes of theirs were under way."""

from pd_connector.protocol.producing.outgoing import Action, Reply, SessionId
from pd_connector.protocol.producing.outgoing_stream import OutgoingStream
from pd_connector.protocol.wire import messages

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
