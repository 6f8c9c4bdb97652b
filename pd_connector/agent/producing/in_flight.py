# SPDX-License-Identifier: Apache-2.0
"""Chunks on their way to consumers, and the way that they take."""

from collections.abc import Collection, Hashable
from typing import NamedTuple

from pd_connector.transport.base import Transport

LEFT = "left"
"""Stands for a transport's name in the keys of chunks that the consumer reads."""

Key = tuple[str, int]
"""A transport's name and its token for a write, or `LEFT` and the chunk's number."""


class SendPath(NamedTuple):
    """How chunks get to a consumer."""

    transport: Transport
    link: Hashable  # of the transport
    read: bool  # chunks are left for the consumer to read


class InFlight(NamedTuple):
    """A chunk on its way."""

    session: bytes
    transfer: str
    send_slot: int | None  # None: it is sent or read from where its pages lie
    nbytes: int
    deadline: float
    most: float = float("inf")  # such chunks that its session may have at a time
    in_order: bool = False  # it arrives after the chunks that were written to its session before it


class ChunksInFlight:
    """All chunks of a producer that are on their way."""

    def __init__(self, stall_timeout_s: float) -> None:
        """`stall_timeout_s`: a session is stuck after this time without a chunk that arrives."""
        self.chunks: dict[Key, InFlight] = {}
        self._stall_timeout_s = stall_timeout_s
        self._backpressured: set[bytes] = set()
        # Sessions with a chunk in order, since the last `timed_out`.
        self._arrived: set[bytes] = set()
        self._moving_until: dict[bytes, float] = {}  # sessions whose chunks in order arrive

    @property
    def backpressured(self) -> Collection[bytes]:
        """Sessions with the most chunks under way that a session may have."""
        return self._backpressured

    def chunk_begun(self, key: Key, in_flight: InFlight) -> None:
        """Note a chunk that is under way from now on."""
        self.chunks[key] = in_flight
        if self._is_backpressured(in_flight.session):
            self._backpressured.add(in_flight.session)

    def chunk_ended(self, key: Key) -> InFlight | None:
        """A chunk has arrived, or certainly will not; None if it was not under way."""
        in_flight = self.chunks.pop(key, None)
        if in_flight is None:
            return None
        if in_flight.in_order:
            self._arrived.add(in_flight.session)
        if not self._is_backpressured(in_flight.session):
            self._backpressured.discard(in_flight.session)
        return in_flight

    def left_to(self, session: bytes, number: int) -> bool:
        """Whether the chunk of this number was left for the session to read."""
        in_flight = self.chunks.get((LEFT, number))
        return in_flight is not None and in_flight.session == session

    def unread_by(self, session: bytes) -> list[Key]:
        """Chunks that were left for the session and that it has not read."""
        return [k for k, one in self.chunks.items() if one.session == session and k[0] == LEFT]

    def timed_out(self, now: float) -> set[bytes]:
        """Sessions with a chunk that was not moved within `stall_timeout_s`. Chunks that arrive in
        order wait for those before them, which may take longer over a slow link. They are late if no
        chunk of their session has arrived within that time."""
        until = now + self._stall_timeout_s
        moving = {s: end for s, end in self._moving_until.items() if end > now}
        self._moving_until = moving | dict.fromkeys(self._arrived, until)
        self._arrived.clear()
        return {
            chunk.session
            for chunk in self.chunks.values()
            if chunk.deadline <= now
            and not (chunk.in_order and chunk.session in self._moving_until)
        }

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the backpressured sessions are exactly those with the most chunks under way."""
        sessions = {chunk.session for chunk in self.chunks.values()}
        found = {session for session in sessions if self._is_backpressured(session)}
        if found != self._backpressured:
            raise RuntimeError(f"backpressured {self._backpressured}, wanted {found}")

    def _is_backpressured(self, session: bytes) -> bool:
        chunks = [chunk for chunk in self.chunks.values() if chunk.session == session]
        return any(len(chunks) >= chunk.most for chunk in chunks)
