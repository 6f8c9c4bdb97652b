# SPDX-License-Identifier: Apache-2.0
"""The transport that moves chunks by NIXL, with UCX, between slabs in host memory or on devices: over RDMA where there is
any (GPUDirect between devices), over CUDA's memory of other processes within a machine (`cuda_ipc`), else over shared
memory or TCP.

The producer writes into the landing slab by itself, and a notification that follows the bytes tells the consumer. Or
the consumer reads from the sending slab by itself. Each link, and each producer that is read from, has a NIXL
agent of its own. The reason: releasing a transfer that is under way does not stop it, and UCX goes on reading its
source and writing its target. Destroying the agent stops it.

Two ranks that both have slots on a device use these with each other. Both sides see it in their addresses, so that
nothing has to be agreed on; all other pairs use slots in host memory.

UCX neither encrypts nor authenticates, and anything that reaches its port can do harm. Outside of loopback
the network between the engines must be trusted, with a key or without.
"""

import itertools
import secrets
import struct
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec

from pd_connector.errors import TransportError
from pd_connector.hosts import is_loopback
from pd_connector.memory.device_bytes import DeviceBytes, Payload, address_of
from pd_connector.memory.device_slab import DeviceSlab
from pd_connector.memory.slab import Slab
from pd_connector.memory.slot_memory import NO_DEVICE_SLOTS, DeviceSlots
from pd_connector.transport.base import Landed, Link, Transport, TransportParts, Written, check_fits
from pd_connector.transport.nixl.agent import NixlAgent, Place, place_in, try_out

_Pointer = Annotated[int, msgspec.Meta(ge=0, lt=(1 << 63) - 1)]
_Slots = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_SlotBytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class NixlAddress(msgspec.Struct, frozen=True, array_like=True):
    """The address of one rank, as it travels in the handshake. New fields come last and have defaults."""

    name: str
    metadata: bytes
    base: _Pointer  # of the landing slab in its process
    slots: _Slots
    slot_bytes: _SlotBytes
    # Place and shape of the sending slab.
    send_base: _Pointer = 0
    send_slots: _Slots = 0
    send_slot_bytes: _SlotBytes = 0
    # The same slots on a device; 0 where it has none. Versions before have none.
    device_memory: Literal["VRAM", "DRAM"] = "VRAM"
    device: _Slots = 0
    device_base: _Pointer = 0
    device_send_base: _Pointer = 0

    @classmethod
    def of(
        cls, name: str, metadata: bytes, landing: Slab, sending: Slab, on_device: DeviceSlots
    ) -> Self:
        """The address of a rank with these slots."""
        first = next(iter(on_device.slabs), None)
        return cls(
            name,
            metadata,
            landing.address,
            landing.slots,
            landing.slot_bytes,
            sending.address,
            sending.slots,
            sending.slot_bytes,
            "DRAM" if first and first.memory == "DRAM" else "VRAM",
            first.number if first else 0,
            on_device.landing.address if on_device.landing else 0,
            on_device.sending.address if on_device.sending else 0,
        )

    def landing_place(self, offset: int, *, on_device: bool) -> Place:
        if on_device:
            return Place(self.device_base + offset, self.device_memory, self.device)
        return Place(self.base + offset)

    def send_place(self, offset: int, *, on_device: bool) -> Place:
        if on_device:
            return Place(self.device_send_base + offset, self.device_memory, self.device)
        return Place(self.send_base + offset)


def read_address(address: bytes) -> NixlAddress:
    """Decode a peer's address. Raises TransportError if it cannot be decoded."""
    try:
        return msgspec.msgpack.decode(address, type=NixlAddress)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransportError(f"nixl address of a peer cannot be read: {error}") from None


@dataclass(slots=True)
class NixlConsumer:
    agent: NixlAgent
    remote: str
    address: NixlAddress
    on_device: bool  # slots of both sides lie there
    writes: dict[int, Any] = field(default_factory=dict)  # token: handle
    failed: bool = False  # a write to it: the agent does not reach it again


@dataclass(slots=True)
class NixlRead:
    handle: Any
    header: bytes
    slot: int
    nbytes: int


@dataclass(slots=True)
class NixlProducer:
    """An expected producer. Its NIXL agent is made at the first read, because most sessions only write."""

    address: NixlAddress
    on_device: bool  # slots of both sides lie there
    agent: NixlAgent | None = None
    remote: str = ""
    reads: list[NixlRead] = field(default_factory=list)


_NOTE = struct.Struct("<IQ")  # slot, bytes; the header follows
_MAX_HEADER_BYTES = 1 << 16


