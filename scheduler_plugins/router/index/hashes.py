# SPDX-License-Identifier: Apache-2.0
"""The name of a block of KV: a 64-bit hash of its tokens and all tokens before them.

Engines' own names of blocks depend on their version, hash function and seed. So the router hashes the token ids in
their events itself, in the same way as a prompt.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

Hashes = Sequence[int]
"""One hash for each block, in order."""

HASH_BYTES = 8
TOKEN_BYTES = 4
MOST_TOKEN = (1 << 32) - 1


def block_hashes(
    tokens: bytes,
    block_tokens: int,
    extras: Sequence[bytes] = (),
    parent: int | None = None,
) -> Hashes:
    """Hashes of the whole blocks of `tokens`.

    Args:
        tokens: token ids, little-endian, `TOKEN_BYTES` each (`token_bytes`).
        block_tokens: tokens of one block. Blocks of another size have other hashes.
        extras: for each of the first blocks, further data that must agree for the block to be shared (`extra_bytes`);
            empty: none.
        parent: hash of the block before; None: these are the first blocks.
    """
    digest = block_tokens if parent is None else parent
    step = TOKEN_BYTES * block_tokens
    count = len(tokens) // step
    hashes = list[int]()
    view = memoryview(tokens)
    for n in range(count):
        if n < len(extras) and extras[n]:
            digest = xxh3_64_intdigest(extras[n], digest)
        digest = xxh3_64_intdigest(view[n * step : (n + 1) * step], digest)
        hashes.append(digest)
    return hashes


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids in the form that `block_hashes` takes.

    Raises:
        ValueError: an element is not a token id.
    """
    try:
        ids = array("I", tokens)
    except (OverflowError, TypeError):
        raise ValueError(f"a token id is not an integer between 0 and {MOST_TOKEN}") from None
    if sys.byteorder != "little":
        ids.byteswap()
    return ids.tobytes()


def token_list(tokens: bytes) -> list[int]:
    """The token ids of `token_bytes`' result."""
    ids = array("I", tokens)
    if sys.byteorder != "little":
        ids.byteswap()
    return ids.tolist()


def extra_bytes(keys: Sequence[Any] | None) -> bytes:
    """The data besides tokens that a block's KV depends on (LoRA adapter, cache salt, images), in canonical form."""
    if not keys:
        return b""
    try:
        return _ENCODER.encode(tuple(keys))
    except UnicodeEncodeError:
        return ascii(tuple(keys)).encode()  # an unpaired surrogate; no engine has such a key


def prompt_extras(adapter: str, salt: str) -> tuple[bytes, ...]:
    """The extras of a text prompt. vLLM has the adapter with every block, and the salt with the first block.

    The adapter's name in the first block is enough, because each hash covers all blocks before it.
    """
    first = extra_bytes([key for key in (adapter, salt) if key])
    return (first,) if first else ()


def text_hashes(digests: Sequence[bytes]) -> Hashes:
    """64-bit hashes from digests of 16 bytes (`admission.prompt.Prompt.chunks`)."""
    return [int.from_bytes(digest[:HASH_BYTES], "little") for digest in digests]


def packed(hashes: Hashes) -> bytes:
    """The hashes for another process: `HASH_BYTES` each, little-endian."""
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def unpacked(content: bytes) -> Hashes:
    """The hashes of `packed`'s result. A rest shorter than a hash is left out."""
    count = len(content) // HASH_BYTES
    return struct.unpack_from(f"<{count}Q", content)


_ENCODER = msgspec.msgpack.Encoder()
