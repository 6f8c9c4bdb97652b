# SPDX-License-Identifier: Apache-2.0
"""Web pages that use the router from their visitors' browsers (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol).

A browser sends a page's request wherever the page says, to this machine as well, and only withholds the answer. So a request of a
page that nobody allowed is refused before it is read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from aiohttp import web

from pd_connector.hosts import is_loopback, numeric_address
from scheduler_plugins.router.client.doors import FOR_OPERATORS, is_guarded
from scheduler_plugins.router.settings.config import RouterConfig

ANY = "*"
MAX_AGE_S = 600
"""How long a browser need not ask again."""
_SHOWN = "X-Request-Id, Retry-After"
_ALLOWED_ORIGIN = "Access-Control-Allow-Origin"
_OF_PAGES = ("cross-site", "same-site")
"""`Sec-Fetch-Site` of what another page asks for: an image, say, which has no `Origin`."""


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


def why_refused(request: web.Request, config: RouterConfig) -> str | None:
    """Why a request may be of a web page that is neither the router's nor allowed, and what to do; None: it is not."""
    allowed = config.allowed_origins
    if is_of_foreign_page(request, allowed, config.host):
        origin = request.headers.get("Origin", "another site")
        return f"web pages of {origin} are not allowed (router option --allowed-origins)"
    if request.path in FOR_OPERATORS and not is_known_host(request, allowed, config.host):
        host = request.headers.get("Host", "")
        return f"Host {host!r}: must be an address, localhost, or named by --allowed-origins"
    return None


def is_of_foreign_page(request: web.Request, allowed: Sequence[str], bound: str) -> bool:
    """Whether a browser sent the request for a page that is neither the router's own nor allowed.

    Args:
        allowed: origins.
        bound: the address that is listened on.
    """
    origin = request.headers.get("Origin")
    if origin is None:
        site, mode = (request.headers.get(f"Sec-Fetch-{name}") for name in ("Site", "Mode"))
        return site in _OF_PAGES and mode != "navigate" and ANY not in allowed
    if _may(origin, allowed):
        return False
    host = request.headers.get("Host", "")
    same = bool(host) and _authority(origin) == host.lower()
    return not (same and is_known_host(request, allowed, bound))


def is_known_host(request: web.Request, allowed: Sequence[str], bound: str) -> bool:
    """Whether the request's `Host` can be a name of this router.

    A page's own name may be made to lead to loopback, so that the browser takes the router for the page's own server (DNS
    rebinding). A router that is bound to loopback is therefore known by addresses, `localhost`, and the names in `allowed` only.
    """
    if not is_loopback(bound) or ANY in allowed:
        return True
    name = _name(request.headers.get("Host", ""))
    if not name or name == "localhost" or name.endswith(".localhost"):
        return True
    return (
        numeric_address(name) is not None
        or name == bound.lower()
        or any(_name(_authority(origin)) == name for origin in allowed)
    )


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
        if allowed and ANY not in allowed:
            response.headers.add("Vary", "Origin")

    return mark


def _may(origin: str, allowed: Sequence[str]) -> bool:
    return ANY in allowed or origin in allowed


def _authority(origin: str) -> str:
    """Host and port of an origin in lower case; "" if it has none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _name(authority: str) -> str:
    """The host of `host:port` in lower case, without the dot at the end of a full name; "" if it is none."""
    try:
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    except ValueError:
        return ""
