# SPDX-License-Identifier: Apache-2.0
"""`GET /`: a live page with what is wrong, the last 15 minutes, and the engines with their load and KV."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from scheduler_plugins.router.client.answers import UNBUFFERED
from scheduler_plugins.router.endpoints.diagnostics import troubles
from scheduler_plugins.router.endpoints.trends import overflow, recent, trends
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.engine_set import handoffs_of
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.engines.traffic import FromProducer
from scheduler_plugins.router.request.shared import Shared

MOST_SHOWN = 32
"""Most rows: the busiest pairs. A page with all pairs of a large deployment would say less."""


def pairs(engines: Iterable[BackendEngine]) -> list[dict[str, Any]]:
    """A row for each pair that has moved KV, the busiest first. Rates are current; shares count from the decode
    engine's start. A prefill engine that this router does not know is shown by its address at the decode engine."""
    listed = list(engines)
    urls = {
        peer.source.label: engine.url
        for engine in listed
        for address in engine.addresses
        for peer in address.peers
    }
    by_pair: dict[tuple[str, str], list[FromProducer]] = defaultdict(list)
    for engine in listed:
        for producer, got in engine.traffic.producers.items():
            by_pair[urls.get(producer, producer), engine.url].append(got)
    rows = [row_of(prefill, decode, parts) for (prefill, decode), parts in by_pair.items()]
    rows.sort(key=lambda row: (-row["bytes_s"], -row["transfers"], row["prefill"], row["decode"]))
    return rows[:MOST_SHOWN]


def row_of(prefill: str, decode: str, parts: list[FromProducer]) -> dict[str, Any]:
    """The sums over a prefill engine's ranks."""
    codecs: dict[str, float] = defaultdict(float)
    for part in parts:
        for codec, nbytes in part.codecs.items():
            codecs[codec] += nbytes

    def total(name: str) -> float:
        return float(sum(getattr(part, name) for part in parts))

    return {
        "prefill": prefill,
        "decode": decode,
        "bytes_s": round(total("bytes_s")),
        "codecs": dict(codecs),
        "chunks": total("chunks"),
        "early_chunks": total("early_chunks"),
        "transfers": total("transfers"),
        "failed": total("failed"),
    }


EVENTS = "/live"
EVERY_S = 1.0
MOST_WATCHERS = 20
"""Most open pages, counted apart with and without the operator's token. Each page costs the router some time."""
_LONGEST_S = 1e6
"""Longest queue that is shown. JSON has no infinity."""
_SOFTWARE = {None: "", Kind.VLLM: "vLLM", Kind.SGLANG: "SGLang"}
_FOLDER = Path(__file__).parent
_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", **UNBUFFERED}


def _assembled() -> tuple[str, str]:
    """The page in one file, and its policy: it runs its own script only, and loads nothing but the events."""
    style = (_FOLDER / "page.css").read_text()
    script = "".join((_FOLDER / name).read_text() for name in ("page.js", "page_engines.js"))
    html = (_FOLDER / "page.html").read_text()
    html = html.replace("/* page.css */", style).replace("/* page.js */", script)
    rules = {
        "default-src": "'none'",
        "style-src": _hash(style),
        "script-src": _hash(script),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return html, "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


_PAGE, _POLICY = _assembled()


async def page(request: web.Request) -> web.StreamResponse:
    """The page, complete in one file. It loads nothing from other hosts."""
    headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
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
            drawn: Any = None
            while not self._ended.is_set():
                content = state(shared, asyncio.get_running_loop().time())
                if content["trends"] == drawn:
                    del content["trends"]  # the page keeps them
                else:
                    drawn = content["trends"]
                text = json.dumps(content)
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
    facts = engine.role_state.describe(engine.role)
    return ", ".join(f"{name}: {_words(facts[name])}" for name in facts)


def _words(value: Any) -> str:
    return " or ".join(value) if isinstance(value, list) else str(value)


def _about(engine: BackendEngine) -> str:
    """Model, engine and version, such as `Qwen3-8B, vLLM 0.32.0`."""
    software = f"{_SOFTWARE[engine.kind]} {engine.about.version}".strip()
    return ", ".join(part for part in (engine.about.model, software) if part)


def _state_of(engine: BackendEngine, health: dict[str, Any]) -> str:
    """One word for whether the engine gets requests."""
    if engine.draining:
        return "draining"
    if not engine.up:
        return str(health.get("state", "down"))
    return "moving" if engine.role_state.moving else "paused" if engine.circuit.cause else "up"


def _shown(engine: BackendEngine, health: dict[str, Any], now_s: float) -> dict[str, Any]:
    """One engine as the page shows it. `health`: its state as `/health` shows it."""
    traffic, cache = engine.traffic, health.get("cache", {})
    return {
        "url": engine.url,
        "role": health.get("role", engine.role),
        "state": _state_of(engine, health),
        "why": engine.warning or engine.reason,
        "about": _about(engine),
        "transports": traffic.transports,
        "pool_problem": engine.about.pool_problem,
        "weights": engine.about.weights,
        "role_why": _role_why(engine),
        "group": engine.role_state.place.group,
        "away": engine.role_state.place.home not in (None, engine.role),
        "pinned": engine.role_state.pinned,
        "requests": engine.in_flight,
        "queued_s": round(min(engine.queued_s(now_s), _LONGEST_S), 3),
        "batch": engine.batch,
        "context": engine.context,
        "cache_used": traffic.cache_used,
        "cached_blocks": cache.get("blocks", 0),
        "cache_known_by": cache.get("source", ""),
        "sent_bytes_s": round(traffic.sent_bytes_s),
        "received_bytes_s": round(traffic.received_bytes_s),
        "leased_pages": round(traffic.leased_pages),
        "pool": cache.get("pool", ""),
        "pool_chunks": cache.get("pool_chunks", 0),
        "pool_bytes_s": round(traffic.pool_bytes_s),
    }


def state(shared: Shared, now_s: float) -> dict[str, Any]:
    """The content of the page: what is wrong, the last minutes, and each engine as policies see it."""
    pool = shared.pool
    health = {state["url"] + state["role"]: state for state in pool.describe()}
    beats = shared.metrics.pulse.beats(now_s)
    sums = recent(beats, now_s)
    late = overflow(beats, now_s)
    diagnostics = troubles(pool.engines, pool.decisions, sums, late, now_s)
    return {
        "policy": shared.config.route_policy,
        "waiting": shared.front.waiting,
        "handoffs": handoffs_of(pool.engines),
        "troubles": [diagnostic._asdict() for diagnostic in diagnostics],
        "trends": trends(beats, now_s),
        "recent": msgspec.to_builtins(sums),
        "pairs": pairs(pool.engines),
        "decisions": [
            {**decision._asdict(), "key": str(decision.at_s), "at_s": round(now_s - decision.at_s)}
            for decision in pool.decisions
        ],
        "engines": [
            _shown(engine, health.get(engine.url + engine.role, {}), now_s)
            for engine in pool.engines
        ],
    }
