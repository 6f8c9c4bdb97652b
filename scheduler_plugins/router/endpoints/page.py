# SPDX-License-Identifier: Apache-2.0
"""`GET /`: a live page with the engines and their load."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.engine_set import handoffs_of
from scheduler_plugins.router.request.shared import Shared

EVENTS = "/live"
EVERY_S = 1.0
MOST_WATCHERS = 20
"""Most open pages, counted apart with and without the operator's token. Each page costs the router some time."""
_PAGE = (Path(__file__).parent / "page.html").read_text()
_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}


async def page(request: web.Request) -> web.StreamResponse:
    """The page, complete in one file. It loads nothing from other hosts."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'"
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return web.Response(text=_PAGE, content_type="text/html", headers=headers)


class LiveState:
    """The stream of events that the page reads."""

    def __init__(self) -> None:
        self._watchers = {False: 0, True: 0}
        self._ended = asyncio.Event()

    async def end(self, app: web.Application) -> None:
        """End all streams, because an open page must not delay the end of the router."""
        self._ended.set()

    async def stream(
        self, request: web.Request, shared: Shared, *, is_operator: bool
    ) -> web.StreamResponse:
        """Send the state now and every second, until the browser leaves or the router ends.

        Pages without the token do not use up the operator's limit.
        """
        if self._watchers[is_operator] >= MOST_WATCHERS:
            return web.Response(status=503, text="too many pages watch this router")
        response = web.StreamResponse(headers=_HEADERS)
        self._watchers[is_operator] += 1
        try:
            await response.prepare(request)
            while not self._ended.is_set():
                text = json.dumps(state(shared, asyncio.get_running_loop().time()))
                await response.write(f"data: {text}\n\n".encode())
                with suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S):
                        await self._ended.wait()
            return response
        except OSError:
            return response  # the browser has left
        finally:
            self._watchers[is_operator] -= 1


def _role_why(engine: BackendEngine) -> str:
    """What is known of an engine's role, in words."""
    told = engine.standing.describe(engine.role)
    return ", ".join(f"{name}: {told[name]}" for name in told)


def state(shared: Shared, now_s: float) -> dict[str, Any]:
    """The content of the page: totals, and each engine as policies see it."""
    told = {one["url"] + one["role"]: one for one in shared.pool.describe()}
    engines = []
    for engine in shared.pool.engines:
        known = told.get(engine.url + engine.role, {})
        engines.append(
            {
                "url": engine.url,
                "role": known.get("role", engine.role),
                "state": "draining" if engine.draining else known.get("state", "down"),
                "why": engine.warning or engine.reason,
                "role_why": _role_why(engine),
                "requests": engine.in_flight,
                "queued_s": round(engine.queued_s(now_s), 3),
                "batch": engine.batch,
                "context": engine.context,
                "cached_blocks": known.get("cache", {}).get("blocks", 0),
                "cache_known_by": known.get("cache", {}).get("source", ""),
                "pool": known.get("cache", {}).get("pool", ""),
                "pool_chunks": known.get("cache", {}).get("pool_chunks", 0),
            }
        )
    return {
        "policy": shared.config.route_policy,
        "waiting": shared.front.waiting,
        "advice": shared.overflow.advice(now_s),
        "handoffs": handoffs_of(shared.pool),
        "decisions": [
            {**one._asdict(), "at_s": round(time.time() - one.at_s)}
            for one in shared.pool.decisions
        ],
        "engines": engines,
    }
