# SPDX-License-Identifier: Apache-2.0
"""KV between mock engines: the time when it is computed, and its transfer time. No KV moves."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import NamedTuple

import aiohttp
from aiohttp import web

from pd_connector.agent.metrics import PREFIX
from scheduler_plugins.sim.links import Network

KV = "/mock/kv"
CHUNK_TOKENS = 256
"""Tokens of a chunk, for the counts only."""
_WAIT_S = 300.0
_KEPT = 10_000


class Arrived(NamedTuple):
    """The KV of a prompt, as a decode engine would get it."""

    transfer_s: float
    tokens: int
    early: bool  # asked for before it was computed


class Moved:
    """Counts of the KV that would move, by the names of PDConnector's metrics."""

    def __init__(self, network: Network) -> None:
        self._network = network
        # From the start, as an engine with PDConnector: the router warns of a decode engine that has none.
        self._counts: Counter[str] = Counter({"received_transfers_total{": 0})

    def sent(self, tokens: int, *, early: bool) -> None:
        """Count a prompt whose KV was offered to a decode engine. `early`: the engine asked before it was computed."""
        chunks = -(-tokens // CHUNK_TOKENS)
        self._counts["sent_chunks_total{"] += chunks
        # The last chunk of a prompt leaves when the prompt is computed.
        self._counts["early_chunks_total{"] += (chunks - 1) * early
        self._counts["sent_bytes_total{"] += round(tokens * self._network.kv_bytes_per_token)

    def received(self, arrived: Arrived, producer: str) -> None:
        """The KV of a prompt would have arrived from `producer` (HOST:PORT)."""
        chunks = -(-arrived.tokens // CHUNK_TOKENS)
        nbytes = round(arrived.tokens * self._network.kv_bytes_per_token)
        early = (chunks - 1) * arrived.early
        self._counts["received_bytes_total{"] += nbytes
        self._counts["received_chunks_total{"] += chunks
        pair = f'producer="{producer}",'
        self._counts[f'pair_bytes_total{{codec="raw",{pair}'] += nbytes
        self._counts[f'pair_chunks_total{{prompt="computing",{pair}'] += early
        self._counts[f'pair_chunks_total{{prompt="computed",{pair}'] += chunks - early
        self._counts[f'pair_transfers_total{{result="received",{pair}'] += 1
        self._counts["received_transfers_total{"] += 1
        self._counts['asked_transfers_total{codec="raw",'] += 1
        self._counts['handoffs_total{cause="handed_over",'] += 1

    def render(self, labels: str) -> str:
        """Prometheus' text. `labels` are the engine's."""
        rows = (f"{PREFIX}{name}{labels}}} {count}\n" for name, count in self._counts.items())
        return "".join(rows)


class Transfers:
    """KV that a mock prefill engine has computed for other engines. Used on one event loop."""

    def __init__(self, moved: Moved) -> None:
        self._moved = moved
        self._futures: dict[str, asyncio.Future[dict[str, float]]] = {}

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
                computed = await asyncio.shield(future)
        except TimeoutError:
            return web.json_response({"error": "no such transfer"}, status=404)
        self._moved.sent(int(computed["tokens"]), early=waited)
        return web.json_response(
            {**computed, "prefill_s": computed["prefill_s"] if waited else 0.0}
        )

    def _of(self, transfer: str) -> asyncio.Future[dict[str, float]]:
        if transfer not in self._futures:
            while len(self._futures) >= _KEPT:
                del self._futures[next(iter(self._futures))]
            self._futures[transfer] = asyncio.get_running_loop().create_future()
        return self._futures[transfer]


async def arrival(
    session: aiohttp.ClientSession, source: str, transfer: str, network: Network
) -> Arrived:
    """Wait until `source` (HOST:PORT) has computed the KV."""
    async with session.get(f"http://{source}{KV}/{transfer}") as answer:
        computed = await answer.json()
        if answer.status != 200:
            raise web.HTTPBadGateway(text=f"no KV: {computed}")
    tokens, early = int(computed["tokens"]), computed["prefill_s"] > 0
    size = network.exposed_bytes(tokens, computed["prefill_s"])
    if not early:
        size = tokens * network.kv_bytes_per_token
    return Arrived(network.latency_s + size / network.bytes_per_s, tokens, early)
