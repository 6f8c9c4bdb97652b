# SPDX-License-Identifier: Apache-2.0
"""One request to one engine, watched while the engine is silent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from scheduler_plugins.router.client.answers import retry_after_s
from scheduler_plugins.router.engines.answer import MOST_ANSWER_BYTES, Answer
from scheduler_plugins.router.engines.connection import Parts
from scheduler_plugins.router.engines.connections import EngineConnections
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.failures import (
    EXCERPT_BYTES,
    EngineFailedError,
    OverloadedError,
    RefusedError,
    StoppedError,
    failure_of,
)
from scheduler_plugins.router.engines.progress import Progress
from scheduler_plugins.router.loop import is_behind, ran_s
from scheduler_plugins.router.settings.config import RouterConfig

OVERLOADED = (429, 503)
"""Statuses that mean "ask another engine"."""
REFUSES = (400, 413, 422)
"""Statuses that mean that the request is wrong, or exceeds this engine's limits."""


class Companion(Protocol):
    """Work beside an exchange. If it fails, waiting for the exchange may be useless."""

    on_failure: Callable[[], None]
    """Set by the exchange. Call it when the result of `refused` may have changed."""

    def refused(self, now: float) -> EngineFailedError | None:
        """The reason to give the exchange up at `now`, by `loop.ran_s`; None: go on."""


@dataclass(frozen=True)
class EngineCall:
    """A request to an engine: path, headers, and the parts of its body."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Parts | None = None


@dataclass(frozen=True)
class ResponseTimeouts:
    """How long an engine may be silent before its first byte and after it, in seconds."""

    first_byte_s: float
    idle_s: float


class Exchange:
    """An engine's answer, read chunk by chunk."""

    def __init__(
        self,
        engine: BackendEngine,
        timeouts: ResponseTimeouts,
        config: RouterConfig,
        elsewhere: Callable[[], bool],
        expected_s: float,
    ) -> None:
        self.engine = engine
        self.begun = False
        """Whether a byte of the answer's body has arrived."""
        self._timeouts = timeouts
        self._config = config
        self._response: Answer | None = None
        self._complete = False
        self._scope: asyncio.Timeout | None = None
        self._waiting_since: float | None = ran_s()
        self._progress = Progress(engine.signs, expected_s)
        self._ended_before = engine.ended
        self._elsewhere = elsewhere

    @property
    def status(self) -> int:
        return self._answer.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._answer.headers

    async def read(self) -> bytes:
        """The next bytes as they came; empty at the end.

        Raises:
            EngineFailedError: the connection broke before the answer was whole.
        """
        # The wait for the first byte counts from the sending of the request.
        if self._waiting_since is None:
            self._waiting_since = ran_s()
        try:
            chunk = await self._answer.read()
        except OSError as error:
            raise failure_of(error) from error
        self._came()
        self._waiting_since = None
        return chunk

    async def pass_to(self, take: Callable[[bytes], bool]) -> bool:
        """Call `take` with the bytes as they come until it returns False, as `Answer.pass_to`. Returns whether the
        answer has ended.

        Raises:
            EngineFailedError: the connection broke before the answer was whole.
        """
        self._waiting_since = ran_s()

        def taken(chunk: bytes) -> bool:
            self._came()
            return take(chunk)

        try:
            return await self._answer.pass_to(taken)
        except OSError as error:
            raise failure_of(error) from error
        finally:
            self._waiting_since = None

    def complete(self) -> None:
        """All bytes for the client have come. From now on the engine is not given up, even if it is silent or fails."""
        self._complete = True
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(None)

    async def read_all(self) -> bytes:
        """The whole body. Raises EngineFailedError as `read` does, and if the body is too large."""
        chunks, size_bytes = [], 0
        while chunk := await self.read():
            chunks.append(chunk)
            if (size_bytes := size_bytes + len(chunk)) > MOST_ANSWER_BYTES:
                raise EngineFailedError("malformed", f"it sent more than {MOST_ANSWER_BYTES} bytes")
        return b"".join(chunks)

    def silence(self, now: float) -> EngineFailedError | None:
        """The reason to give this exchange up; None while waiting makes sense."""
        if self._waiting_since is None:
            return None
        silent_s = now - self._waiting_since
        limit_s = self._timeouts.idle_s if self.begun else self._timeouts.first_byte_s
        if silent_s >= limit_s:
            which = "idle_timeout" if self.begun else "first_byte_timeout"
            return EngineFailedError(which, f"silent for {silent_s:.1f} s (limit {limit_s:g} s)")
        if self._is_lost(now, silent_s):
            why = self.engine.reason or "it has refused connections meanwhile"
            stopped = self.engine.ended != self._ended_before
            failed = StoppedError if stopped else EngineFailedError
            return failed("unhealthy", f"silent for {silent_s:.1f} s: {why}")
        return None

    def _came(self) -> None:
        """Bytes came."""
        now = ran_s()
        if self._waiting_since is not None:
            self._progress.came(now - self._waiting_since, now)
        self.begun, self._waiting_since = True, now

    def _is_lost(self, now: float, silent_s: float) -> bool:
        """Whether the engine will not go on with this answer: it takes no requests, and nothing moves there.

        A draining engine is also silent while it computes a prompt or an answer that is not streamed. Such a request is
        sent to another engine. If there is no other engine, the draining engine has `drain_timeout_s`.
        """
        engine, progress = self.engine, self._progress
        ended = engine.ended != self._ended_before
        if engine.down_since is None and not ended:
            return False
        if not progress.is_late(silent_s, now):
            return False
        if progress.has_pace:
            progress.signs.dead = True
        if engine.gone or progress.signs.dead or (ended and self._elsewhere()):
            return True
        limit_s = self._config.drain_timeout_s
        down_s = asyncio.get_running_loop().time() - (engine.down_since or 0.0)
        return min(silent_s, down_s, now - progress.signs.last_s) >= limit_s

    async def _open(self, connections: EngineConnections, call: EngineCall) -> None:
        url = self.engine.url + call.path
        try:
            self._response = await connections.request(call.method, url, call.headers, call.body)
        except OSError as error:
            raise failure_of(error) from error
        if (coding := self.headers.get("Content-Encoding", "identity")) != "identity":
            raise EngineFailedError(
                "malformed", f"its answer is compressed ({coding}), which was not asked for"
            )

    def _close(self) -> None:
        self._progress.end()
        # Closing an unfinished answer closes the connection, so the engine aborts the request.
        if self._response is not None:
            self._response.close()

    @property
    def _answer(self) -> Answer:
        assert self._response is not None, "an exchange is handed out once it is open"
        return self._response


