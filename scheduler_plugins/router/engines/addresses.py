# SPDX-License-Identifier: Apache-2.0
"""Where a vLLM engine hands KV over: it is asked, each data-parallel rank for itself."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping

from pd_connector.protocol.params import ProducerAddress
from scheduler_plugins.router.engines.exchange import EngineCall, EngineFailedError
from scheduler_plugins.router.engines.ranks import HEADER
from scheduler_plugins.router.prompt import body

Ask = Callable[[EngineCall], Awaitable[bytes]]
"""Sends a call to the engine; returns the body of its answer 200, and raises EngineFailedError for any other."""


async def addresses_of(
    ask: Ask, headers: Mapping[str, str], model: str, ranks: int
) -> tuple[ProducerAddress, ...]:
    """The address of each data-parallel rank behind the engine's URL; empty where it hands over nothing.

    Raises:
        EngineFailedError: it did not answer, or answered for other ranks than it was asked for.
    """
    question = body.encode(body.probe(model))
    found: list[ProducerAddress] = []
    # The first twice: an engine that heeds no such header sends requests to one rank after the other.
    for rank in (0, *range(ranks)) if ranks > 1 else (None,):
        named = {} if rank is None else {HEADER: str(rank)}
        raw = await ask(EngineCall("POST", body.COMPLETIONS, {**headers, **named}, question))
        address = body.address_in(decoded(raw))
        if address is None:
            return ()
        found.append(address)
    first, *found = found if ranks > 1 else found * 2
    if first != found[0] or len({address.engine_id for address in found}) < ranks:
        raise EngineFailedError(
            "status",
            f"its {ranks} data-parallel ranks cannot be told apart by {HEADER}: give each a URL of its own "
            "(--data-parallel-external-lb)",
        )
    return tuple(found)


def decoded(raw: bytes) -> object:
    """A JSON value. Raises EngineFailedError."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise EngineFailedError("status", "its answer is not JSON") from None
