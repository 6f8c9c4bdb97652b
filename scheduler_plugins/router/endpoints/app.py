# SPDX-License-Identifier: Apache-2.0
"""The HTTP endpoints, and the answer to every error."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

from scheduler_plugins.router.client.admin_auth import AdminAuth
from scheduler_plugins.router.client.answers import REQUEST_ID
from scheduler_plugins.router.client.client_auth import (
    VERSION,
    id_of,
    may_enter,
    needs_key,
    passed_headers,
)
from scheduler_plugins.router.client.connections import (
    BodyBudget,
    BodyTooLargeError,
    ConnectionLimit,
    NoRoomError,
    Reservation,
)
from scheduler_plugins.router.client.downstream import ClientGoneError
from scheduler_plugins.router.client.origins import marking, preflight, why_refused
from scheduler_plugins.router.client.stopping import Stopping
from scheduler_plugins.router.elastic.task import Elastic
from scheduler_plugins.router.endpoints.app_keys import (
    ADMIN_AUTH,
    BODIES,
    CONFIG,
    CONNECTIONS,
    LIVE,
    METRICS,
    MOVER,
    PLACE,
    RENDER,
    SHARED,
    STOPPING,
)
from scheduler_plugins.router.endpoints.info_endpoints import (
    MODELS,
    PING,
    health,
    live,
    metrics,
    model,
    models,
    ping,
    version,
)
from scheduler_plugins.router.endpoints.page import EVENTS, LiveState, page
from scheduler_plugins.router.endpoints.refusals import (
    closing,
    error_response,
    instead_of,
    retry_after,
    unavailable,
)
from scheduler_plugins.router.engines.moving import Mover
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.engines.sessions import client_connections, watching_session
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.peer_routers.all_metrics import AllMetrics
from scheduler_plugins.router.peer_routers.load_exchange import exchanging
from scheduler_plugins.router.peer_routers.worker_place import WorkerPlace
from scheduler_plugins.router.prompt import body
from scheduler_plugins.router.prompt.describe import TIMEOUT_HEADER, timeout_s
from scheduler_plugins.router.reload import reloading, route_policy, use_settings
from scheduler_plugins.router.request.proxy import ClientRequest
from scheduler_plugins.router.request.shared import Shared
from scheduler_plugins.router.routing.attempt import AllOverloadedError, UnavailableError
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.router.settings.settings_file import SettingsFile
from scheduler_plugins.router.tokens.prompt_tokens import PromptTokens
from scheduler_plugins.router.tracing import Tracing


async def engines(app: web.Application) -> AsyncIterator[None]:
    """The engines and what requests share, from the application's start to its end."""
    config = app[CONFIG]
    async with watching_session(config) as watching:
        connections, metrics = client_connections(config), app[METRICS]
        pool = EnginePool(config, watching, metrics)
        policy = route_policy(config, metrics)
        tokens = PromptTokens(connections, pool.all_up, config.tokenizer, config.api_key)
        tracing = Tracing(config.otlp)
        shared = Shared(config, pool, connections, metrics, policy, tokens, tracing)
        app[SHARED], app[MOVER] = shared, Mover(pool, tracing)
        try:
            await pool.start()
            async with (
                exchanging(config, pool, metrics, app[PLACE], shared.waiting) as peers,
                Elastic(pool, app[MOVER], peers.waiting).running(),
            ):
                yield
        finally:
            await tokens.close()
            await pool.close()
            await connections.close()
            await asyncio.to_thread(tracing.close)


async def following(app: web.Application, settings: SettingsFile) -> AsyncIterator[None]:
    """Applies the settings file whenever it changes."""
    shared = app[SHARED]

    def use(config: RouterConfig) -> None:
        use_settings(shared, config)
        shared.pool.edit(config)

    async with reloading(settings, use):
        yield


logger = logging.getLogger(__name__)

