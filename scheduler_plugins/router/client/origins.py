# SPDX-License-Identifier: Apache-2.0
"""Web pages that use the router from their visitors' browsers (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol).

A browser sends a page's request to any host, including this machine, and only withholds the answer from the page. So
the router refuses requests of pages that are not allowed before it reads them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from aiohttp import web

from pd_connector.hosts import is_loopback, numeric_address
from scheduler_plugins.router.client.client_auth import FOR_OPERATORS, needs_key
from scheduler_plugins.router.settings.config import RouterConfig

ANY = "*"
MAX_AGE_S = 600
"""Time for which a browser may cache the answer of a preflight, in seconds."""
_SHOWN = "X-Request-Id, Retry-After"
_ALLOWED_ORIGIN = "Access-Control-Allow-Origin"
_OF_PAGES = ("cross-site", "same-site")
"""Values of `Sec-Fetch-Site` for requests of other pages. An image, for example, is requested without `Origin`."""


def preflight(request: web.Request, allowed: Sequence[str]) -> web.Response | None:
    """The answer to a preflight, in which a browser asks whether it may send a page's request; None: no preflight.

    A preflight needs no key, because browsers send none with it.
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
    if requested := request.headers.get("Access-Control-Request-Headers"):
        headers["Access-Control-Allow-Headers"] = requested
    return web.Response(status=204, headers=headers)


def why_refused(request: web.Request, config: RouterConfig) -> str | None:
    """Why a request may come from a foreign page that is not allowed, and what to do; None: it does not."""
    allowed = config.allowed_origins
    if is_of_foreign_page(request, allowed, config.host):
        origin = request.headers.get("Origin", "another site")
        return f"web pages of {origin} are not allowed (router option --allowed-origins)"
    if request.path in FOR_OPERATORS and not is_known_host(request, allowed, config.host):
        host = request.headers.get("Host", "")
        return f"Host {host!r}: must be an address, localhost, or a name from --allowed-origins"
    return None


def is_of_foreign_page(request: web.Request, allowed: Sequence[str], bound: str) -> bool:
    """Whether a browser sent the request for a page that is not the router's own and not allowed.

    Args:
        allowed: allowed origins.
        bound: the address that the router listens on.
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

    A page can let its own name resolve to loopback, so the browser takes the router for the page's server (DNS
    rebinding). Therefore a router on loopback accepts only addresses, `localhost`, and the names in `allowed`.
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
    """A handler for `Application.on_response_prepare`. It lets pages of these origins read answers to clients, but
    not answers about engines (`/health`, `/metrics`), which are for operators."""

    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get("Origin")
        if origin and needs_key(request.path) and _may(origin, allowed):
            response.headers[_ALLOWED_ORIGIN] = ANY if ANY in allowed else origin
            response.headers["Access-Control-Expose-Headers"] = _SHOWN
        if allowed and ANY not in allowed:
            response.headers.add("Vary", "Origin")

    return mark


def _may(origin: str, allowed: Sequence[str]) -> bool:
    return ANY in allowed or origin in allowed


def _authority(origin: str) -> str:
    """Host and port of an origin in lower case; "" if the origin has none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _name(authority: str) -> str:
    """The host of `host:port` in lower case, without the final dot of a full name; "" if there is no host."""
    try:
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    except ValueError:
        return ""
