# SPDX-License-Identifier: Apache-2.0
"""The admin API, on its own port: engines join, leave, drain and change sides.

The list of engines holds until the settings file changes. Then the file's list applies again. A role holds until the
engine is released, or until its own entry of the file changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import msgspec
from aiohttp import web

from scheduler_plugins.qos.yaml_text import explained
from scheduler_plugins.router.client.admin_auth import AdminAuth
from scheduler_plugins.router.client.answers import error_body
from scheduler_plugins.router.client.connections import ConnectionLimit
from scheduler_plugins.router.client.origins import is_known_host, is_of_foreign_page
from scheduler_plugins.router.endpoints.app_keys import CONNECTIONS
from scheduler_plugins.router.endpoints.refusals import closing
from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.moving import Mover
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.settings.config import SIDES
from scheduler_plugins.router.settings.elastic import sides_of
from scheduler_plugins.router.settings.urls import base_url

ENGINES = "/engines"
MOST_CONNECTIONS = 64
"""Most connections to the admin port."""
MOST_BODY_BYTES = 1 << 20
BODY_S = 10.0
"""Longest wait for a request's body."""
_POOL = web.AppKey("pool", EnginePool)
_MOVER = web.AppKey("mover", Mover)
_OPERATOR = web.AppKey("operator", AdminAuth)
_HOST = web.AppKey("host", str)
_JSON = "application/json"


class _EngineUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    url: str


class _Add(_EngineUrl, frozen=True, forbid_unknown_fields=True, kw_only=True):
    role: Literal["prefill", "decode", "both", "cpu_prefill", "ask"] = "ask"
    events: str = ""
    replay: str = ""


class _Drain(_EngineUrl, frozen=True, forbid_unknown_fields=True, kw_only=True):
    drain: bool = True


class _SetRole(_EngineUrl, frozen=True, forbid_unknown_fields=True, kw_only=True):
    role: Literal["prefill", "decode", "both", "cpu_prefill"]


_Changes = _SetRole | list[_SetRole]


def create_admin(pool: EnginePool, mover: Mover, operator: AdminAuth, host: str) -> web.Application:
    """The admin API as an application.

    Args:
        mover: changes the roles of the pool's engines.
        operator: checks the operator's token; other clients get no answer.
        host: the address to listen on.
    """
    app = web.Application(middlewares=[_for_operators_only], client_max_size=MOST_BODY_BYTES)
    app[CONNECTIONS] = ConnectionLimit(MOST_CONNECTIONS)
    app[_POOL], app[_MOVER], app[_OPERATOR], app[_HOST] = pool, mover, operator, host
    app.router.add_get(ENGINES, _list)
    app.router.add_post(ENGINES, _add)
    app.router.add_delete(ENGINES, _remove)
    app.router.add_post(f"{ENGINES}/drain", _drain)
    app.router.add_post(f"{ENGINES}/role", _set_role)
    app.router.add_post(f"{ENGINES}/release", _release)
    return app


@web.middleware
async def _for_operators_only(request: web.Request, handler: Any) -> web.StreamResponse:
    request.app[CONNECTIONS].headers_arrived(request)
    if (refused := _refusal(request)) is not None:
        return closing(refused)
    try:
        with request.app[CONNECTIONS].serving(request):
            response: web.StreamResponse = await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return closing(_error(f"the body is larger than {MOST_BODY_BYTES} bytes", 413))
    except web.HTTPException as error:
        return closing(_error(f"{request.method} {request.path}: {error.reason}", error.status))
    except (msgspec.MsgspecError, ValueError, RecursionError, web.RequestPayloadError) as error:
        return _error(str(error), 400)
    except LookupError as error:
        return _error(str(error.args[0]), 404)
    return response


def _refusal(request: web.Request) -> web.Response | None:
    """The answer to a client that is not the operator's program; None: it is."""
    if "Origin" in request.headers or is_of_foreign_page(request, (), request.app[_HOST]):
        return _error(
            "the admin API refuses requests of web pages: use a program outside of the browser", 403
        )
    if not is_known_host(request, (), request.app[_HOST]):
        host = request.headers.get("Host", "")
        return _error(f"Host {host!r}: must be an address or localhost", 403)
    if not request.app[_OPERATOR].sent(request):
        form = (
            "Authorization: Bearer TOKEN, with PD_ROUTER_ADMIN_KEY or the token in the router's log"
        )
        return _error(f"wrong or no token: send it as {form}", 401)
    if request.method != "GET" and request.content_type != _JSON:
        return _error(f"Content-Type {request.content_type}: must be {_JSON}", 415)
    return None


async def _read(request: web.Request, body_type: Any) -> Any:
    """The request's body, as this msgspec type. Raises ValueError, or msgspec.DecodeError if it is not JSON."""
    try:
        async with asyncio.timeout(BODY_S):
            raw = await request.read()
    except TimeoutError:
        raise ValueError(f"the request body was not sent within {BODY_S:g} s") from None
    try:
        return msgspec.json.decode(raw, type=body_type)
    except msgspec.ValidationError as error:
        raise ValueError(explained(str(error), body_type)) from None