# nginx's status for a client that has left. The client never sees it.
CLIENT_CLOSED_REQUEST = 499


def create_app(
    config: RouterConfig,
    settings: SettingsFile | None,
    place: WorkerPlace | None,
) -> web.Application:
    """The router as an aiohttp application, for `server.RouterServer`.

    Serve it with `handler_cancellation=True`: otherwise a client that disconnects does not end its
    requests to the engines. The app's `CONNECTIONS` must create the protocols of the connections.

    Args:
        settings: the file that `config` came from, which is watched; None: there is no file.
        place: place of this process among the workers of the router; None: the router is one process.
    """
    app = web.Application(middlewares=[shape_errors])
    app[CONFIG] = config
    app[CONNECTIONS] = ConnectionLimit(config.connections)
    app[BODIES] = BodyBudget(config.bodies_mib << 20, config.body_mib << 20)
    app[METRICS], app[PLACE] = Metrics(), place
    app[METRICS].first_worker = place is None  # workers agree later on the one that counts
    app[RENDER] = app[METRICS].render
    app[ADMIN_AUTH] = AdminAuth(config.admin_key)
    app[STOPPING] = Stopping()
    if place is not None:
        several = AllMetrics(app[METRICS], place)
        app[RENDER] = several.render
        app.cleanup_ctx.append(lambda _: several.writing())
    app.cleanup_ctx.append(engines)
    if settings is not None:
        app.cleanup_ctx.append(lambda app: following(app, settings))
    for path in (*body.PAIRED, *body.ONE_ENGINE):
        app.router.add_post(path, completions)
    app.router.add_get(MODELS, models)
    app.router.add_get(MODELS + "/{name:.+}", model)
    app.router.add_get(VERSION, version)
    app.router.add_get(PING, ping)
    app.router.add_post(PING, ping)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    app[LIVE] = LiveState()
    app.router.add_get("/", page)
    app.router.add_get(EVENTS, live, allow_head=False)  # a HEAD request would never end
    app.on_shutdown.append(app[LIVE].end)
    if config.allowed_origins:
        app.on_response_prepare.append(marking(config.allowed_origins))
    return app


@web.middleware
async def shape_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answer every error in OpenAI's format."""
    request.app[CONNECTIONS].headers_arrived(request)
    if (preflight_answer := preflight(request, request.app[CONFIG].allowed_origins)) is not None:
        return preflight_answer
    if (why := why_refused(request, request.app[CONFIG])) is not None:
        return closing(error_response(why, "permission_error", 403))
    if needs_key(request.path) and not may_enter(request, request.app[CONFIG].client_key):
        message = "wrong or no API key (the router's PD_ROUTER_CLIENT_KEY)"
        return closing(error_response(message, "authentication_error", 401))
    try:
        response: web.StreamResponse = await handler(request)
    except BodyTooLargeError as error:
        return closing(error_response(str(error), "invalid_request_error", 413))
    except NoRoomError:
        message = "the router's memory for request bodies is full; retry later"
        return closing(retry_after(error_response(message, "service_unavailable", 503), 1))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        why = instead_of(request.path) if error.status == 404 else error.reason
        message = f"{request.method} {request.path}: {why}"
        response = error_response(message, "invalid_request_error", error.status)
        if allow := error.headers.get("Allow"):
            response.headers["Allow"] = allow
    return response


async def completions(request: web.Request) -> web.StreamResponse:
    """Both completion endpoints, and the endpoints that one engine serves."""
    counters = request.app[METRICS]
    outcome = "internal_error"
    counters.in_flight.inc()
    try:
        with request.app[BODIES].reserve() as room:
            response, outcome = await _complete(request, room)
            return response
    except (BodyTooLargeError, NoRoomError) as error:
        outcome = "bad_request" if isinstance(error, BodyTooLargeError) else "overloaded"
        raise
    except (asyncio.CancelledError, ClientGoneError) as error:
        outcome = "client_gone"
        if isinstance(error, asyncio.CancelledError):
            raise
        logger.info("%s", error)
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=CLIENT_CLOSED_REQUEST)
    finally:
        counters.in_flight.dec()
        counters.requests.labels(request.path, outcome).inc()


