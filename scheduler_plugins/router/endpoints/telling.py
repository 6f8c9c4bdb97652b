# SPDX-License-Identifier: Apache-2.0
"""The endpoints that tell of the engines and of the router: the model list, health, metrics, the live page's events."""

import uuid

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from scheduler_plugins.router.client.answers import REQUEST_ID, headers_to_client
from scheduler_plugins.router.client.doors import passed_headers
from scheduler_plugins.router.endpoints.app_keys import BACKEND, LIVE, METRICS, SHARED
from scheduler_plugins.router.endpoints.refusals import unavailable
from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.exchange import (
    EngineCall,
    EngineFailedError,
    ResponseTimeouts,
    exchange,
)
from scheduler_plugins.router.routing.attempt import UnavailableError

MODELS = "/v1/models"


async def models(request: web.Request) -> web.StreamResponse:
    """The model list of any engine that is up, decode side first."""
    shared = request.app[SHARED]
    config = shared.config
    request_id = request.headers.get(REQUEST_ID) or uuid.uuid4().hex
    call = EngineCall("GET", MODELS, passed_headers(request, request_id, config))
    timeouts = ResponseTimeouts(config.probe_timeout_s, config.idle_timeout_s)
    failed: dict[BackendEngine, EngineFailedError] = {}
    for engine in shared.pool.up(Role.DECODE) + shared.pool.up(Role.PREFILL):
        try:
            async with exchange(shared.connections, engine, call, timeouts, config) as answer:
                if answer.status >= 500:
                    raise EngineFailedError(f"status_{answer.status}", f"{answer.status}")
                content = await answer.read_all()
                returned = headers_to_client(answer.headers, request_id)
                return web.Response(status=answer.status, headers=returned, body=content)
        except EngineFailedError as failure:
            shared.pool.report_failure(engine, failure)
            failed[engine] = failure
    engines = [
        (engine, failed[engine].cause, str(failed[engine]))
        if engine in failed
        else (engine, "down", engine.reason)
        for engine in shared.pool.engines
    ]
    return unavailable(UnavailableError(engines), config, request_id)


async def health(request: web.Request) -> web.StreamResponse:
    """200 when at least one engine can serve, with the state of all."""
    pool = request.app[SHARED].pool
    decode, prefill = pool.up(Role.DECODE), pool.up(Role.PREFILL)
    serves = bool(decode or prefill)
    state = {
        "status": "ok" if serves else "unavailable",
        "disaggregates": bool(decode) and any(engine.address for engine in prefill),
        "tokens": request.app[SHARED].tokens.source,
        "engines": pool.describe(),
    }
    return web.json_response(state, status=200 if serves else 503)


async def live(request: web.Request) -> web.StreamResponse:
    """What the page shows, every second."""
    return await request.app[LIVE].stream(request, request.app[SHARED])


async def metrics(request: web.Request) -> web.StreamResponse:
    """Prometheus' text format."""
    text = await request.app[BACKEND].render(request.app[METRICS])
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})
