# SPDX-License-Identifier: Apache-2.0
"""The seam between the agent and the transports that move bytes.

A transport lives in one process and is used by the agent's thread only. As a producer it `connect`s to consumers, and
`write`s from its sending slab into their landing slots. As a consumer it `expect`s producers, reports what they wrote,
and `read`s from their sending slabs where it is `readable`. It moves bytes, and knows nothing of transfers, pages
or leases. The agent verifies what it delivers.
"""

import abc
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, NamedTuple, Self

from pd_connector.config import Config
from pd_connector.control.keys import CurveKeys
from pd_connector.control.sockets import Context
from pd_connector.errors import TransportError
from pd_connector.memory.buffers import Buffers
from pd_connector.memory.destination import Destination
from pd_connector.memory.device_bytes import Payload
from pd_connector.memory.device_slab import DeviceSlab
from pd_connector.memory.pieces import Pieces
from pd_connector.memory.slab import Slab

Link = Hashable
"""A producer's handle of one consumer, from `connect` until `disconnect`."""


class TransportParts(NamedTuple):
    """The objects that a transport gets when it is made.

    Attributes:
        context: the ZeroMQ context of all sockets of this agent.
        config: the engine's settings; `config.permits` says which hosts may be bound and dialled.
        keys: keys of the control channel; None without a key.
        buffers: the slabs that chunks are gathered into and land in, and their pins.
    """

    context: Context
    config: Config
    keys: CurveKeys | None
    buffers: Buffers


class Written(NamedTuple):
    """One write has ended: its source memory is no longer read, and its slot no longer written."""

    token: int  # as returned by `write`
    ok: bool
    detail: str  # why not, for the log


class Landed(NamedTuple):
    """One write by a peer has landed completely, or one read from a peer has ended.

    Attributes:
        header: the header that was given to `write` or `read`.
        slot: the landing slot that was given with it.
        payload: the bytes. Those of a write may lie in the landing slot; they are valid until that slot is
            granted again. Or they lie in memory of the transport; they are valid until the next `poll`.
            Those of a read may lie in the producer's send slot; they are valid until the producer is
            told that they were taken. If `destinations` has named a `Destination`, the bytes lie there.
            `Pieces` are pages of the producer that the consumer will `pull`; no transport reports them.
        problem: why a read failed, for the log; its payload is empty then.
        verified: the transport has verified that these are the bytes that the peer sent: by a cipher's
            tags or, without a key, by checksums. Only this process can write there.
    """

    header: bytes
    slot: int
    payload: Payload | Pieces | Destination
    problem: str = ""
    verified: bool = False


Destinations = Callable[[bytes, int, int], Destination | None]
"""Takes header, landing slot and length of a chunk that arrives; says where it belongs, if that is known."""

LEAST_PIECE_BYTES = 16 << 10
"""Memory in smaller pieces is sealed and opened by way of a slot: each piece costs microseconds."""


