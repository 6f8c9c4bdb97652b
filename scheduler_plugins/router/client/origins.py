# SPDX-License-Identifier: Apache-2.0
"""Which web pages may use the router from their visitors' browsers (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from scheduler_plugins.router.client.doors import is_guarded

ANY = "*"
MAX_AGE_S = 600
"""How long a browser need not ask again."""
_SHOWN = "X-Request-Id, Retry-After"
_ALLOWED_ORIGIN = "Access-Control-Allow-Origin"


def preflight(request: web.Request, allowed: Sequence[str]) -> web.Response | None:
    """The answer to a browser that asks whether it may send a page's request; None if that is not what it asks.

    It has no key: browsers send none with this question.
    """
    origin = request.headers.get("Origin")
    asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    if not (allowed and asks and origin):
        return None
    if not _may(origin, allowed):
        return web.Response(status=403, text="this origin is not allowed (--allowed-origins)")
    headers = {
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Max-Age": str(MAX_AGE_S),
    }
    if wanted := request.headers.get("Access-Control-Request-Headers"):
        headers["Access-Control-Allow-Headers"] = wanted
    return web.Response(status=204, headers=headers)


def marking(
    allowed: Sequence[str],
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """For `Application.on_response_prepare`: lets pages of these origins read what clients are answered. What the router tells of
    its engines (`/health`, `/metrics`) is for operators."""

    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.popall(_ALLOWED_ORIGIN, None)  # an engine's word on it is not the router's
        origin = request.headers.get("Origin")
        if origin and is_guarded(request.path) and _may(origin, allowed):
            response.headers[_ALLOWED_ORIGIN] = ANY if ANY in allowed else origin
            response.headers["Access-Control-Expose-Headers"] = _SHOWN
        if ANY not in allowed:
            response.headers.add("Vary", "Origin")

    return mark


def _may(origin: str, allowed: Sequence[str]) -> bool:
    return ANY in allowed or origin in allowed
