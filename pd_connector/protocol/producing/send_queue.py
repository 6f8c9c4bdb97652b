# SPDX-License-Identifier: Apache-2.0
"""Chooses the next chunk that a producer sends."""

from collections.abc import Collection

from pd_connector.protocol.producing.outgoing import OutgoingChunk, SessionId
from pd_connector.protocol.producing.outgoing_transfers import OutgoingTransfers


class SendQueue:
    """Streams that may have a chunk to send. They take turns. Used by one thread."""

    def __init__(self, transfers: OutgoingTransfers) -> None:
        self._transfers = transfers
        self._ready: dict[tuple[str, SessionId], None] = {}

    def enqueue(self, transfer: str, session: SessionId) -> None:
        """Add a stream that may have a chunk to send: more of it is computed, or it has got
        slots."""
        stream = self._transfers.stream(session, transfer)
        if stream is not None and stream.accepted and stream.credits:
            self._ready.setdefault((transfer, session))

    def next_send(self, busy: Collection[SessionId]) -> OutgoingChunk | None:
        """See `Producer.next_send`."""
        while True:
            key = next((key for key in self._ready if key[1] not in busy), None)
            if key is None:
                return None
            del self._ready[key]
            transfer, session = key
            outgoing = self._transfers.get(transfer)
            chunk = outgoing.next_send(session) if outgoing else None
            if chunk is not None:
                self._ready[key] = None  # behind all others
                return chunk

    def peek(self, busy: Collection[SessionId]) -> OutgoingChunk | None:
        """The chunk that `next_send` returns, if nothing happens before. It is not taken."""
        for transfer, session in self._ready:
            if session in busy:
                continue
            outgoing = self._transfers.get(transfer)
            chunk = outgoing.next_send(session) if outgoing else None
            if outgoing is not None and chunk is not None:
                outgoing.streams[session].unsend(chunk)
                return chunk
        return None

    def unsend(self, chunk: OutgoingChunk) -> None:
        """Take back the chunk that `next_send` gave. The stream waits until it is enqueued again."""
        self._ready.pop((chunk.transfer, chunk.session), None)
        stream = self._transfers.stream(chunk.session, chunk.transfer)
        assert stream is not None  # nothing has happened since
        stream.unsend(chunk)
