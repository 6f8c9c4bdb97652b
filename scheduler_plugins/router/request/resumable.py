# SPDX-License-Identifier: Apache-2.0
"""Whether a request allows its stream to go on at another engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from scheduler_plugins.router.handoff.engine_bodies import has_inputs
from scheduler_plugins.router.prompt.body import GENERATE
from scheduler_plugins.router.prompt.transfer import why_not_disaggregated
from scheduler_plugins.router.request.client_request import ParsedRequest
from scheduler_plugins.router.request.resume import StreamRecord
from scheduler_plugins.router.request.resume_tokens import TokenRecord

# A second engine sees the sent tokens as a part of the prompt, so these fields would act differently there.
_NOT_RESUMABLE = (
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
    "extra_args",
    "trace_decode_token_ids",
)
_LOGPROBS = ("logprobs", "top_logprobs", "logprob_token_ids")
"""Those of texts count the text before them. Those of token ids stand for themselves."""
_ZERO_IS_ASKED_FOR = ("seed", "logprobs")


def record_of(asked: ParsedRequest) -> StreamRecord | TokenRecord | None:
    """Notes the sent part of the request's stream; None if no other engine can go on with it."""
    ids = asked.path == GENERATE and asked.body.get("output_mode") != "text"
    if asked.one_engine or not resumable(asked.fields, but=_LOGPROBS if ids else ()):
        return None
    return (
        TokenRecord(asked.body) if asked.path == GENERATE else StreamRecord(asked.body, asked.path)
    )


def resumable(fields: Mapping[str, Any], but: Collection[str] = ()) -> bool:
    """Whether another engine can go on with this request's stream: greedy, or sampled without a seed.

    Args:
        fields: the request `as_completion`.
        but: fields that do not matter.
    """
    if not fields.get("stream") or why_not_disaggregated(fields) is not None:
        return False
    zeros = (type(fields.get(name)) is int for name in _ZERO_IS_ASKED_FOR if name not in but)
    if has_inputs(fields) or any(zeros):
        return False  # token ids stand for text only
    return not any(fields.get(name) for name in (*_NOT_RESUMABLE, *_LOGPROBS) if name not in but)
