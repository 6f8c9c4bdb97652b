# SPDX-License-Identifier: Apache-2.0
"""The router's own error responses, for requests without an engine's answer."""

import math

from aiohttp import web

from scheduler_plugins.router.client.answers import REQUEST_ID, error_body
from scheduler_plugins.router.prompt.body import CHAT, COMPLETIONS, GENERATE, ONE_ENGINE, PAIRED
from scheduler_plugins.router.routing.attempt import UnavailableError
from scheduler_plugins.router.settings.config import RouterConfig


def error_response(message: str, kind: str, status: int, param: str | None = None) -> web.Response:
    """An error in OpenAI's format."""
    return web.json_response(error_body(message, kind, status, param), status=status)


_LEAVES = "to abort a request, close its connection: the router then aborts it at its engines"
_INSTEAD = {
    "/generate": f"only SGLang's engines know its form; use {COMPLETIONS} or {GENERATE}, which take token ids",
    "/abort_request": _LEAVES,
    "/abort_requests": _LEAVES,
    "/inference/v1/abort_requests": _LEAVES,
}


def instead_of(path: str) -> str:
    """What to use in place of an endpoint that the router does not have."""
    if said := _INSTEAD.get(path):
        return said
    served = (*PAIRED, "/v1/models", *ONE_ENGINE)
    # A client's base URL often has `/v1` once too often, or not at all.
    if near := next(
        (
            path_served
            for path_served in served
            if path.endswith(path_served) or path_served == f"/v1{path}"
        ),
        None,
    ):
        return f"the router has no such endpoint; use {near}"
    return (
        f"the router has no such endpoint; it serves {COMPLETIONS}, {CHAT}, {GENERATE} and others (docs/router.md). "
        "Send what concerns one engine to that engine"
    )


def unavailable(error: UnavailableError, config: RouterConfig, request_id: str) -> web.Response:
    """Answer 503 with the number of engines by cause. It names no engine; the log has the names."""
    counted = "; ".join(
        f"{role}: " + ", ".join(f"{count} {cause}" for cause, count in causes.items())
        for role, causes in error.causes.items()
    )
    message = f"no engine could serve request {request_id} ({counted})"
    shaped = error_body(message, "service_unavailable", 503, engines=error.causes)
    response = retry_after(
        web.json_response(shaped, status=503), math.ceil(config.health_interval_s)
    )
    response.headers[REQUEST_ID] = request_id
    return response


def retry_after(response: web.Response, after_s: int) -> web.Response:
    """The same response, with a `Retry-After` header."""
    response.headers["Retry-After"] = str(after_s)
    return response


def closing(response: web.Response) -> web.Response:
    """Close the connection after this response, because a part of the request was not read."""
    response.force_close()
    return response
