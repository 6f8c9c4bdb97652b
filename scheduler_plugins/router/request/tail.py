# SPDX-License-Identifier: Apache-2.0
"""The end of a stream that broke off: whether its last tokens are a whole character."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.exchange import EngineFailedError
from scheduler_plugins.router.handoff.prompt_ids import text_of
from scheduler_plugins.router.request.resume import UNFINISHED_CHARACTER, StreamRecord
from scheduler_plugins.router.request.shared import Shared

MOST_PARTS = 3
"""Tokens of half a character, at most: a whole one has four bytes at most."""


async def cut_to_whole_characters(
    record: StreamRecord,
    engine: BackendEngine,
    shared: Shared,
    headers: Mapping[str, str],
    model: Any,
) -> bool:
    """Let the record end with a whole character: its text was sent, and that of half a one behind it was not.

    An engine whose prompt ends with half a character says the whole prompt again (vLLM 0.32).

    Args:
        engine: has the tokenizer.
        model: as the client names it.

    Returns:
        Whether that could be told.
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
