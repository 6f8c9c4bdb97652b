# SPDX-License-Identifier: Apache-2.0
"""The end of a stream that broke off: whether its last tokens form a whole character."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.handoff.prompt_ids import text_of
from scheduler_plugins.router.request.resume import UNFINISHED_CHARACTER, StreamRecord
from scheduler_plugins.router.request.resume_tokens import TokenRecord
from scheduler_plugins.router.request.shared import Shared

MOST_PARTS = 3
"""Most tokens of half a character: a whole character has at most four bytes."""


async def cut_to_whole_characters(
    record: StreamRecord | TokenRecord,
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
