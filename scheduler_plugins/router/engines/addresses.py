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
    if ranks < 2:
        address = await _address_of(ask, headers, model)
        return () if address is None else (address,)
    found: list[ProducerAddress] = []
    # The first twice: an engine that heeds no such header sends requests to one rank after the other.
    for rank in (0, *range(ranks)):
        address = await _address_of(ask, {**headers, HEADER: str(rank)}, model)
        if address is None:
            return ()
        found.append(address)
    again, *addresses = found
    if again != addresses[0] or len({address.engine_id for address in addresses}) < ranks:
        raise EngineFailedError(
            "status",
            f"its {ranks} data-parallel ranks cannot be told apart by {HEADER}: give each a URL of its own "
            "(--data-parallel-external-lb)",
        )
    return tuple(addresses)


async def _address_of(ask: Ask, headers: Mapping[str, str], model: str) -> ProducerAddress | None:
    question = body.encode(body.probe(model))
    raw = await ask(EngineCall("POST", body.COMPLETIONS, dict(headers), question))
    return body.address_in(decoded(raw))


def decoded(raw: bytes) -> object:
    """A JSON value. Raises EngineFailedError."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise EngineFailedError("status", "its answer is not JSON") from None