async def _list(request: web.Request) -> web.StreamResponse:
    return _engine_list(request.app[_POOL])


async def _add(request: web.Request) -> web.StreamResponse:
    body, pool = await _read(request, _Add), request.app[_POOL]
    config, url = pool.config, base_url("url", body.url)
    if any(engine.url == url and not pool.leaves(engine) for engine in pool.engines):
        raise ValueError(f"url {url}: the router has this engine already")
    if url in pool.stopping:
        raise ValueError(f"url {url}: stop_command runs for it; add it when that has ended")
    events = dict(config.kv_events)
    if body.events:
        events[url] = (body.events, body.replay or None)
    sides: dict[str, Any] = {side: (*getattr(config, side), url) for side in sides_of(body.role)}
    pool.edit(replace(config, kv_events=events, **sides))
    return _engine_list(pool)


async def _remove(request: web.Request) -> web.StreamResponse:
    body, pool = await _read(request, _EngineUrl), request.app[_POOL]
    url = base_url("url", body.url)
    if not _is_given(pool, url):
        _check_named_itself(pool, _engine_of(pool, url).url)
    left = _without(pool, url)
    if alone := [
        side
        for side in ("prefill", "decode")
        if not left.get(side) and not left.get("engine") and getattr(pool.config, side)
    ]:
        raise ValueError(
            f"url {url}: is the last engine with the home {alone[0]}; add another one there before, or drain this one"
        )
    pool.edit(replace(pool.config, **left))
    return _engine_list(pool)


async def _drain(request: web.Request) -> web.StreamResponse:
    body, pool = await _read(request, _Drain), request.app[_POOL]
    pool.drain(_engine_of(pool, body.url), body.drain)
    return _engine_list(pool)


async def _set_role(request: web.Request) -> web.StreamResponse:
    """Give engines roles, and pin them. All changes of a list are made together, or none."""
    body = await _read(request, _Changes)
    pool, mover = request.app[_POOL], request.app[_MOVER]
    changes = dict[BackendEngine, Role]()
    for change in [body] if isinstance(body, _SetRole) else body:
        engine = _engine_of(pool, change.url)
        if engine in changes:
            raise ValueError(f"url {engine.url}: is named twice in the list; name it once")
        changes[engine] = Role(change.role)
        mover.check(engine, changes[engine])
    _check_sides(pool, changes)
    why = "the operator has asked for it (POST /engines/role)"
    moves = [
        mover.move(engine, role, pinned=True, cause="operator", why=why)
        for engine, role in changes.items()
    ]
    failures = [
        result
        for result in await asyncio.gather(*moves, return_exceptions=True)
        if isinstance(result, BaseException)
    ]
    if failures:
        return _error("; ".join(map(str, failures)), 409)
    return _engine_list(pool)


async def _release(request: web.Request) -> web.StreamResponse:
    body, pool = await _read(request, _EngineUrl), request.app[_POOL]
    pool.release(_engine_of(pool, body.url))
    return _engine_list(pool)


def _check_sides(pool: EnginePool, changes: Mapping[BackendEngine, Role]) -> None:
    """Raises ValueError if a side that has an engine would have none."""
    stays = [engine for engine in pool.engines if not pool.leaves(engine)]
    for side in (Role.PREFILL, Role.DECODE):
        had = any(engine.serves(side) for engine in stays)
        if had and not any(
            changes.get(engine, engine.role) in (side, Role.BOTH) for engine in stays
        ):
            raise ValueError(
                f"role: no engine would {side} any more; change another one in the same call (a list of changes)"
            )


def _check_named_itself(pool: EnginePool, url: str) -> None:
    """Raises ValueError if the engine belongs to a name, because the name would bring it back."""
    if not _is_given(pool, url):
        raise ValueError(
            f"url {url}: belongs to a name (dns+http, k8s+http, pool+http); drain it, or change the name"
        )


def _is_given(pool: EnginePool, url: str) -> bool:
    """Whether the settings list this URL, of an engine or of a name."""
    return any(url in getattr(pool.config, side) for side in SIDES)


def _without(pool: EnginePool, url: str) -> dict[str, Any]:
    """The settings that list engines, without one engine."""
    config = pool.config
    lists: dict[str, Any] = {
        side: tuple(given for given in getattr(config, side) if given != url) for side in SIDES
    }
    for name in ("kv_events", "places"):
        lists[name] = {given: at for given, at in getattr(config, name).items() if given != url}
    return lists


def _engine_of(pool: EnginePool, given: str) -> BackendEngine:
    url = base_url("url", given)
    for engine in pool.engines:
        if engine.url == url and not pool.leaves(engine):
            return engine
    raise LookupError(f"url {url}: the router has no such engine")


def _engine_list(pool: EnginePool) -> web.Response:
    return web.json_response({"engines": pool.describe()})


def _error(message: str, status: int) -> web.Response:
    return web.json_response(error_body(message, "invalid_request_error", status), status=status)
