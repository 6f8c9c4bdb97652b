# SPDX-License-Identifier: Apache-2.0
"""SGLang's requests in our terms: which transfer, and whose KV."""

from http import HTTPStatus
from typing import Any

from pd_connector.errors import PDConnectorError
from pd_connector.kv.identity import token_fingerprint

MAX_ROOM = (1 << 63) - 1
"""Largest `bootstrap_room`: what fits in a signed 64-bit integer."""

_BESIDE_TOKENS = ("input_embeds", "positional_embed_overrides", "multi_item_delimiter_indices")
"""What SGLang computes a prompt from beside its token ids, which are made up where there are embeddings."""


def transfer_of(room: int) -> str:
    """The transfer's name: the same on every engine that is given this room."""
    return str(room)


def room_problem(room: Any) -> str:
    """Why a request cannot have this room; empty where it can. Room 0 means "none" to SGLang."""
    if isinstance(room, int) and 0 < room <= MAX_ROOM:
        return ""
    return f"bootstrap_room {room!r}: must be a whole number from 1 to {MAX_ROOM}"


def host_problem(host: Any) -> str:
    """Why a decode engine cannot ask this host (`bootstrap_host`) for KV; empty where it can be tried.
    SGLang makes an address of it, and what that raises would end the engine."""
    if isinstance(host, str) and host:
        return ""
    return f"bootstrap_host {host!r}: must be the name or address of the prefill engine's host"


def reject(req: Any, problem: str, scheduler: Any) -> None:
    """End a request that has not come into a queue, with status 400. It holds nothing yet."""
    from sglang.srt.disaggregation.utils import prepare_abort

    prepare_abort(req, problem, status_code=HTTPStatus.BAD_REQUEST)
    scheduler.output_streamer.stream_output([req], req.return_logprob)


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
