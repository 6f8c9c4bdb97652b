# SPDX-License-Identifier: Apache-2.0
"""The seam between the agent and whatever moves bytes.

A transport lives in one process and is used by the agent's thread only. As a producer it
`connect`s to consumers and `write`s; as a consumer it `expect`s producers and reports what
landed. It moves bytes and knows nothing of transfers, pages or leases; what it delivers is not
believed until the agent has verified it.
"""

import abc
from collections.abc import Hashable
from typing import ClassVar, NamedTuple

Route = Hashable
"""A producer's handle of one consumer, from `connect` until `disconnect`."""


class Written(NamedTuple):
    """One write has ended; its source memory is no longer read, its slot no longer written."""

    token: int  # as returned by `write`
    ok: bool
    detail: str  # why not, for the log


class Landed(NamedTuple):
    """One write by a peer has landed completely."""

    header: bytes  # as given to `write`
    slot: int  # the landing slot that was named
    payload: memoryview  # the bytes; valid until the slot is granted again


class Transport(abc.ABC):
    """Base of all transports. Errors of set-up raise TransportError."""

    name: ClassVar[str]
    one_sided: ClassVar[bool]
    """Whether a peer writes into the slot by itself, and so may still do so when we have lost
    it; otherwise payloads arrive in memory of their own."""

    @abc.abstractmethod
    def address(self) -> bytes:
        """What a peer's transport needs to know of this one, to `connect` or `expect`."""

    @abc.abstractmethod
    def connect(self, consumer: bytes) -> Route:
        """Prepare to write to the consumer with this `address()`. Does not wait for it."""

    @abc.abstractmethod
    def disconnect(self, route: Route) -> None:
        """Forget a consumer. Writes under way to it end as failed `Written`."""

    @abc.abstractmethod
    def expect(self, producer: bytes) -> Hashable:
        """Prepare to be written to by the producer with this `address()`; returns a handle."""

    @abc.abstractmethod
    def dismiss(self, source: Hashable) -> None:
        """Undo `expect`: take nothing from that producer any more."""

    @abc.abstractmethod
    def write(self, route: Route, header: bytes, payload: memoryview, slot: int) -> int:
        """Start to write `payload` into the consumer's landing slot; returns a token.

        `payload` must stay unchanged until the `Written` with this token is polled. Header and
        payload arrive together, once, or not at all. Raises TransportError if it cannot start.
        """

    def silenced(self, source: Hashable) -> bool:
        """Whether this producer certainly writes no more, although nobody said so."""
        return not self.one_sided

    @abc.abstractmethod
    def poll(self) -> tuple[list[Written], list[Landed]]:
        """Make progress and take what has ended since the last call. Never waits."""

    @property
    @abc.abstractmethod
    def pollables(self) -> list[object]:
        """Sockets or descriptors that turn readable when `poll` is due; may change over time."""

    @property
    @abc.abstractmethod
    def restless(self) -> bool:
        """Whether `poll` must be called every fraction of a millisecond, pollables or not."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything. Nothing is delivered afterwards."""
