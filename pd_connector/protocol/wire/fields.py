# SPDX-License-Identifier: Apache-2.0
"""The types of fields in messages and headers, with their limits, and the one function that decodes bytes from a socket."""

from typing import Annotated, TypeVar

import msgspec

from pd_connector.errors import MalformedMessageError

MAX_MESSAGE_BYTES = 1 << 20

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Fingerprint = Annotated[bytes, msgspec.Meta(max_length=64)]
Name = Annotated[str, msgspec.Meta(max_length=512)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    """Decode bytes by the decoder's schema.

    Raises:
        MalformedMessageError: they do not fit the schema, or are more than `MAX_MESSAGE_BYTES`.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessageError(f"message of {len(data)} bytes: at most {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedMessageError(f"{len(data)} bytes do not fit the schema: {error}") from None
