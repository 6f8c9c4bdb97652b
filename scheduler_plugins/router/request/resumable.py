# SPDX-License-Identifier: Apache-2.0
"""Whether a stream can go on at another engine, as far as its request says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler_plugins.router.handoff.engine_bodies import has_inputs
from scheduler_plugins.router.prompt.body import why_not_disaggregated

# What a second engine could not do alike: it sees the tokens sent so far as a part of the prompt.
_NOT_RESUMABLE = (
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "seed",
    "stop",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_detection",  # looks at what was generated, not at the prompt
    "tools",
    "functions",
    "response_format",
    "structured_outputs",
    "suffix",
    "logits_processors",
    "thinking_token_budget",
    "bad_words",
    "vllm_xargs",
)
_ZERO_IS_ASKED_FOR = ("seed", "logprobs")


def resumable(body: Mapping[str, Any]) -> bool:
    """Whether another engine could go on with this request's stream: greedy, or sampled without a seed."""
    if not body.get("stream") or why_not_disaggregated(body) is not None:
        return False
    if has_inputs(body) or any(type(body.get(name)) is int for name in _ZERO_IS_ASKED_FOR):
        return False  # ids stand for text alone
    return not any(body.get(name) for name in _NOT_RESUMABLE)
