# SPDX-License-Identifier: Apache-2.0
"""The address that peers get of this transport, and the format of a message."""

import struct
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from pd_connector.errors import TransportError
from pd_connector.transport.base import Landed

Buffer = npt.NDArray[np.uint8]

MAX_HEADER_BYTES = 1 << 16
TAG_BITS = 62
_PREFIX = struct.Struct("<II")  # slot, bytes of the header; header and payload follow
OVERHEAD_BYTES = _PREFIX.size + MAX_HEADER_BYTES
"""Bytes of a message beside its payload, at most."""


class UcxAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker is reached, and the tag under which its owner sends."""

    worker: bytes
    # It authenticates producers, so it must not be guessable.
    tag: Annotated[int, msgspec.Meta(ge=0, lt=1 << TAG_BITS)]


def read_address(address: bytes) -> UcxAddress:
    """Decode a peer's address. Raises TransportError if it cannot be decoded."""
    try:
        return msgspec.msgpack.decode(address, type=UcxAddress)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransportError(f"ucx address of a peer cannot be read: {error}") from None


def make_message(header: bytes, payload: memoryview, slot: int) -> Buffer:
    """A message for this landing slot, in memory of its own.

    Raises:
        TransportError: there is no such slot, or the header is too long.
    """
    if not 0 <= slot < 1 << 32:
        raise TransportError(f"ucx transport: the consumer has no slot {slot}")
    if len(header) > MAX_HEADER_BYTES:
        raise TransportError(f"ucx: header of {len(header)} bytes, at most {MAX_HEADER_BYTES}")
    front = _PREFIX.pack(slot, len(header)) + header
    message = np.empty(len(front) + payload.nbytes, np.uint8)
    message[: len(front)] = np.frombuffer(front, np.uint8)
    np.copyto(message[len(front) :], np.frombuffer(payload, np.uint8))
    return message


def read_message(message: Buffer) -> Landed | None:
    """What has landed; None if the bytes are not a message."""
    if len(message) < _PREFIX.size:
        return None
    slot, header_bytes = _PREFIX.unpack_from(message.data)
    start = _PREFIX.size + header_bytes
    if start > len(message) or header_bytes > MAX_HEADER_BYTES:
        return None
    return Landed(message[_PREFIX.size : start].tobytes(), slot, message.data[start:])
