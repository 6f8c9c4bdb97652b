# SPDX-License-Identifier: Apache-2.0
"""SGLang's requests in our terms: which transfer, and whose KV."""

from typing import Any

from pd_connector.errors import PDConnectorError
from pd_connector.kv.identity import token_fingerprint

_BESIDE_TOKENS = ("input_embeds", "positional_embed_overrides", "multi_item_delimiter_indices")
"""What SGLang computes a prompt from beside its token ids, which are made up where there are embeddings."""


def transfer_of(room: int) -> str:
    """The transfer's name: the same on every engine that is given this room."""
    return str(room)


def fingerprint(req: Any, adapter: str) -> bytes:
    """What the KV of a request's prompt depends on. SGLang's `extra_key` says the same of its own
    radix cache, but with ids that only this process has.

    Args:
        adapter: name and content of its adapter; empty for none.

    Raises:
        PDConnectorError: its token ids do not say what the prompt is.
    """
    if told := [name for name in _BESIDE_TOKENS if getattr(req, name, None) is not None]:
        raise PDConnectorError(f"a prompt with {told[0]}: only token prompts are moved")
    return token_fingerprint(req.origin_input_ids, salt=req.cache_salt or "", adapter=adapter)
