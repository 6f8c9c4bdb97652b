# SPDX-License-Identifier: Apache-2.0
"""The facts that a peer's transport must know about this one. They travel over the control channel only."""

from typing import Annotated

import msgspec

from pd_connector.errors import TransportError
from pd_connector.hosts import numeric_address

IDENTITY_BYTES = 16
SECRET_BYTES = 32
LEAST_RECORD_BYTES = 512 << 10
"""The smallest permitted limit for the body of a sealed record, and a peer's limit if its address has none."""


class TcpAddress(msgspec.Struct, frozen=True, array_like=True):
    """One transport, from its start to its end.

    Attributes:
        host: numeric; a name would have to be looked up, and a slow name server would stop us.
        port: where it listens.
        identity: random id of this transport.
        secret: random, a part of every connection's keys. It is sent over the control channel only.
        slots: largest number of landing slots that it grants.
        slot_bytes: the size of each.
        fast_aes: whether its processor has instructions for AES-GCM.
        record_bytes: the largest body of a sealed record that it opens.
        sums: whether it seals and opens records with checksums if no key is set.
    """

    host: Annotated[str, msgspec.Meta(max_length=64)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    identity: Annotated[bytes, msgspec.Meta(min_length=IDENTITY_BYTES, max_length=IDENTITY_BYTES)]
    secret: Annotated[bytes, msgspec.Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    slot_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    fast_aes: bool
    record_bytes: Annotated[int, msgspec.Meta(ge=LEAST_RECORD_BYTES, lt=1 << 32)] = (
        LEAST_RECORD_BYTES
    )
    sums: bool = False

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def read_address(data: bytes) -> TcpAddress:
    """A peer's `TcpAddress.encode()`. Raises TransportError."""
    try:
        address = msgspec.msgpack.decode(data, type=TcpAddress)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransportError(f"tcp address of a peer cannot be read: {error}") from None
    if numeric_address(address.host) is None:
        raise TransportError(
            f"tcp address of a peer: host {address.host!r} is not numeric, and names of peers are "
            "not looked up; the peer must announce a numeric address (its config key host)"
        )
    return address
