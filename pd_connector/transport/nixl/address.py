# SPDX-License-Identifier: Apache-2.0
"""The address of a rank's NIXL agent and slots, as ranks exchange it."""

from typing import Annotated, Literal, Self

import msgspec

from pd_connector.errors import TransportError
from pd_connector.memory.slab import Slab
from pd_connector.memory.slot_memory import DeviceSlots
from pd_connector.transport.nixl.agent import Place

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
