# SPDX-License-Identifier: Apache-2.0
"""SGLang's requests in our terms: which transfer, and whose KV."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from pd_connector.errors import PDConnectorError
from pd_connector.kv.identity import token_fingerprint

_BESIDE_TOKENS = ("input_embeds", "positional_embed_overrides", "multi_item_delimiter_indices")
"""What SGLang computes a prompt from beside its token ids, which are made up where there are embeddings."""


def transfer_of(room: int) -> str:
    """The transfer's name: the same on every engine that is given this room."""
    return str(room)


_RETRACTIONS = "pd_connector_retractions"
_MOST_REPLICAS = 720720  # a multiple of all numbers up to 16


def room_after_retraction(req: Any) -> int:
    """The room for the KV of a request that SGLang has retracted: the old one's transfer has ended. All ranks find the same one, and
    the same replica of a prefill engine has it, which SGLang chooses by the room."""
    count = getattr(req, _RETRACTIONS, 0) + 1
    setattr(req, _RETRACTIONS, count)
    name = f"{req.bootstrap_room}/{count}".encode()
    drawn = int.from_bytes(blake2b(name, digest_size=8).digest()) >> 2
    room: int = drawn - drawn % _MOST_REPLICAS + req.bootstrap_room % _MOST_REPLICAS
    return max(1, room)


def fingerprint(req: Any, tokens: Sequence[int], adapter: str) -> bytes:
    """What the KV of these tokens of a request depends on. SGLang's `extra_key` says the same of its own
    radix cache, but with ids that only this process has.

    Args:
        adapter: name and content of its adapter; empty for none.

    Raises:
        PDConnectorError: its token ids do not say what the prompt is.
    """
    if told := [name for name in _BESIDE_TOKENS if getattr(req, name, None) is not None]:
        raise PDConnectorError(f"a prompt with {told[0]}: only token prompts are moved")
    return token_fingerprint(tokens, salt=req.cache_salt or "", adapter=adapter)
