# SPDX-License-Identifier: Apache-2.0
"""The address of a shared-memory transport, which peers get over the control channel."""

from typing import Annotated

import msgspec

from pd_connector.errors import TransportError

_Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Slots = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
_SlotBytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class ShmAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a transport listens, and what it shares. It is a msgpack array: fields are only added at its end, and fields
    that a later version adds there are passed over.

    Attributes:
        listener: the abstract name of its Unix socket.
        token: the token that it presents when it connects.
        slots, slot_bytes: number and size of its landing slots.
        send_slots, send_slot_bytes: number and size of its send slots; 0 slots if the sending slab is not shared.
        token_address: where the token lies in its memory, for a peer that tries whether the kernel lets
            it read that memory; 0 where it is not told.
    """

    listener: str
    token: bytes
    slots: _Slots
    slot_bytes: _SlotBytes
    send_slots: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)] = 0
    send_slot_bytes: _SlotBytes = 1
    token_address: _Address = 0


def read_address(address: bytes) -> ShmAddress:
    """A peer's `Transport.address()`. Raises TransportError if it cannot be decoded."""
    try:
        return msgspec.msgpack.decode(address, type=ShmAddress)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransportError(f"shm address of a peer cannot be read: {error}") from None
