# SPDX-License-Identifier: Apache-2.0
"""The endpoints with information on engines and router: model list, health, metrics, events of the live page."""

from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from scheduler_plugins.router.client.answers import headers_to_client
from scheduler_plugins.router.client.client_auth import id_of, passed_headers
from scheduler_plugins.router.endpoints.app_keys import ADMIN_AUTH, LIVE, RENDER, SHARED
from scheduler_plugins.router.endpoints.refusals import error_response, unavailable
from scheduler_plugins.router.engines.completion import status_of
from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.engine_set import handoffs_of
from scheduler_plugins.router.engines.exchange import EngineCall, ResponseTimeouts, exchange
from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.engines.inquiry import PROBE_S
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.routing.attempt import UnavailableError

MODELS = "/v1/models"
PING = "/ping"
"""SageMaker's path for a health check."""


async def models(request: web.Request) -> web.StreamResponse:
    """The model lists of the engines that are up, decode side first; each model once."""
    shared, request_id = request.app[SHARED], id_of(request)
    failed: dict[BackendEngine, EngineFailedError] = {}
    first: web.Response | None = None
    listed: dict[str, Any] = {}
    for engine in _up(shared.pool):
        if first is not None and engine.models <= listed.keys():
            continue  # it adds no model
        try:
            response = await _forwarded(request, engine, MODELS, request_id)
        except EngineFailedError as failure:
            shared.pool.report_failure(engine, failure)
            failed[engine] = failure
            continue
        if response.status != 200:
            return response
        first = first or response
        for entry in _listed(response.body):
            listed.setdefault(entry["id"], entry)
    if first is not None:
        if len(listed) > len(_listed(first.body)):
            first.body = msgspec.json.encode({"object": "list", "data": list(listed.values())})
        return first
    engines = [
        (engine, failed[engine].cause, str(failed[engine]))
        if engine in failed
        else (engine, "down", engine.reason)
        for engine in shared.pool.engines
    ]
    return unavailable(UnavailableError(engines), shared.config, request_id)


async def model(request: web.Request) -> web.StreamResponse:
    """One model of that list. OpenAI's clients use this endpoint (`models.retrieve`); vLLM has none."""
    answer = await models(request)
    if not isinstance(answer, web.Response) or answer.status != 200:
        return answer
    name = request.match_info["name"]
    for entry in _listed(answer.body):
        if entry["id"] == name:
            answer.body = msgspec.json.encode(entry)
            return answer
    return error_response(f"the model {name!r} does not exist", "NotFoundError", 404, "model")


async def version(request: web.Request) -> web.StreamResponse:
    """The version of an engine that is up, decode side first."""
    request_id = id_of(request)
    for engine in _up(request.app[SHARED].pool):
        with suppress(EngineFailedError):
            return await _forwarded(request, engine, request.path, request_id)
    return error_response("no engine answers", "service_unavailable", 503)


async def ping(request: web.Request) -> web.StreamResponse:
    """200 if at least one engine can serve. The answer names no engine."""
    return web.Response(status=200 if _up(request.app[SHARED].pool) else 503)


async def health(request: web.Request) -> web.StreamResponse:
    """200 if at least one engine can serve. The answer has the state of all engines."""
    pool = request.app[SHARED].pool
    decode, prefill = pool.up(Role.DECODE), pool.up(Role.PREFILL)
    serves = bool(_up(pool))
    state = {
        "status": "ok" if serves else "unavailable",
        "disaggregates": any(
            engine.address and engine is not other and not other.only_produces
            for engine in prefill
            for other in decode
        ),
        "tokens": request.app[SHARED].tokens.source,
        "token_ids": request.app[SHARED].tokens.why_text or "sent",
        "handoffs": handoffs_of(pool.engines),
        "engines": pool.describe(),
    }
    return web.json_response(state, status=200 if serves else 503)


async def live(request: web.Request) -> web.StreamResponse:
    """The events of the live page, one each second."""
    shared, is_operator = request.app[SHARED], request.app[ADMIN_AUTH].sent(request)
    return await request.app[LIVE].stream(request, shared, is_operator=is_operator)


async def metrics(request: web.Request) -> web.StreamResponse:
    """Prometheus' text format."""
    return web.Response(body=request.app[RENDER](), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _up(pool: EnginePool) -> list[BackendEngine]:
    """The engines that are up, decode side first."""
    return list(dict.fromkeys(pool.up(Role.DECODE) + pool.up(Role.PREFILL)))


async def _forwarded(
    request: web.Request, engine: BackendEngine, path: str, request_id: str
) -> web.Response:
    """An engine's answer to a client's query, or its refusal. Raises EngineFailedError."""
    shared = request.app[SHARED]
    config = shared.config
    call = EngineCall("GET", path, passed_headers(request, request_id, config))
    timeouts = ResponseTimeouts(PROBE_S, config.idle_timeout_s)
    async with exchange(shared.connections, engine, call, timeouts, config) as answer:
        if answer.status // 100 not in (2, 4):
            raise EngineFailedError(f"status_{answer.status}", f"{answer.status}")
        content, status = await answer.read_all(), answer.status
        if status < 300:
            kind = answer.headers.get("Content-Type", "")
            status = await status_of(status, kind, content, completes=False)
        returned = headers_to_client(answer.headers, request_id)
        return web.Response(status=status, headers=returned, body=content)


def _listed(content: Any) -> list[dict[str, Any]]:
    """The models in an engine's answer."""
    try:
        answer = msgspec.json.decode(content)
    except (msgspec.MsgspecError, TypeError, RecursionError):
        return []
    data = answer.get("data") if isinstance(answer, dict) else None
    models = [
        entry for entry in (data if isinstance(data, list) else ()) if isinstance(entry, dict)
    ]
    return [entry for entry in models if isinstance(entry.get("id"), str)]
