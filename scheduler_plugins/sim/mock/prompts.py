# SPDX-License-Identifier: Apache-2.0
"""Token ids and block hashes of a prompt, without a tokenizer."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from scheduler_plugins.admission.prompt import prompt_of

BYTES_PER_TOKEN = 4
_ID_BYTES = 8


def token_ids(body: Mapping[str, Any]) -> list[int]:
    """The token ids of the first prompt of a request: the given ids, otherwise one per 4 bytes of text. Never empty."""
    prompt = prompt_of(body)
    data = prompt.data
    if prompt.ids:
        ids = array("q")
        ids.frombytes(data[: len(data) // _ID_BYTES * _ID_BYTES])
        return list(ids) or [0]
    return text_ids(data)


def text_ids(data: bytes) -> list[int]:
    """One id per 4 bytes of text; the last piece may be shorter. Ids are below 2**31. Never empty."""
    ids = [
        int.from_bytes(data[at : at + BYTES_PER_TOKEN], "little") & 0x7FFFFFFF
        for at in range(0, len(data), BYTES_PER_TOKEN)
    ]
    return ids or [0]


def block_hashes(ids: Sequence[int], block_tokens: int) -> list[int]:
    """One hash per whole block, which stands for the prompt up to the block's end. 64 bits, unsigned."""
    hashes, previous = list[int](), b"\0" * 8
    for end in range(block_tokens, len(ids) + 1, block_tokens):
        block = array("q", ids[end - block_tokens : end]).tobytes()
        previous = blake2b(block, digest_size=8, key=previous).digest()
        hashes.append(int.from_bytes(previous, "big"))
    return hashes