@asynccontextmanager
async def exchange(
    connections: EngineConnections,
    engine: BackendEngine,
    call: EngineCall,
    timeouts: ResponseTimeouts,
    config: RouterConfig,
    companion: Companion | None = None,
    *,
    elsewhere: Callable[[], bool] = lambda: True,
    expected_s: float = 0.0,
) -> AsyncIterator[Exchange]:
    """Send `call` to `engine` and hand out its answer. Leaving closes the connection.

    While the engine is silent, its health and the limits in `timeouts` are checked every `config.look_s`. Until the
    first byte, `companion` is checked as well.

    Args:
        elsewhere: returns whether another engine can answer, so that nothing is lost if this engine is given up.
        expected_s: predicted time to the first byte; 0: not known.

    Raises:
        EngineFailedError: the engine is given up. It can be raised anywhere in the body of the `async with`.
    """
    loop = asyncio.get_running_loop()
    open_exchange = Exchange(engine, timeouts, config, elsewhere, expected_s)
    failure: EngineFailedError | None = None
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal failure, timer
        now = ran_s()
        timer.cancel()
        if failure is not None or open_exchange._complete:
            return
        if not is_behind():  # else the bytes that have come are read first
            failure = open_exchange.silence(now)
            if failure is None and companion is not None and not open_exchange.begun:
                failure = companion.refused(now)
        if failure is None:
            timer = loop.call_later(config.look_s, look)
        else:
            scope.reschedule(loop.time())

    timer = loop.call_later(config.look_s, look)
    try:
        async with asyncio.timeout(None) as scope:
            open_exchange._scope = scope
            if companion is not None:
                companion.on_failure = look
            try:
                with engine.serving():
                    await open_exchange._open(connections, call)
                    yield open_exchange
            finally:
                timer.cancel()
                if companion is not None:
                    companion.on_failure = _nothing
                open_exchange._close()
    except TimeoutError:
        if failure is None:
            raise
        raise failure from None


async def raise_for_status(answer: Exchange, *, only: int | None = None) -> None:
    """Raise the error that a status stands for.

    Args:
        only: the only status that is not an error. None: 2xx is not an error, and 4xx except 429 is the client's error. A
            redirection is an error of the engine: it would show the client where engines are.

    Raises:
        OverloadedError: 429 or 503. EngineFailedError: any other error.
    """
    status = answer.status
    if status in OVERLOADED:
        raise OverloadedError(status, await excerpt(answer), retry_after_s(answer.headers))
    if status in REFUSES and only not in (None, status):
        raise RefusedError(status, await answer.read_all())
    if status // 100 not in (2, 4) or only not in (None, status):
        accepted = only is None
        message = f"{status}: {await excerpt(answer)}"
        raise EngineFailedError(f"status_{status}", message, accepted=accepted)


async def excerpt(open_exchange: Exchange) -> str:
    """The start of an error answer, on one line; empty if the answer cannot be read."""
    text = b""
    with suppress(EngineFailedError):
        while len(text) < EXCERPT_BYTES and (chunk := await open_exchange.read()):
            text += chunk
    return " ".join(text[:EXCERPT_BYTES].decode("utf-8", "replace").split())


def _nothing() -> None:
    pass
