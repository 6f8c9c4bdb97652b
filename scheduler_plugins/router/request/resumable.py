# SPDX-License-Identifier: Apache-2.0
"""Whether a stream can go on at another engine: its request allows it, and its sent part ends with a whole character."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.handoff.engine_bodies import has_inputs
from scheduler_plugins.router.handoff.prompt_ids import text_of
from scheduler_plugins.router.prompt.body import GENERATE
from scheduler_plugins.router.prompt.transfer import why_not_disaggregated
from scheduler_plugins.router.request.client_request import ParsedRequest
from scheduler_plugins.router.request.resume import UNFINISHED_CHARACTER, AnswerRecord, StreamRecord
from scheduler_plugins.router.request.resume_tokens import TokenRecord
from scheduler_plugins.router.request.shared import Shared

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


def record_of(parsed: ParsedRequest) -> AnswerRecord | None:
    """Notes the sent part of the request's stream; None if no other engine can go on with it."""
    ids = parsed.path == GENERATE and parsed.body.get("output_mode") != "text"
    if parsed.one_engine or not resumable(parsed.fields, but=_LOGPROBS if ids else ()):
        return None
    return (
        TokenRecord(parsed.body)
        if parsed.path == GENERATE
        else StreamRecord(parsed.body, parsed.path)
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


MOST_PARTS = 3
"""Most tokens of half a character: a whole character has at most four bytes."""


async def cut_to_whole_characters(
    record: AnswerRecord,
    engine: BackendEngine,
    shared: Shared,
    headers: Mapping[str, str],
    model: Any,
) -> bool:
    """Cut the record to whole characters. The text of a whole character was sent; the text of a half one was not.

    If a prompt ends with half a character, vLLM 0.32 repeats the whole prompt in its answer.

    Args:
        engine: an engine with the tokenizer.
        model: the model's name, as the client gave it.

    Returns:
        Whether the end could be determined.
    """
    tail = record.tail
    if not tail:
        return True
    try:
        for parts in range(min(MOST_PARTS + 1, len(tail))):
            ids = tail[: len(tail) - parts]
            text = await text_of(shared.connections, engine, ids, headers, shared.config, model)
            if not text.endswith(UNFINISHED_CHARACTER):
                record.keep_back(parts)
                return True
    except EngineFailedError:
        pass
    return False
