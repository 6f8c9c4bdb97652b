# SPDX-License-Identifier: Apache-2.0
"""Asks the decode engine for a prompt's token ids, and for the text of token ids."""

import json
from collections.abc import Mapping
from typing import Any

from scheduler_plugins.router.engines.connections import EngineConnections
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.exchange import (
    EngineCall,
    ResponseTimeouts,
    exchange,
    raise_for_status,
)
from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.handoff.engine_bodies import tokenize_body
from scheduler_plugins.router.prompt import body
from scheduler_plugins.router.settings.config import RouterConfig

TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
DETOKENIZE_S = 2.0
"""Longest wait for a text. The client's stream pauses meanwhile."""


async def prompt_ids(
    connections: EngineConnections,
    engine: BackendEngine,
    request: Mapping[str, Any],
    headers: Mapping[str, str],
    config: RouterConfig,
) -> list[int]:
    """The token ids of the request's prompt.

    Raises:
        RefusedError: the engine refuses the prompt.
        EngineFailedError: the engine does not answer, or answers without ids.
    """
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]  # a list with one prompt
        request = {**request, "prompt": prompt}
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    question = body.encode(tokenize_body(request, engine.kind or Kind.VLLM))
    call = EngineCall("POST", TOKENIZE, headers, question)
    timeouts = ResponseTimeouts(config.first_byte_timeout_s, config.idle_timeout_s)
    async with exchange(connections, engine, call, timeouts, config) as answer:
        await raise_for_status(answer, only=200)
        return _ids(await answer.read_all())


def _ids(raw: bytes) -> list[int]:
    try:
        ids = json.loads(raw)["tokens"]
    except (KeyError, TypeError, ValueError, RecursionError):
        ids = None
    if not (isinstance(ids, list) and ids and all(type(token) is int for token in ids)):
        raise EngineFailedError("malformed", f"{TOKENIZE} answered without the prompt's ids")
    return ids


async def text_of(
    connections: EngineConnections,
    engine: BackendEngine,
    ids: list[int],
    headers: Mapping[str, str],
    config: RouterConfig,
    model: Any = None,
) -> str:
    """The text of token ids, including special tokens.

    Args:
        model: the model's name, as the client gave it.

    Raises:
        EngineFailedError: the engine does not answer with a text.
    """
    named = {} if model is None else {"model": model}
    call = EngineCall("POST", DETOKENIZE, headers, body.encode({**named, "tokens": ids}))
    timeouts = ResponseTimeouts(DETOKENIZE_S, DETOKENIZE_S)
    async with exchange(connections, engine, call, timeouts, config) as answer:
        await raise_for_status(answer, only=200)
        raw = await answer.read_all()
    try:
        text = json.loads(raw)["prompt"]
    except (KeyError, TypeError, ValueError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise EngineFailedError("malformed", f"{DETOKENIZE} answered without a text")
    return text