class Transport(abc.ABC):
    """Base of all transports. Errors of set-up raise TransportError."""

    name: ClassVar[str]
    one_sided: ClassVar[bool]
    """Whether a peer writes into the landing slot by itself. If so, a peer that has lost its session may still
    write. Otherwise payloads arrive in memory of their own."""
    copies: ClassVar[bool] = False
    """Whether `write` has read the payload when it returns. If so, the payload may lie anywhere in memory, and
    not only in the sending slab."""
    readable: ClassVar[bool] = False
    """Whether a consumer can read from the producer's sending slab."""
    reads_first: ClassVar[bool] = False
    """Whether reading costs less than writing, so that `direction: auto` reads."""
    maps_slots: ClassVar[bool] = False
    """Whether peers map this rank's slots, which then must be memory that can be shared."""
    private_slots: ClassVar[bool] = False
    """Whether it uses `Buffers.private_landing` and `private_sending`, which no peer can reach."""
    reaches_devices: ClassVar[bool] = False
    """Whether it moves chunks between slots in device memory, where both sides have such slots. Others
    move host memory only."""
    port: int = 0
    """The TCP port that consumers dial for data; 0 if it has none, or chooses several itself."""
    label: str = ""
    """The transport's name in the config and in the log, if it differs from `name`. Peers know `name`."""
    verifies: bool = False
    """Whether everything it delivers is `verified`. If so, chunks need no checksum."""
    prepares: bool = False
    """Whether there are writes that it can `prepare`. These need no checksum either."""
    destinations: Destinations | None = None
    """Set by the consumer. A transport that `prepares` may call this to learn where a chunk belongs. It may then
    copy or decrypt each part of the chunk there as it arrives. The bytes there count only if `Landed` is `verified`."""
    sends_from: Slab | None = None
    """Slots that chunks are gathered into for this transport, if these are not the rank's sending slab.
    `verifies` and `prepares` need them: memory that no peer can write. Such a transport delivers the chunks of
    one link in the order of their writes."""

    @classmethod
    def make(cls, parts: TransportParts) -> Self:
        """Make this transport for a rank. Raises TransportError if it cannot work on this machine."""
        return cls()

    @abc.abstractmethod
    def address(self) -> bytes:
        """The bytes with which a peer's transport of the same name can `connect` to this one, or `expect` it."""

    @abc.abstractmethod
    def connect(self, consumer: bytes) -> Link:
        """Prepare to write to the consumer with this `address()`; returns a handle. Does not wait for the consumer.
        Raises TransportError where it cannot be reached."""

    def device_slots(self, link: Link) -> DeviceSlab | None:
        """Slots in device memory that chunks for this consumer are gathered into, to be written or read;
        None where they pass through host memory."""
        return None

    @abc.abstractmethod
    def disconnect(self, link: Link) -> None:
        """Forget a consumer. Writes under way to it end as failed `Written`."""

    def broken(self, link: Link) -> bool:
        """Whether the consumer cannot be written to any more over this link: a session needs a new one."""
        return False

    @abc.abstractmethod
    def expect(self, producer: bytes) -> Hashable:
        """Prepare to be written to by the producer with this `address()`, and to read from it; returns a
        handle. Raises TransportError for an address that cannot be used."""

    @abc.abstractmethod
    def dismiss(self, source: Hashable) -> None:
        """Undo `expect`: take nothing from that producer any more. Its reads under way are not reported, and no longer
        write into their landing slots."""

    @abc.abstractmethod
    def write(self, link: Link, header: bytes, payload: Any, slot: int) -> int:
        """Start to write `payload` into the consumer's landing slot; returns a token.

        `payload` is a `memoryview`, or `DeviceBytes` of one of `device_slots(link)`. It already holds the chunk: no
        stream of a device still writes it.

        `payload` must stay unchanged until the `Written` with this token is polled. Header and
        payload arrive together, once, or not at all. Unless the transport `copies`, a write is `ok`
        only when the consumer has said that it landed. When a connection breaks, the writes that
        are under way over it end as failed, and later ones wait for the next connection. Raises
        TransportError if it cannot start.
        """

    def prepare(
        self, link: Link, header: bytes, pieces: Pieces, slot: int, into: memoryview
    ) -> Callable[[], int] | None:
        """Seal a payload that lies in pieces into `into`, before the call returns. The chunk is `verified` when it
        lands.

        Returns:
            A function that starts the write (see `write`) and returns its token. Call it at once, or never.
            `into` must stay unchanged until the `Written` with this token is polled. None if this
            transport cannot prepare this write: then the payload has to be gathered.

        Raises:
            TransportError: it cannot be written.
        """
        return None

    def read(self, source: Hashable, send_slot: int, nbytes: int, slot: int, header: bytes) -> None:
        """Start to fetch the first `nbytes` bytes of the producer's send slot `send_slot`.

        `poll` reports the end of the read once, as `Landed(header, slot, payload)`, with a `problem` if
        it failed. A read from a producer that has not connected yet waits for it. The producer must
        not change its send slot until the consumer tells it that the chunk was taken. Nothing else may
        use the landing slot `slot` until the read has ended. Raises TransportError if it cannot start.
        """
        raise TransportError(f"{self.name} transport: a producer cannot be read from")

    def direct(self, source: Hashable) -> bool:
        """Whether `pull` can read this producer's pages, which are outside its slab."""
        return False

    def pull(self, source: Hashable, theirs: Pieces, ours: Pieces) -> bytes:
        """Copy memory of the producer into memory of this process, before the call returns.

        Returns:
            The checksum of `ours` after the copy (`Pieces.checksum`).

        Raises:
            TransportError: not all of it could be copied.
        """
        raise TransportError(f"{self.name} transport: a producer's memory cannot be read")

    def silenced(self, source: Hashable, *, waits: bool = False) -> bool:
        """Whether this producer can certainly not write any more, although it has not confirmed that.

        Args:
            waits: whether the call may wait (50 ms), because the session broke just now and the producer's process may
                be ending.
        """
        return not self.one_sided

    @abc.abstractmethod
    def poll(self) -> tuple[list[Written], list[Landed]]:
        """Make progress, and return the writes and reads that have ended since the last call. Never waits."""

    @property
    @abc.abstractmethod
    def pollables(self) -> list[object]:
        """Sockets or descriptors that turn readable when `poll` is due; may change over time."""

    @property
    @abc.abstractmethod
    def restless(self) -> bool:
        """Whether `poll` must be called every fraction of a millisecond, even if no pollable is readable."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything. Nothing is delivered afterwards."""


def check_fits(owner: str, slot: int, nbytes: int, slots: int, slot_bytes: int) -> None:
    """Raises TransportError unless `nbytes` bytes fit in slot `slot` of the owner's slab."""
    if not 0 <= slot < slots or not 0 <= nbytes <= slot_bytes:
        raise TransportError(
            f"slot {slot} and {nbytes} bytes; {owner} has {slots} slots of {slot_bytes} bytes"
        )
