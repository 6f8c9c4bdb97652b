# SPDX-License-Identifier: Apache-2.0
"""The life of one client request: attempts on engines until one answers, or none is left."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Never

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from scheduler_plugins.router import body
from scheduler_plugins.router.answers import (
    EVENT_STREAM,
    REQUEST_ID,
    EventCutter,
    error_event,
    headers_to_client,
)
from scheduler_plugins.router.config import RouterConfig
from scheduler_plugins.router.engines import BackendEngine, Role
from scheduler_plugins.router.exchange import (
    EngineCall,
    EngineFailedError,
    Exchange,
    ResponseTimeouts,
    excerpt,
    exchange,
)
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.policy import RouterPolicy
from scheduler_plugins.router.pool import EnginePool
from scheduler_plugins.router.prefill import PrefillCopy, PrefillRefusedError

logger = logging.getLogger(__name__)


class ClientGoneError(Exception):
    """The client closed its connection, or stopped reading."""


class UnavailableError(Exception):
    """No engine could serve the request; `engines` says for each what was the matter."""

    def __init__(self, engines: list[dict[str, str]]) -> None:
        tried = "; ".join(f"{e['url']} ({e['role']}): {e['reason']}" for e in engines)
        super().__init__(f"no engine could serve the request: {tried}")
        self.engines = engines


@dataclass(frozen=True)
class Shared:
    """What all requests of one router share."""

    config: RouterConfig
    pool: EnginePool
    session: aiohttp.ClientSession
    metrics: Metrics
    policies: dict[Role, RouterPolicy]


@dataclass(frozen=True)
class Attempt:
    """Who answers the client, and who prefills for it."""

    answering: BackendEngine
    prefill: BackendEngine | None
    cause: str
    """Why there is no prefill engine; empty if there is one."""

    @property
    def flow(self) -> str:
        if self.prefill is not None:
            return "disaggregated"
        return "decode_alone" if self.answering.role is Role.DECODE else "prefill_alone"


class ClientRequest:
    """One request to `/v1/completions` or `/v1/chat/completions`."""

    def __init__(
        self,
        shared: Shared,
        request: web.Request,
        headers: CIMultiDict[str],
        parsed: dict[str, Any],
    ) -> None:
        self._shared = shared
        self._config = shared.config
        self._request = request
        self._headers = headers
        self._request_id: str = headers[REQUEST_ID]
        self._body = parsed
        self._streams = bool(parsed.get("stream"))
        self._arrived = asyncio.get_running_loop().time()
        self._response: web.StreamResponse | None = None
        self._failed: dict[BackendEngine, str] = {}
        self._no_prefill: set[BackendEngine] = set()
        self._accepted = 0
        self._single_cause = body.why_not_disaggregated(parsed)

    @property
    def begun(self) -> bool:
        """Whether the client has been sent anything."""
        return self._response is not None

    async def serve(self) -> tuple[web.StreamResponse, str]:
        """Answer the client. Returns the response and the outcome for the metrics.

        Raises:
            UnavailableError: no engine could, and nothing has been sent.
            ClientGoneError: there is nobody to answer any more.
        """
        while (attempt := self._next_attempt()) is not None:
            self._shared.metrics.flows.labels(attempt.flow, attempt.cause).inc()
            try:
                return await self._try(attempt)
            except EngineFailedError as failure:
                logger.warning(
                    "request %s: %s (%s) failed: %s",
                    self._request_id,
                    attempt.answering.url,
                    attempt.answering.role,
                    failure,
                )
                if not isinstance(failure, PrefillRefusedError):
                    self._shared.pool.report_failure(attempt.answering, failure)
                if self._response is not None:
                    return await self._interrupt(self._response, attempt.answering, failure)
                self._note(attempt, failure)
        raise UnavailableError(self._reasons())

    def _next_attempt(self) -> Attempt | None:
        if self._accepted >= self._config.attempts:
            return None
        pool, policies = self._shared.pool, self._shared.policies
        decode = pool.up(Role.DECODE, besides=self._failed)
        prefill = pool.up(Role.PREFILL, besides=self._failed)
        if not decode:
            if not prefill:
                return None
            return Attempt(policies[Role.PREFILL].choose(prefill), None, "no_decode")
        answering = policies[Role.DECODE].choose(decode)
        if self._single_cause is not None:
            return Attempt(answering, None, self._single_cause)
        able = [e for e in prefill if e.address is not None and e not in self._no_prefill]
        if able:
            return Attempt(answering, policies[Role.PREFILL].choose(able), "")
        return Attempt(answering, None, "no_address" if prefill else "no_prefill")

    def _note(self, attempt: Attempt, failure: EngineFailedError) -> None:
        self._shared.metrics.retries.labels(failure.cause).inc()
        if isinstance(failure, PrefillRefusedError):
            self._single_cause = failure.cause
            return
        self._failed[attempt.answering] = str(failure)
        self._accepted += failure.accepted

    async def _try(self, attempt: Attempt) -> tuple[web.StreamResponse, str]:
        if attempt.prefill is None or attempt.prefill.address is None:
            call = self._call(body.single_engine_copy(self._body))
            async with self._answer(attempt.answering, call, None) as answer:
                return await self._pass_on(answer, attempt)
        transfer = uuid.uuid4().hex
        call = self._call(body.decode_copy(self._body, attempt.prefill.address, transfer))
        shared = self._shared
        copy = PrefillCopy(
            attempt.prefill,
            self._call(body.prefill_copy(self._body, transfer)),
            shared.pool,
            shared.session,
            shared.config,
        )
        client_error = False
        try:
            async with copy, self._answer(attempt.answering, call, copy) as answer:
                client_error = 400 <= answer.status < 500
                return await self._pass_on(answer, attempt)
        finally:
            # A request that is wrong in itself fails on both sides, which says nothing about P.
            if copy.failure is not None and not client_error:
                self._no_prefill.add(copy.engine)
                shared.metrics.prefill_failures.labels(copy.failure.cause).inc()
                logger.warning(
                    "request %s: prefill on %s failed: %s",
                    self._request_id,
                    copy.engine.url,
                    copy.failure,
                )

    def _call(self, content: dict[str, Any]) -> EngineCall:
        return EngineCall("POST", self._request.path, self._headers, body.encode(content))

    @asynccontextmanager
    async def _answer(
        self, engine: BackendEngine, call: EngineCall, copy: PrefillCopy | None
    ) -> AsyncIterator[Exchange]:
        """The engine's answer, once it is one that the client should see."""
        config = self._config
        first_byte_s = config.first_byte_timeout_s if self._streams else config.answer_timeout_s
        timeouts = ResponseTimeouts(first_byte_s, config.idle_timeout_s)
        give_up = copy.refused if copy is not None else _never
        async with exchange(
            self._shared.session, engine, call, timeouts, config, give_up
        ) as answer:
            if answer.status >= 500:
                said = await excerpt(answer)
                raise EngineFailedError(f"status_{answer.status}", f"{answer.status}: {said}")
            yield answer

    async def _pass_on(self, answer: Exchange, attempt: Attempt) -> tuple[web.StreamResponse, str]:
        kind = answer.headers.get("Content-Type", "")
        if answer.status == 200 and kind.startswith(EVENT_STREAM):
            return await self._stream(answer, attempt), "ok"
        # Held until it is whole: should the engine die halfway, another one can still answer.
        content = await answer.read_all()
        response = web.StreamResponse(status=answer.status, headers=self._returned(answer))
        response.content_length = len(content)
        await self._begin(response)
        await self._write(response, content)
        await self._finish(response)
        return response, "ok" if answer.status < 400 else "client_error"

    async def _stream(self, answer: Exchange, attempt: Attempt) -> web.StreamResponse:
        cutter = EventCutter()
        response = web.StreamResponse(status=answer.status, headers=self._returned(answer))
        while chunk := await answer.read():
            if events := cutter.feed(chunk):
                if self._response is None:
                    await self._begin(response)
                    first_s = asyncio.get_running_loop().time() - self._arrived
                    self._shared.metrics.first_token_s.labels(attempt.flow).observe(first_s)
                await self._write(response, events)
        rest = cutter.rest()
        if not cutter.finished:
            raise EngineFailedError("truncated", "the stream ended without its end mark [DONE]")
        if rest:
            await self._begin(response)
            await self._write(response, rest)
        await self._finish(response)
        return response

    def _returned(self, answer: Exchange) -> CIMultiDict[str]:
        return headers_to_client(answer.headers, self._request_id)

    async def _interrupt(
        self, response: web.StreamResponse, engine: BackendEngine, failure: EngineFailedError
    ) -> tuple[web.StreamResponse, str]:
        """End a stream whose beginning the client has: say so, and close the connection."""
        message = f"the stream broke off: {engine.url} ({engine.role}): {failure}"
        response.force_close()
        await self._write(response, error_event(message))
        await self._finish(response)
        return response, "interrupted"

    async def _begin(self, response: web.StreamResponse) -> None:
        if self._response is None:
            self._response = response
            try:
                await response.prepare(self._request)
            except OSError:
                _gone("the client closed its connection")

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        await self._to_client(response.write(data))

    async def _finish(self, response: web.StreamResponse) -> None:
        await self._to_client(response.write_eof())

    async def _to_client(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._config.idle_timeout_s):
                await writing
        except TimeoutError:
            _gone(f"the client read nothing for {self._config.idle_timeout_s:g} s")
        except OSError:
            _gone("the client closed its connection")

    def _reasons(self) -> list[dict[str, str]]:
        """Every engine and why it did not serve this request."""
        left = f"not tried: {self._config.attempts} engines had failed (setting attempts)"
        return [
            {
                "url": engine.url,
                "role": engine.role,
                "tried": "yes" if engine in self._failed else "no",
                "reason": self._failed.get(engine) or (left if engine.up else engine.reason),
            }
            for engine in self._shared.pool.engines
        ]


def _never(now: float) -> None:
    return None


def _gone(message: str) -> Never:
    raise ClientGoneError(message) from None
