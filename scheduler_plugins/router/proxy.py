# SPDX-License-Identifier: Apache-2.0
"""The life of one client request: attempts on engines until one answers, or none is left."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from scheduler_plugins.admission.prompt import PromptMemory
from scheduler_plugins.router import body
from scheduler_plugins.router.answers import (
    EVENT_STREAM,
    REQUEST_ID,
    EventCutter,
    headers_to_client,
)
from scheduler_plugins.router.attempt import (
    AbleEngines,
    AllOverloadedError,
    Attempt,
    RejectedError,
    UnavailableError,
)
from scheduler_plugins.router.circuit import RetryBudget
from scheduler_plugins.router.config import RouterConfig
from scheduler_plugins.router.describe import describe
from scheduler_plugins.router.downstream import Downstream
from scheduler_plugins.router.engines import BackendEngine, Role
from scheduler_plugins.router.exchange import (
    EngineCall,
    EngineFailedError,
    Exchange,
    OverloadedError,
    ResponseTimeouts,
    excerpt,
    exchange,
    raise_for_status,
)
from scheduler_plugins.router.index.hashes import token_bytes, token_list
from scheduler_plugins.router.index.prefixes import PromptKeys
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.policies.base import Defer, Policy, Reject, cached_tokens
from scheduler_plugins.router.pool import EnginePool
from scheduler_plugins.router.prefill import PrefillCopy, PrefillRefusedError
from scheduler_plugins.router.resume import StreamRecord, resumable
from scheduler_plugins.router.tokens import NOT_TOKENIZED, PromptTokens
from scheduler_plugins.router.view import LiveView

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shared:
    """What all requests of one router share."""

    config: RouterConfig
    pool: EnginePool
    session: aiohttp.ClientSession
    metrics: Metrics
    policy: Policy
    tokens: PromptTokens
    """The tokens of prompts."""
    lengths: PromptMemory = field(default_factory=lambda: PromptMemory(0))
    """How many tokens a text has."""
    retries: RetryBudget = field(default_factory=RetryBudget)
    random: Random = field(default_factory=Random)


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
        self._path = request.path
        self._headers = headers
        self._request_id: str = headers[REQUEST_ID]
        self._body = parsed
        self._streams = bool(parsed.get("stream"))
        self._arrived = asyncio.get_running_loop().time()
        self._tokenized = NOT_TOKENIZED
        self._record = StreamRecord(parsed, request.path) if resumable(parsed) else None
        """What the client was sent of a stream that another engine could go on with."""
        self._request = describe(
            parsed, headers, headers[REQUEST_ID], self._arrived, shared.lengths
        )
        self._client = Downstream(request, shared.config.idle_timeout_s)
        self._failed: dict[BackendEngine, EngineFailedError] = {}
        self._no_prefill: set[BackendEngine] = set()
        self._retry_after_s: dict[BackendEngine, int] = {}
        """Engines that are overloaded, and when they want to be asked again."""
        self._accepted = 0
        self._single_cause = body.why_not_disaggregated(parsed)

    @property
    def begun(self) -> bool:
        """Whether the client has been sent anything."""
        return self._client.begun

    async def serve(self) -> tuple[web.StreamResponse, str]:
        """Answer the client. Returns the response and the outcome for the metrics.

        Raises:
            UnavailableError: no engine could, and nothing has been sent.
            AllOverloadedError: the same, and some engine only lacked room.
            ClientGoneError: there is nobody to answer any more.
        """
        self._shared.retries.request()
        await self._tokenize()
        try:
            return await self._served()
        except (UnavailableError, AllOverloadedError) as error:
            if not self._client.begun:
                raise
            return await self.interrupt(str(error)), "interrupted"

    async def interrupt(self, why: str) -> web.StreamResponse:
        """End a stream that has begun with an error event."""
        message = f"the stream broke off: {why}; request {self._request_id}"
        return await self._client.interrupt(message)

    async def _served(self) -> tuple[web.StreamResponse, str]:
        while (attempt := await self._next_attempt()) is not None:
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
                if not isinstance(failure, PrefillRefusedError | OverloadedError):
                    self._shared.pool.report_failure(attempt.answering, failure)
                if self._client.begun and self._goes_on(attempt, failure):
                    continue
                if self._client.begun:
                    why = f"a {attempt.answering.role} engine failed: {failure}"
                    return await self.interrupt(why), "interrupted"
                self._note(attempt, failure)
                if failure.accepted and not self._shared.retries.allows(failure.cause):
                    logger.warning("request %s: no retry, the budget is used up", self._request_id)
                    break
        if self._retry_after_s and self._accepted < self._config.attempts:
            raise AllOverloadedError(min(self._retry_after_s.values()))
        raise UnavailableError(self._reasons())

    def _goes_on(self, attempt: Attempt, failure: EngineFailedError) -> bool:
        """Whether the stream can go on at another engine; the next attempt asks for the rest then."""
        record = self._record
        rest = record.next_body() if record is not None else None
        if record is None or rest is None:
            return False
        self._failed[attempt.answering] = failure
        self._accepted += failure.accepted
        if self._able() is None:
            return False
        record.resume()
        self._body, self._path, self._headers = rest, body.COMPLETIONS, self._headers.copy()
        tokens = token_bytes(rest["prompt"])
        self._request = self._request._replace(
            tokens=len(rest["prompt"]),
            hashes=PromptKeys((), tokens),
            max_tokens=rest["max_tokens"] or self._request.max_tokens,
        )
        self._shared.metrics.resumed.inc()
        logger.warning("request %s: its stream goes on at another engine", self._request_id)
        return True

    async def _tokenize(self) -> None:
        """Learn the prompt's tokens, where engines are told apart by them."""
        self._tokenized = found = await self._shared.tokens.of(self._body)
        if found.tokens is not None:
            self._request = describe(
                self._body,
                self._headers,
                self._request_id,
                self._arrived,
                self._shared.lengths,
                found.tokens,
                found.adapter,
            )
            if found.certain:
                self._body = body.with_tokens(self._body, token_list(found.tokens))

    async def _next_attempt(self) -> Attempt | None:
        """What the policy decides; None if no engine is left to ask, or all are overloaded.

        Raises:
            RejectedError: the policy turns the request away.
        """
        loop, shared = asyncio.get_running_loop(), self._shared
        while (engines := self._able()) is not None:
            now = loop.time()
            able = {Role.PREFILL: engines.prefill, Role.DECODE: engines.decode}
            view = LiveView(able, shared.pool.caches.prefixes, now)
            decision = shared.policy.decide(self._request, view, now, shared.random)
            if isinstance(decision, Reject):
                raise RejectedError(decision)
            if isinstance(decision, Defer):
                await asyncio.sleep(max(0.0, decision.until_s - now))
                continue
            answering = next(one for one in engines.decode if one.name == decision.d)
            if decision.p is None:
                return Attempt(answering, None, engines.cause or "policy")
            prefill = next(one for one in engines.prefill if one.name == decision.p)
            (blocks,) = view.match(self._request.hashes, [prefill])
            fresh_tokens = self._request.tokens - cached_tokens(self._request, prefill, blocks)
            return Attempt(answering, prefill, "", fresh_tokens)
        return None

    def _able(self) -> AbleEngines | None:
        """Engines that have not failed this request; None if there are none, or all are overloaded.

        An overloaded engine's work goes to another engine of its role only. If it went to the other
        role, an overload of one side would spread to both.
        """
        if self._accepted >= self._config.attempts:
            return None
        pool = self._shared.pool
        decode = pool.up(Role.DECODE, besides=self._failed)
        prefill = pool.up(Role.PREFILL, besides=self._failed)
        if not decode:
            if not prefill or self._overloaded(Role.DECODE):
                return None
            return AbleEngines(prefill, [], "no_decode")
        if self._single_cause is not None:
            return AbleEngines(decode, [], self._single_cause)
        able = [e for e in prefill if e.address is not None and e not in self._no_prefill]
        if able:
            return AbleEngines(decode, able, "")
        if self._overloaded(Role.PREFILL):
            return None
        if self._no_prefill:
            return AbleEngines(decode, [], "prefill_refused")
        return AbleEngines(decode, [], "no_address" if prefill else "no_prefill")

    def _overloaded(self, role: Role) -> bool:
        """Whether an engine of this side has turned the request away for lack of room."""
        return any(engine.role is role for engine in self._retry_after_s)

    def _note(self, attempt: Attempt, failure: EngineFailedError) -> None:
        """An attempt failed before the client was sent anything."""
        self._shared.metrics.retries.labels(failure.cause).inc()
        if isinstance(failure, PrefillRefusedError):
            return  # the decode engine may be asked again
        if isinstance(failure, OverloadedError):
            self._lacks_room(attempt.answering, failure)
        self._failed[attempt.answering] = failure
        self._accepted += failure.accepted

    async def _try(self, attempt: Attempt) -> tuple[web.StreamResponse, str]:
        request, circuit = self._request, attempt.answering.circuit
        circuit.sent()
        try:
            with attempt.answering.decoding(uuid.uuid4().hex, request.tokens, request.max_tokens):
                return await self._send(attempt)
        finally:
            circuit.given_up()

    async def _send(self, attempt: Attempt) -> tuple[web.StreamResponse, str]:
        if attempt.prefill is None or attempt.prefill.address is None:
            call = self._call(body.single_engine_copy(self._asked))
            async with self._answer(attempt.answering, call, None) as answer:
                return await self._pass_on(answer, attempt)
        transfer = uuid.uuid4().hex
        call = self._call(body.decode_copy(self._asked, attempt.prefill.address, transfer))
        copy = PrefillCopy(
            attempt.prefill,
            self._call(body.prefill_copy(self._body, transfer)),
            self._shared.pool,
            self._shared.session,
            self._shared.config,
            self._request.tokens,
            attempt.fresh_tokens,
            self._request.hashes,
            lambda: self._other_prefill(attempt.prefill),
        )
        client_error = False
        try:
            async with copy, self._answer(attempt.answering, call, copy) as answer:
                client_error = 400 <= answer.status < 500
                return await self._pass_on(answer, attempt)
        finally:
            # A request that is wrong in itself fails on both sides, which says nothing about P.
            if copy.failure is not None and not client_error:
                self._note_prefill(copy.engine, copy.failure)

    def _other_prefill(self, failed: BackendEngine | None) -> bool:
        """Whether another prefill engine could take the copy."""
        able = self._able()
        return able is not None and any(engine is not failed for engine in able.prefill)

    def _note_prefill(self, engine: BackendEngine, failure: EngineFailedError) -> None:
        """A prefill engine failed its copy: the next attempt uses another one."""
        self._no_prefill.add(engine)
        if isinstance(failure, OverloadedError):
            self._lacks_room(engine, failure)
        self._shared.metrics.prefill_failures.labels(failure.cause).inc()
        logger.warning(
            "request %s: prefill on %s failed: %s", self._request_id, engine.url, failure
        )

    def _lacks_room(self, engine: BackendEngine, failure: OverloadedError) -> None:
        self._retry_after_s[engine] = failure.retry_after_s
        engine.load.refused(asyncio.get_running_loop().time() + failure.retry_after_s)

    @property
    def _asked(self) -> dict[str, Any]:
        """What the answering engine is asked: the client's request, and for the ids that a resumption needs."""
        return {**self._body, **self._record.asks} if self._record is not None else self._body

    def _call(self, content: dict[str, Any]) -> EngineCall:
        return EngineCall("POST", self._path, self._headers, body.encode(content))

    @asynccontextmanager
    async def _answer(
        self, engine: BackendEngine, call: EngineCall, copy: PrefillCopy | None
    ) -> AsyncIterator[Exchange]:
        """The engine's answer, once it is one that the client should see."""
        config = self._config
        first_byte_s = config.first_byte_timeout_s if self._streams else config.answer_timeout_s
        timeouts = ResponseTimeouts(first_byte_s, config.idle_timeout_s)
        async with exchange(self._shared.session, engine, call, timeouts, config, copy) as answer:
            await raise_for_status(answer)
            yield answer

    async def _pass_on(self, answer: Exchange, attempt: Attempt) -> tuple[web.StreamResponse, str]:
        kind = answer.headers.get("Content-Type", "")
        if answer.status == 200 and kind.startswith(EVENT_STREAM):
            return await self._stream(answer, attempt), "ok"
        if self._client.begun:
            raise EngineFailedError("refused_rest", f"{answer.status}: {await excerpt(answer)}")
        # Held until it is whole: should the engine die halfway, another one can still answer.
        content = await answer.read_all()
        attempt.answering.circuit.succeeded()
        if answer.status == 200:
            self._shared.pool.prefilled(attempt.answering, self._request.hashes)
        response = web.StreamResponse(status=answer.status, headers=self._returned(answer))
        response.content_length = len(content)
        await self._client.begin(response)
        await self._client.write(content)
        outcome = "ok" if answer.status < 400 else "client_error"
        return await self._client.finish(), outcome

    async def _stream(self, answer: Exchange, attempt: Attempt) -> web.StreamResponse:
        cutter, client = EventCutter(), self._client
        response = web.StreamResponse(status=answer.status, headers=self._returned(answer))
        while chunk := await answer.read():
            if events := cutter.feed(chunk):
                attempt.answering.circuit.succeeded()
                if self._record is not None:
                    events = self._record.feed(events)
                if not client.begun:
                    await client.begin(response)
                    self._shared.pool.prefilled(attempt.answering, self._request.hashes)
                    first_s = asyncio.get_running_loop().time() - self._arrived
                    self._shared.metrics.first_token_s.labels(attempt.flow).observe(first_s)
                await client.write(events)
        rest = cutter.rest()
        if not cutter.finished:
            raise EngineFailedError("truncated", "the stream ended without its end mark [DONE]")
        if rest:
            await client.begin(response)
            await client.write(rest)
        return await client.finish()

    def _returned(self, answer: Exchange) -> CIMultiDict[str]:
        return headers_to_client(answer.headers, self._request_id)

    def _reasons(self) -> list[tuple[BackendEngine, str, str]]:
        """Every engine, and why it did not serve this request."""
        found = list[tuple[BackendEngine, str, str]]()
        for engine in self._shared.pool.engines:
            if failure := self._failed.get(engine):
                found.append((engine, failure.cause, str(failure)))
            elif engine.up:
                left = f"not tried: {self._config.attempts} engines had failed (setting attempts)"
                found.append((engine, "not_tried", left))
            else:
                found.append((engine, "down", engine.reason))
        return found
