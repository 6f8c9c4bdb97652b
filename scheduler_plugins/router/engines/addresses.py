# SPDX-License-Identifier: Apache-2.0
"""Asks each data-parallel rank of a vLLM engine for its handover address."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping

from pd_connector.protocol.wire.params import ProducerAddress
from scheduler_plugins.router.engines.exchange import EngineCall
from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.engines.ranks import HEADER
from scheduler_plugins.router.prompt import body, transfer

Ask = Callable[[EngineCall], Awaitable[bytes]]
"""Sends a call to the engine. Returns the body of an answer 200; raises EngineFailedError for any other answer."""


async def addresses_of(
    ask: Ask, headers: Mapping[str, str], model: str, ranks: int
) -> tuple[ProducerAddress, ...]:
    """The address of each data-parallel rank behind the engine's URL; empty if the engine hands nothing over.

    Raises:
        EngineFailedError: the engine did not answer, or another rank answered than the one asked.
    """
    if ranks < 2:
        address = await _address_of(ask, headers, model)
        return () if address is None else (address,)
    found: list[ProducerAddress] = []
    # Rank 0 is asked twice. An engine that ignores the header sends the two requests to different ranks.
    for rank in (0, *range(ranks)):
        address = await _address_of(ask, {**headers, HEADER: str(rank)}, model)
        if address is None:
            return ()
        found.append(address)
    again, *addresses = found
    if again != addresses[0] or len({address.engine_id for address in addresses}) < ranks:
        raise EngineFailedError(
            "status",
            f"its {ranks} data-parallel ranks cannot be distinguished by {HEADER}: give each a URL of its own "
            "(--data-parallel-external-lb)",
        )
    return tuple(addresses)


async def _address_of(ask: Ask, headers: Mapping[str, str], model: str) -> ProducerAddress | None:
    question = body.encode(transfer.probe(model))
    raw = await ask(EngineCall("POST", body.COMPLETIONS, dict(headers), question))
    return transfer.address_in(decoded(raw))


def decoded(raw: bytes) -> object:
    """The JSON value in `raw`. Raises EngineFailedError if it is not JSON."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise EngineFailedError("status", "its answer is not JSON") from None