class NixlTransport(Transport):
    """See the module.

    Args:
        landing: slab that peers write into, and that reads land in.
        sending: slab that all payloads given to `write` lie in, and that peers read from.
        host: what this engine listens on; UCX is kept to loopback if that is loopback.
        on_device: slots of the same numbers and sizes in device memory.

    Raises:
        TransportError: NIXL is missing, UCX cannot be set up, or does not move device memory.
    """

    name = "nixl"
    one_sided = True
    reaches_devices = True

    def __init__(
        self,
        landing: Slab,
        sending: Slab,
        host: str = "127.0.0.1",
        on_device: DeviceSlots = NO_DEVICE_SLOTS,
    ) -> None:
        # Constants of a class elsewhere; here it depends on the machine.
        self.readable = _reads_are_safe(host)  # type: ignore[misc]
        self._landing = landing
        self._sending = sending
        self._on_device = on_device
        self._host = host
        # The name authenticates peers, so it must not be guessable.
        self._name = f"pd-{secrets.token_hex(16)}"
        self._numbers = itertools.count(1)  # of writes, links and sources
        self._written: list[Written] = []
        self._links: dict[int, NixlConsumer] = {}
        self._expected: dict[int, NixlProducer] = {}
        # What peers reach: they write into the one slab and read from the other.
        self._receiver = NixlAgent(self._name, host, landing, sending, *on_device.slabs)
        try:
            for slab in on_device.slabs:
                try_out(self._receiver, self._name, slab)
        except TransportError:
            self._receiver.close()
            raise
        self._address = NixlAddress.of(
            self._name, self._receiver.metadata, landing, sending, on_device
        )

    @classmethod
    def make(cls, parts: TransportParts) -> Self:
        buffers, host = parts.buffers, parts.config.host
        if buffers.device_slots.slabs:
            try:
                return cls(buffers.landing, buffers.sending, host, buffers.device_slots)
            except TransportError as error:
                buffers.leave_device(str(error))
        return cls(buffers.landing, buffers.sending, host)

    def address(self) -> bytes:
        return msgspec.msgpack.encode(self._address)

    def connect(self, consumer: bytes) -> Link:
        address = read_address(consumer)
        link = next(self._numbers)
        slots = self._on_device.sending if address.device_base else None
        agent, remote = self._reach(
            f"{self._name}/{link}", address, slots or self._sending, "consumer"
        )
        self._links[link] = NixlConsumer(agent, remote, address, slots is not None)
        return link

    def device_slots(self, link: Link) -> DeviceSlab | None:
        assert isinstance(link, int)
        consumer = self._links.get(link)
        return self._on_device.sending if consumer and consumer.on_device else None

    def broken(self, link: Link) -> bool:
        assert isinstance(link, int)
        consumer = self._links.get(link)
        return consumer is not None and consumer.failed

    def disconnect(self, link: Link) -> None:
        assert isinstance(link, int)
        consumer = self._links.pop(link, None)
        if consumer is None:
            return
        for token in list(consumer.writes):
            self._end_write(consumer, token, "nixl write: the consumer was disconnected")
        consumer.agent.close()

    def expect(self, producer: bytes) -> Hashable:
        source = next(self._numbers)
        address = read_address(producer)
        on_device = bool(self._on_device.landing and address.device_send_base)
        self._expected[source] = NixlProducer(address, on_device)
        return source

    def dismiss(self, source: Hashable) -> None:
        assert isinstance(source, int)
        producer = self._expected.pop(source, None)
        if producer is not None and producer.agent is not None:
            for read in producer.reads:
                producer.agent.release(read.handle)
            producer.agent.close()

    def write(self, link: Link, header: bytes, payload: Payload, slot: int) -> int:
        assert isinstance(link, int)
        consumer = self._links.get(link)
        if consumer is None:
            raise TransportError("nixl transport: no such consumer (any more)")
        landing = consumer.address
        check_fits("the consumer", slot, payload.nbytes, landing.slots, landing.slot_bytes)
        if len(header) > _MAX_HEADER_BYTES:
            raise TransportError(
                f"nixl: header of {len(header)} bytes, at most {_MAX_HEADER_BYTES}"
            )
        here = self._find(payload, consumer)
        there = landing.landing_place(slot * landing.slot_bytes, on_device=consumer.on_device)
        note = _NOTE.pack(slot, payload.nbytes) + header
        try:
            handle = consumer.agent.start(
                "WRITE", consumer.remote, here, there, payload.nbytes, note
            )
        except Exception as error:
            consumer.failed = True
            raise TransportError(f"nixl write cannot start: {error!r}") from error
        token = next(self._numbers)
        consumer.writes[token] = handle
        return token

    def read(self, source: Hashable, send_slot: int, nbytes: int, slot: int, header: bytes) -> None:
        assert isinstance(source, int)
        producer = self._expected.get(source)
        if producer is None:
            raise TransportError("nixl: no such producer (any more)")
        far, landing = producer.address, self._landing
        check_fits("the producer", send_slot, nbytes, far.send_slots, far.send_slot_bytes)
        check_fits("this engine", slot, nbytes, landing.slots, landing.slot_bytes)
        slots = self._landing_of(producer)
        if producer.agent is None:
            name = f"{self._name}/{source}"
            producer.agent, producer.remote = self._reach(name, far, slots, "producer")
        here = place_in(slots, slot * landing.slot_bytes)
        there = far.send_place(send_slot * far.send_slot_bytes, on_device=producer.on_device)
        try:
            handle = producer.agent.start("READ", producer.remote, here, there, nbytes)
        except Exception as error:
            raise TransportError(f"nixl read cannot start: {error!r}") from error
        producer.reads.append(NixlRead(handle, header, slot, nbytes))

    def poll(self) -> tuple[list[Written], list[Landed]]:
        for consumer in self._links.values():
            for token, handle in list(consumer.writes.items()):
                problem = consumer.agent.progress(handle)
                if problem is not None:
                    self._end_write(consumer, token, f"nixl write: {problem}" if problem else "")
        written, self._written = self._written, []
        return written, self._take_notes() + self._end_reads()

    @property
    def pollables(self) -> list[object]:
        return []

    @property
    def restless(self) -> bool:
        # NIXL's own progress thread would spin on one core for ever. Without RDMA a consumer's
        # read, too, gets on only while this side helps, and does not say when it begins.
        return bool(self._links or self._expected)

    def close(self) -> None:
        for link in list(self._links):
            self.disconnect(link)
        for source in list(self._expected):
            self.dismiss(source)
        self._receiver.close()

    def _reach(
        self, name: str, peer: NixlAddress, slab: Slab | DeviceSlab, role: str
    ) -> tuple[NixlAgent, str]:
        """A new agent over one slab, and the peer's name to it."""
        agent = NixlAgent(name, self._host, slab)
        try:
            return agent, agent.meet(peer.metadata)
        except Exception as error:
            agent.close()
            raise TransportError(f"nixl cannot reach the {role}: {error!r}") from error

    def _landing_of(self, producer: NixlProducer) -> Slab | DeviceSlab:
        """The slots that chunks of this producer land in."""
        landing = self._on_device.landing if producer.on_device else None
        return landing or self._landing

    def _find(self, payload: Payload, consumer: NixlConsumer) -> Place:
        """Where a payload lies in the slots from which this consumer is written to."""
        slots = self._on_device.sending if consumer.on_device else None
        slab: Slab | DeviceSlab = slots or self._sending
        inside = address_of(payload) - slab.address
        in_kind = isinstance(payload, DeviceBytes) == consumer.on_device
        if not in_kind or not 0 <= inside <= slab.nbytes - payload.nbytes:
            raise TransportError("nixl: the payload is not in the sending slab")
        return place_in(slab, inside)

    def _end_write(self, consumer: NixlConsumer, token: int, problem: str) -> None:
        consumer.failed |= bool(problem)
        consumer.agent.release(consumer.writes.pop(token))
        self._written.append(Written(token, not problem, problem))

    def _end_reads(self) -> list[Landed]:
        landed: list[Landed] = []
        for producer in self._expected.values():
            for read in list(producer.reads):
                assert producer.agent is not None
                problem = producer.agent.progress(read.handle)
                if problem is None:
                    continue
                producer.reads.remove(read)
                producer.agent.release(read.handle)
                if problem:
                    problem = f"nixl read: {problem}"
                slots = self._landing_of(producer)
                payload = slots.slot(read.slot, 0 if problem else read.nbytes)
                landed.append(Landed(read.header, read.slot, payload, problem))
        return landed

    def _take_notes(self) -> list[Landed]:
        believed = {producer.address.name: producer for producer in self._expected.values()}
        landed: list[Landed] = []
        for sender, notes in self._receiver.notes().items():
            if producer := believed.get(sender.rpartition("/")[0]):
                slots = self._landing_of(producer)
                landed += [arrival for note in notes if (arrival := self._read_note(note, slots))]
        return landed

    def _read_note(self, note: bytes, slots: Slab | DeviceSlab) -> Landed | None:
        if not _NOTE.size <= len(note) <= _NOTE.size + _MAX_HEADER_BYTES:
            return None
        slot, nbytes = _NOTE.unpack_from(note)
        if slot >= slots.slots or nbytes > slots.slot_bytes:
            return None
        return Landed(note[_NOTE.size :], slot, slots.slot(slot, nbytes))


def _reads_are_safe(host: str) -> bool:
    """Whether a producer survives a consumer that dies during a read. Over plain TCP it does not: the producer's UCX
    takes part in the read, and aborts its process when the consumer is gone."""
    return is_loopback(host) or any(Path("/sys/class/infiniband").glob("*"))
