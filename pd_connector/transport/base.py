# SPDX-License-Identifier: Apache-2.0
"""The seam between the agent and whatever moves bytes.

A transport lives in one process and is used by the agent's thread only. As a producer it
`connect`s to consumers and `write`s from its sending slab into their landing slots; as a consumer
it `expect`s producers, reports what they wrote, and `read`s from the sending slabs of those whose
transport is `readable`. It moves bytes and knows nothing of transfers, pages or leases; what it
delivers is not believed until the agent has verified it.
"""

import abc
from collections.abc import Hashable
from typing import ClassVar, NamedTuple

from pd_connector.errors import TransportError
from pd_connector.memory import Pieces
from pd_connector.slab import Slab

Route = Hashable
"""A producer's handle of one consumer, from `connect` until `disconnect`."""


class Written(NamedTuple):
    """One write has ended; its source memory is no longer read, its slot no longer written."""

    token: int  # as returned by `write`
    ok: bool
    detail: str  # why not, for the log


class Landed(NamedTuple):
    """One write by a peer has landed completely, or one read from a peer has ended."""

    header: bytes  # as given to `write` or `read`
    slot: int  # the landing slot that was named
    # The bytes. They may lie in the landing slot, and are valid until it is granted or read into
    # again, or in memory of the transport, and are valid until the next `poll`; those of a read may
    # lie in the producer's send slot, and are valid until it is told.
    payload: memoryview
    problem: str = ""  # why a read failed, for the log; its payload is empty then
    # Whether the transport has verified, by keys that only the peer has, that these are the bytes
    # the peer sent, and whether nobody but this process can write where they lie.
    authentic: bool = False


class Transport(abc.ABC):
    """Base of all transports. Errors of set-up raise TransportError."""

    name: ClassVar[str]
    one_sided: ClassVar[bool]
    """Whether a peer writes into the slot by itself, and so may still do so when we have lost
    it; otherwise payloads arrive in memory of their own."""
    copies: ClassVar[bool] = False
    """Whether `write` has read the payload when it returns; it may lie anywhere then, and not only
    in the sending slab."""
    readable: ClassVar[bool] = False
    """Whether a consumer can read from the producer's sending slab."""
    label: str = ""
    """What people call it in the config and read in the log, where that is not its `name`. Peers
    know it by its name."""
    authenticates: bool = False
    """Whether everything it delivers is `authentic`. Chunks need no checksum then."""
    sends_from: Slab | None = None
    """Slots that chunks are gathered into for this transport, where it is not the rank's sending
    slab: memory that no peer can write, which `authenticates` asks for."""

    @abc.abstractmethod
    def address(self) -> bytes:
        """What a peer's transport needs to know of this one, to `connect`, `expect` or `read`."""

    @abc.abstractmethod
    def connect(self, consumer: bytes) -> Route:
        """Prepare to write to the consumer with this `address()`. Does not wait for it."""

    @abc.abstractmethod
    def disconnect(self, route: Route) -> None:
        """Forget a consumer. Writes under way to it end as failed `Written`."""

    @abc.abstractmethod
    def expect(self, producer: bytes) -> Hashable:
        """Prepare to be written to by the producer with this `address()`, and to read from it;
        returns a handle."""

    @abc.abstractmethod
    def dismiss(self, source: Hashable) -> None:
        """Undo `expect`: take nothing from that producer any more. Its reads under way are not
        reported, and write no more into their landing slots."""

    @abc.abstractmethod
    def write(self, route: Route, header: bytes, payload: memoryview, slot: int) -> int:
        """Start to write `payload` into the consumer's landing slot; returns a token.

        `payload` must stay unchanged until the `Written` with this token is polled. Header and
        payload arrive together, once, or not at all. Unless the transport `copies`, the write has
        ended well only when the consumer has said that it landed, and nothing is kept of it but a
        reference. When a connection breaks, the writes that were under way over it end as failed,
        and those that follow wait for the next one. Raises TransportError if it cannot start.
        """

    def read(self, source: Hashable, send_slot: int, nbytes: int, slot: int, header: bytes) -> None:
        """Start to fetch the first `nbytes` bytes of the producer's send slot `send_slot`.

        Its end is polled as `Landed(header, slot, payload)`, once, with a `problem` if it failed.
        Waits for a producer that has not connected yet. The producer must leave its slot as it
        is until the consumer has told it; until the end nobody else may use the landing slot
        `slot`. Raises TransportError if it cannot start.
        """
        raise TransportError(f"{self.name} transport: a producer cannot be read from")

    def direct(self, source: Hashable) -> bool:
        """Whether `pull` can read the memory of this producer."""
        return False

    def pull(self, source: Hashable, theirs: Pieces, ours: Pieces) -> bytes:
        """Copy the producer's memory into this process', at once; returns the checksum of what
        is here then. Raises TransportError if not all of it could be copied."""
        raise TransportError(f"{self.name} transport: a producer's memory cannot be read")

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


def check_fits(owner: str, slot: int, nbytes: int, slots: int, slot_bytes: int) -> None:
    """Raises TransportError unless `nbytes` bytes fit in slot `slot` of the owner's slab."""
    if not 0 <= slot < slots or not 0 <= nbytes <= slot_bytes:
        raise TransportError(
            f"slot {slot} and {nbytes} bytes; {owner} has {slots} slots of {slot_bytes} bytes"
        )
