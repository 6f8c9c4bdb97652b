# SPDX-License-Identifier: Apache-2.0
"""Keys of chunks: which KV a chunk of the pool holds.

A prompt's whole chunks form a chain. The root is hashed over the model, the adapter and the salt. Each key is hashed
over its parent's key, the chunk's tokens, and the inputs that begin in the chunk. So a key stands for everything that
the chunk's KV depends on, and a prompt's chunks are found in order. No path, rank, page size, dtype or hash seed is
in it.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pd_connector.kv.model import ModelFacts

CHUNK_TOKENS = 128
TOKEN_BYTES = 4
CHUNK_BYTES = CHUNK_TOKENS * TOKEN_BYTES
"""Bytes of a chunk's token ids: little-endian words of 32 bits."""
KEY_BYTES = 32

_FORMAT = 1
"""Version of the keys. Chunks of another version are never found."""


class Input(NamedTuple):
    """An image, or another input that stands behind placeholder tokens.

    Attributes:
        content: its content hash.
        offset: its first placeholder token in the prompt.
    """

    content: str
    offset: int


def model_root(facts: ModelFacts) -> bytes | None:
    """The model's part of all keys; None while its weights are not known: then no chunk can be read or written. Weights
    that were changed in place are known only by their `version`."""
    weights: tuple[str, ...]
    if facts.reading:
        return None
    if facts.version:
        weights = ("version", facts.version)
    elif facts.updates:
        return None
    elif facts.weights:
        weights = ("disk", facts.weights.hex())
    elif facts.loaded:
        weights = ("loaded", facts.loaded.hex(), facts.held)
    else:
        return None
    return _digest(b"pd-pool-model", facts.config.hex(), facts.model_id, *weights)


def salt_digest(salt: str) -> bytes:
    """Hash of a request's cache salt, for records and roots. The salt itself may be a secret."""
    return _digest(b"pd-pool-salt", salt)


def root(model: bytes, *, adapter: str = "", salt: str = "") -> bytes:
    """The parent of a prompt's first chunk.

    Args:
        model: from `model_root`.
        adapter: fingerprint of the content of the adapter (LoRA) in use, without its name; empty for none.
        salt: the request's cache salt.
    """
    return _digest(
        b"pd-pool-root",
        str(_FORMAT),
        str(CHUNK_TOKENS),
        model.hex(),
        adapter,
        salt_digest(salt).hex(),
    )


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian words of 32 bits.

    Raises:
        OverflowError: an id does not fit.
    """
    words = array("i", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def inputs_digest(inputs: Iterable[Input], number: int) -> bytes:
    """Digest of the inputs that begin in the prompt's chunk of this number; empty if there are none. An input counts
    in later chunks through their parent."""
    first = number * CHUNK_TOKENS
    here = sorted(each for each in inputs if first <= each.offset < first + CHUNK_TOKENS)
    if not here:
        return b""
    parts = (part for each in here for part in (str(each.offset), each.content))
    return _digest(b"pd-pool-inputs", *parts)


def link(parent: bytes, tokens: bytes | memoryview, inputs: bytes = b"") -> bytes:
    """The key of one chunk.

    Args:
        parent: the key of the chunk before it, or the root.
        tokens: `CHUNK_BYTES` bytes, from `token_bytes`.
        inputs: from `inputs_digest`.
    """
    digest = hashlib.blake2b(parent, digest_size=KEY_BYTES, person=b"pd-pool-chunk")
    digest.update(tokens)
    digest.update(inputs)
    return digest.digest()


def extend(
    parent: bytes, tokens: Sequence[int], inputs: Sequence[Input] = (), *, first_chunk: int = 0
) -> list[bytes]:
    """Keys of the whole chunks that follow a chunk.

    Args:
        parent: key of the chunk before `first_chunk`, or the root if that is 0.
        tokens: ids of the prompt from chunk `first_chunk` on.
        inputs: inputs of the whole prompt, in any order.

    Raises:
        OverflowError: a token id has more than 32 bits.
    """
    data = memoryview(token_bytes(tokens))
    begins = {each.offset // CHUNK_TOKENS for each in inputs}
    keys = []
    for place in range(len(data) // CHUNK_BYTES):
        number = first_chunk + place
        here = inputs_digest(inputs, number) if number in begins else b""
        parent = link(parent, data[place * CHUNK_BYTES : (place + 1) * CHUNK_BYTES], here)
        keys.append(parent)
    return keys


def chain(
    model: bytes,
    tokens: Sequence[int],
    *,
    adapter: str = "",
    salt: str = "",
    inputs: Sequence[Input] = (),
) -> list[bytes]:
    """A key for each whole chunk of a prompt; see `root` and `extend`.

    >>> keys = chain(bytes(32), range(300))
    >>> len(keys), keys == chain(bytes(32), range(256))
    (2, True)
    """
    return extend(root(model, adapter=adapter, salt=salt), tokens, inputs)


def _digest(person: bytes, *parts: str) -> bytes:
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=person)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")  # JSON may carry lone surrogates
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()
