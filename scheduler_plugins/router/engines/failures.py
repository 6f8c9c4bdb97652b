# SPDX-License-Identifier: Apache-2.0
"""How an engine can fail a request, and the failure that an error of a connection stands for."""

from urllib.parse import urlsplit

import aiohttp

from scheduler_plugins.router.engines.connections import NotConnectedError

EXCERPT_BYTES = 300
"""The most bytes of an engine's error answer that a message repeats."""


class EngineFailedError(Exception):
    """An engine failed a request. `cause` is the metric label; the message is for people."""

    def __init__(self, cause: str, message: str, *, accepted: bool = True) -> None:
        super().__init__(message)
        self.cause = cause
        self.accepted = accepted
        """Whether the engine may have started work on the request."""

    @property
    def answered(self) -> bool:
        """Whether the engine is alive and reported the failure itself."""
        return self.cause.startswith("status_5")

    @property
    def blames_request(self) -> bool:
        """Whether the engine said that the request is wrong. The engine is at fault only if another engine accepts
        the request."""
        return self.cause.startswith("status_4") and not isinstance(self, OverloadedError)


class UnreachableError(EngineFailedError):
    """No connection; the engine has not seen the request."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__("connect", message, accepted=False)
        self.refused = refused
        """Whether the machine refused the connection: the engine has ended, or drains."""


class OverloadedError(EngineFailedError):
    """The engine answered 429 or 503. It has done no work; ask another engine."""

    def __init__(self, status: int, message: str, retry_after_s: int) -> None:
        super().__init__(f"status_{status}", f"{status}: {message}", accepted=False)
        self.retry_after_s = retry_after_s
        """Seconds after which to try again."""


class RefusedError(EngineFailedError):
    """The engine says that the request is wrong, or exceeds its limits. That never counts against the engine: another
    engine may have a longer context, a parser or an adapter that this engine lacks.

    Attributes:
        status, content: the engine's answer, for the client.
    """

    def __init__(self, status: int, content: bytes) -> None:
        said = " ".join(content[:EXCERPT_BYTES].decode("utf-8", "replace").split())
        super().__init__(f"status_{status}", f"{status}: {said}", accepted=False)
        self.status = status
        self.content = content


class StoppedError(EngineFailedError):
    """The engine was stopped before its answer was complete. The request is not to blame, however often that happens."""


def ended_early() -> StoppedError:
    """The engine ended an incomplete answer, as engines do when they are stopped."""
    return StoppedError("aborted", "it ended the answer early (finish_reason abort)")


def about_key(status: int) -> str:
    """Advice for an answer with this status to the router's own request, if the router may lack the engine's key."""
    return "; give the engines' key with --api-key" if status in (401, 403) else ""


def first_look(url: str, failure: EngineFailedError) -> str:
    """Advice for a failure of an engine that has never been up; empty if the error's message says enough."""
    if failure.cause == "died":
        scheme = "https://" if url.startswith("http://") else "http://"
        return f"; the URL must be that of the engine's HTTP port ({scheme} perhaps), not of its control port"
    if failure.cause == "timeout":
        return "; is the engine stopped, or does a firewall drop what is sent there?"
    if "answered 404" in str(failure) and urlsplit(url).path:
        return "; the URL must be http://host:port, without the path of an endpoint"
    return ""


def failure_of(error: Exception) -> EngineFailedError:
    """The failure that an error of either HTTP client stands for."""
    if isinstance(error, NotConnectedError):
        return UnreachableError(f"no connection: {error}", refused=error.refused)
    # The session has no read timeout, so a timeout is always the connection's.
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        what = f"{error.certificate_error}; --engine-ca FILE names the CA to trust"
        return UnreachableError(f"no connection: {what}", refused=False)
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        what = f"{error.os_error.strerror}; does the engine speak http://, not https://?"
        return UnreachableError(f"no connection: {what}", refused=False)
    if isinstance(error, aiohttp.ClientConnectorError):
        refused = isinstance(error.os_error, ConnectionRefusedError)
        reason = "refused" if refused else error.os_error.strerror or str(error.os_error)
        return UnreachableError(f"no connection: {reason}", refused=refused)
    if isinstance(error, TimeoutError):
        return UnreachableError("no connection: timed out", refused=False)
    what = str(error) or type(error).__name__
    return EngineFailedError("died", f"the connection broke: {what}")
