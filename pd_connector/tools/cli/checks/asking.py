# SPDX-License-Identifier: Apache-2.0
"""HTTP requests to an engine or a router, for the doctor and other commands."""

import json
import ssl
from collections.abc import Callable, Mapping
from http.client import HTTPException, RemoteDisconnected
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from pd_connector.hosts import server_url, without_secret

TIMEOUT_S = 10.0
_MOST_ERROR_BYTES = 1 << 20
DESCRIBE_TIMEOUT_S = 60.0  # a busy engine answers after its present work

Ask = Callable[[str, Mapping[str, Any] | None], str]
"""GET a path of the peer, or POST a body to it; returns the answer's body. Raises PeerError."""


class _Redirects(HTTPRedirectHandler):
    """Follows redirects. urllib would send the engines' key to whatever host and port an answer names."""

    def redirect_request(self, request: Request, *answer: Any) -> Request | None:
        """See `HTTPRedirectHandler`."""
        following = super().redirect_request(request, *answer)
        if following and urlsplit(following.full_url)[:2] != urlsplit(request.full_url)[:2]:
            following.remove_header("Authorization")
        return following


def json_of(answer: str) -> Any:
    """The JSON of an answer. Raises ValueError: it is not JSON, or nested too deeply."""
    try:
        return json.loads(answer)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


class PeerError(Exception):
    """There is no answer, or the answer is an error, whose body is in `body`."""

    def __init__(self, said: str, body: str = "") -> None:
        super().__init__(said)
        self.body = body


class SilentPeerError(PeerError):
    """Nothing came back: no engine is there, or its answer is not HTTP."""


def url_of(given: str) -> str:
    """The URL of a peer that the user named. Raises PeerError."""
    try:
        return server_url(given)
    except ValueError as error:
        raise PeerError(f"{without_secret(given)!r}: {error} (--peer)") from None


def asker(url: str, api_key: str | None) -> Ask:
    """A function that asks over HTTP. Proxy variables are for the internet; engines are dialled directly."""
    opener = build_opener(ProxyHandler({}), _Redirects)

    def ask(path: str, body: Mapping[str, Any] | None) -> str:
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = Request(url + path, data, headers)
            limit_s = TIMEOUT_S if body is None else DESCRIBE_TIMEOUT_S
            with opener.open(request, timeout=limit_s) as response:
                return str(response.read().decode(errors="replace"))
        except HTTPError as error:
            said = error.read(_MOST_ERROR_BYTES).decode(errors="replace")
            remedy = " (give the engines' key with --api-key)" if error.code == 401 else ""
            raise PeerError(
                f"{path} was answered with status {error.code}{remedy}: {said[:300]}", said
            ) from None
        except (OSError, ValueError, HTTPException) as error:
            raise SilentPeerError(f"{path}: {_said(error)}") from None

    return ask


def _said(error: Exception) -> str:
    """Why there is no answer, and what to look at."""
    if isinstance(error, URLError) and isinstance(error.reason, Exception):
        error = error.reason
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"{error.verify_message}: set SSL_CERT_FILE to the file with the certificate of its CA"
        )
    if isinstance(error, ssl.SSLError):
        return f"no TLS answers there ({error.reason}): is it http://, not https://?"
    if isinstance(error, RemoteDisconnected):
        return "it closed the connection without an answer: is it https://, not http://?"
    if isinstance(error, HTTPException):
        return f"its answer is not HTTP ({type(error).__name__})"
    if isinstance(error, ConnectionRefusedError):
        return "no connection: nothing listens there"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return f"no connection: {error.strerror}"
    return str(getattr(error, "reason", "") or error)
