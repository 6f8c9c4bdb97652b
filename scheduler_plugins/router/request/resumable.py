# SPDX-License-Identifier: Apache-2.0
"""Whether a request allows its stream to go on at another engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler_plugins.router.handoff.engine_bodies import has_inputs
from scheduler_plugins.router.prompt.transfer import why_not_disaggregated

# A second engine sees the sent tokens as a part of the prompt, so these fields would act differently there.
_NOT_RESUMABLE = (
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "seed",
    "stop",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_detection",  # looks at generated tokens, not at the prompt
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
    """Whether another engine can go on with this request's stream: greedy, or sampled without a seed."""
    if not body.get("stream") or why_not_disaggregated(body) is not None:
        return False
    if has_inputs(body) or any(type(body.get(name)) is int for name in _ZERO_IS_ASKED_FOR):
        return False  # token ids stand for text only
    return not any(body.get(name) for name in _NOT_RESUMABLE)
