# SPDX-License-Identifier: Apache-2.0
"""KV between mock engines: the time when it is computed, and its transfer time. No KV moves."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from scheduler_plugins.sim.links import Network

KV = "/mock/kv"
_WAIT_S = 300.0
_KEPT = 10_000


class Transfers:
    """KV that a mock prefill engine has computed for other engines. Used on one event loop."""

    def __init__(self) -> None:
        self._known: dict[str, asyncio.Future[dict[str, float]]] = {}

    def computed(self, transfer: str, tokens: int, prefill_s: float) -> None:
        """Note that the KV of a prompt is computed, and the seconds of its prefill."""
        future = self._of(transfer)
        if not future.done():
            future.set_result({"tokens": float(tokens), "prefill_s": prefill_s})

    async def tell(self, request: web.Request) -> web.Response:
        """Answers when the KV of a transfer is computed: its tokens, and the seconds of prefill
        that were streamed."""
        future = self._of(request.match_info["transfer"])
        waited = not future.done()
        try:
            async with asyncio.timeout(_WAIT_S):
                found = await asyncio.shield(future)
        except TimeoutError:
            return web.json_response({"error": "no such transfer"}, status=404)
        return web.json_response({**found, "prefill_s": found["prefill_s"] if waited else 0.0})

    def _of(self, transfer: str) -> asyncio.Future[dict[str, float]]:
        if transfer not in self._known:
            while len(self._known) >= _KEPT:
                del self._known[next(iter(self._known))]
            self._known[transfer] = asyncio.get_running_loop().create_future()
        return self._known[transfer]


async def transfer_s(
    session: aiohttp.ClientSession, source: str, transfer: str, network: Network
) -> float:
    """Wait until `source` (HOST:PORT) has computed the KV. Returns the seconds of its transfer."""
    async with session.get(f"http://{source}{KV}/{transfer}") as answer:
        found = await answer.json()
        if answer.status != 200:
            raise web.HTTPBadGateway(text=f"no KV: {found}")
    size = network.exposed_bytes(int(found["tokens"]), found["prefill_s"])
    if not found["prefill_s"]:
        size = found["tokens"] * network.kv_bytes_per_token
    return network.latency_s + size / network.bytes_per_s