async def _complete(request: web.Request, room: Reservation) -> tuple[web.StreamResponse, str]:
    shared = request.app[SHARED]
    request_id = id_of(request)
    try:
        limit_s = timeout_s(request.headers)
        parsed = await _read(request, room)
        request_id = id_of(request, parsed)
    except body.BadRequestError as error:
        return _bad_request(error, request_id), "bad_request"
    headers = passed_headers(request, request_id, shared.config)
    client_request: ClientRequest | None = None
    try:
        client_request = ClientRequest(shared, request, headers, parsed)
        with request.app[CONNECTIONS].serving(request):
            served = await _within(client_request, limit_s, request_id, request.app[STOPPING])
            client_request.trace.finish(served[1])
            return served
    except body.BadRequestError as error:
        return _bad_request(error, request_id), "bad_request"
    except UnavailableError as error:
        logger.warning("request %s: %s", request_id, error)
        response = unavailable(error, shared.config, request_id)
        return response, "unavailable"
    except AllOverloadedError as error:
        response = retry_after(
            error_response(str(error), "rate_limit_exceeded", 429), error.retry_after_s
        )
        response.headers[REQUEST_ID] = request_id
        return response, "overloaded"
    except ClientGoneError as error:
        raise ClientGoneError(f"request {request_id}: {error}") from None
    except Exception as error:
        if client_request is not None and client_request.begun:
            raise  # aiohttp closes the connection; it is too late for another answer
        if isinstance(error, RecursionError):  # the parser had more stack left than this code
            return _bad_request(
                body.BadRequestError("the request body is nested too deeply"), request_id
            ), "bad_request"
        logger.exception("request %s failed in the router", request_id)
        return error_response(
            f"request {request_id} failed in the router", "internal_error", 500
        ), "internal_error"
    finally:
        if client_request is not None:
            client_request.trace.finish("failed")


def _bad_request(error: body.BadRequestError, request_id: str) -> web.Response:
    response = error_response(str(error), "invalid_request_error", 400, error.param)
    response.headers[REQUEST_ID] = request_id
    return response


async def _within(
    client_request: ClientRequest, limit_s: float, request_id: str, stopping: Stopping
) -> tuple[web.StreamResponse, str]:
    """Serve the request, or give it up when the client's time limit, or the limit of a stopping router, has passed."""
    scope = asyncio.timeout(None if limit_s == math.inf else limit_s)
    try:
        async with scope:
            with stopping.bounds(scope):
                return await client_request.serve()
    except TimeoutError:
        if not scope.expired():
            raise
    why = f"the client's limit of {limit_s * 1e3:g} ms ({TIMEOUT_HEADER}) has passed"
    kind, status, outcome, cut_off = "timeout", 504, "deadline", "deadline"
    if stopping.over:
        why, kind, status = "the router is being stopped", "service_unavailable", 503
        outcome, cut_off = "unavailable", "interrupted"
    if client_request.begun:
        cut_off = "ok" if client_request.ended else cut_off
        return await client_request.interrupt(why), cut_off
    response = error_response(f"request {request_id}: {why}", kind, status)
    response.headers[REQUEST_ID] = request_id
    return (response if status == 504 else retry_after(response, 1)), outcome


async def _read(request: web.Request, room: Reservation) -> dict[str, Any]:
    limit_s = request.app[SHARED].config.idle_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await room.body(request)
    except TimeoutError:
        raise body.BadRequestError(f"the request body was not sent within {limit_s:g} s") from None
    except aiohttp.web.RequestPayloadError as error:
        raise body.BadRequestError(f"the request body cannot be read: {error}") from None
