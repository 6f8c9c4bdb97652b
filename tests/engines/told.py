# SPDX-License-Identifier: Apache-2.0
"""Requests of which both engines are told at once, as our router does it, in two hands: a test can
hold one of them back, or take it away."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from harness import (
    TWO_STEP_PARAMS,
    Answer,
    Prompt,
    Service,
    completion,
    fresh_salt,
)
from pairs import (
    Pair,
)

PREFILL_ANSWER_S = 300.0


class Halves(NamedTuple):
    """What the two engines are told of one request."""

    prefill: Mapping[str, Any]
    decode: Mapping[str, Any]


def halves(p: Service) -> Halves:
    """Keyword arguments of `completion` for the prefill and the decode engine."""
    describe = {**TWO_STEP_PARAMS, "describe": True}
    address = completion(p, "a", 1, kv_transfer_params=describe).kv_transfer_params
    transfer, salt = uuid.uuid4().hex, fresh_salt()
    theirs = {**TWO_STEP_PARAMS, "transfer_id": transfer}
    ours = {
        **address,
        "describe": False,
        "do_remote_prefill": True,
        "remote_request_id": transfer,
        "remote_block_ids": None,
    }
    return Halves(
        {"cache_salt": salt, "kv_transfer_params": theirs},
        {"cache_salt": salt, "kv_transfer_params": ours},
    )


def told_at_once(pair: Pair, prompt: Prompt, max_tokens: int = 32) -> Answer:
    """A whole request; the prefill engine's half has been answered, too."""
    prefill, decode = halves(pair.p)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(completion, pair.p, prompt, 1, **prefill)
        answer = completion(pair.d, prompt, max_tokens, **decode)
        first.result(PREFILL_ANSWER_S)
    return answer
