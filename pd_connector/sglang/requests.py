# SPDX-License-Identifier: Apache-2.0
"""SGLang's requests in our terms: the transfer's name, and the identity of the KV."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from pd_connector.errors import PDConnectorError
from pd_connector.kv.identity import token_fingerprint

_BESIDE_TOKENS = ("input_embeds", "positional_embed_overrides", "multi_item_delimiter_indices")
"""Inputs of a prompt beside its token ids. With embeddings, the token ids are placeholders."""


def transfer_of(room: int) -> str:
    """The transfer's name. It is the same on every engine that is given this room."""
    return str(room)


_RETRACTIONS = "pd_connector_retractions"
_MOST_REPLICAS = 720720  # a multiple of all numbers up to 16


def room_after_retraction(req: Any) -> int:
    """The room for the KV of a request that SGLang has retracted; the old room's transfer has ended. All ranks
    compute the same room. SGLang chooses the prefill engine's replica by the room, and the replica stays the same."""
    count = getattr(req, _RETRACTIONS, 0) + 1
    setattr(req, _RETRACTIONS, count)
    name = f"{req.bootstrap_room}/{count}".encode()
    drawn = int.from_bytes(blake2b(name, digest_size=8).digest()) >> 2
    room: int = drawn - drawn % _MOST_REPLICAS + req.bootstrap_room % _MOST_REPLICAS
    return max(1, room)


def fingerprint(req: Any, tokens: Sequence[int], adapter: str) -> bytes:
    """Fingerprint of everything that KV of these tokens of a request depends on. SGLang's `extra_key` does the same for
    its radix cache, but with ids that only this process knows.

    Args:
        adapter: name and content of its adapter; empty for none.

    Raises:
        PDConnectorError: its token ids do not define the prompt.
    """
    if given := [name for name in _BESIDE_TOKENS if getattr(req, name, None) is not None]:
        raise PDConnectorError(f"a prompt with {given[0]}: only token prompts are moved")
    return token_fingerprint(tokens, salt=req.cache_salt or "", adapter=adapter)
