# SPDX-License-Identifier: Apache-2.0
"""One attempt: sends the requests to the chosen engines, and passes one answer to the client."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from scheduler_plugins.qos.trust import HEADER as CLASS_HEADER
from scheduler_plugins.qos.trust import class_key, signed
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.exchange import (
    REFUSES,
    EngineCall,
    Exchange,
    ResponseTimeouts,
    exchange,
    raise_for_status,
)
from scheduler_plugins.router.engines.failures import EngineFailedError, RefusedError
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.engines.ranks import for_rank, rank_of_prefill
from scheduler_plugins.router.handoff import engine_bodies
from scheduler_plugins.router.handoff.prefill import HandoffFailedError, PrefillCopy, prefill_side
from scheduler_plugins.router.handoff.prompt_ids import prompt_ids
from scheduler_plugins.router.prompt.body import encode
from scheduler_plugins.router.request.client_request import ParsedRequest
from scheduler_plugins.router.request.pace import Pace
from scheduler_plugins.router.request.request_events import RequestEvents
from scheduler_plugins.router.request.responder import Responder
from scheduler_plugins.router.request.resume import AnswerRecord
from scheduler_plugins.router.request.shared import Shared
from scheduler_plugins.router.routing.attempt import Attempt
from scheduler_plugins.router.routing.candidates import Candidates
from scheduler_plugins.router.tracing import Trace

logger = logging.getLogger(__name__)


class Dispatch:
    """Makes the attempts of one request. `proxy` and `decision` decide on further attempts and their engines."""

    def __init__(
        self,
        shared: Shared,
        parsed: ParsedRequest,
        candidates: Candidates,
        responder: Responder,
        record: AnswerRecord | None,
        spans: Trace,
        noticed: RequestEvents,
    ) -> None:
        """Send nothing yet.

        Args:
            candidates: learns of a prefill engine that fails.
            record: notes the sent part of a stream that another engine can go on with.
        """
        self._shared = shared
        self._config = shared.config
        self._parsed = parsed
        self._candidates = candidates
        self._responder = responder
        self._record = record
        self._spans = spans
        self._noticed = noticed

    async def make(self, attempt: Attempt) -> tuple[web.StreamResponse, str]:
        """Answer the client. Returns the response and the outcome for the metrics.

        Raises:
            EngineFailedError: the answering engine failed, or it waits for a prefill engine that failed.
            ClientGoneError: the client has left.
        """
        request, circuit = self._parsed.request, attempt.answering.circuit
        circuit.sent()
        try:
            with attempt.answering.decoding(uuid.uuid4().hex, request.tokens, request.max_tokens):
                if attempt.prefill is None or attempt.prefill.address is None:
                    return await self._by_one(attempt)
                return await self._by_pair(attempt, attempt.prefill)
        finally:
            circuit.given_up()

    async def _by_one(self, attempt: Attempt) -> tuple[web.StreamResponse, str]:
        engine = attempt.answering
        call = self._call(
            "decode", engine, self._parsed.path, engine_bodies.alone(self._body(engine))
        )
        call = for_rank(call, engine, self._parsed.request, self._shared.pool.prefixes)
        async with self._answer(engine, call, None) as answer:
            return await self._pass_on(answer, attempt)

    async def _by_pair(
        self, attempt: Attempt, prefill: BackendEngine
    ) -> tuple[web.StreamResponse, str]:
        parsed, pool = self._parsed, self._shared.pool
        rank = rank_of_prefill(prefill, parsed.request, pool.prefixes, parsed.headers)
        try:
            plan = await self._handoff(attempt.answering, prefill, rank)
        except RefusedError as error:
            return await self._responder.refuse(error), "client_error"
        call = self._call("decode", attempt.answering, parsed.path, plan.decode)
        copy = PrefillCopy(
            prefill,
            self._call("prefill", prefill, plan.path, plan.prefill),
            rank,
            pool,
            self._shared.connections,
            self._shared.config,
            parsed.request.tokens,
            attempt.fresh_tokens,
            parsed.request.hashes,
            lambda: self._candidates.other_prefill(prefill),
        )

        def ended(failure: EngineFailedError | None) -> None:
            self._spans.end("prefill", "" if failure is None else failure.cause)
            if failure is None and copy.answered and not parsed.streams:
                # The client cannot tell when the first token of such an answer has come.
                self._noticed.first_token(attempt.fresh_tokens)

        copy.on_end = ended
        copy.top_logprobs = plan.lends_logprobs
        client_error = False
        try:
            async with copy, self._answer(attempt.answering, call, copy) as answer:
                client_error = 400 <= answer.status < 500
                return await self._pass_on(answer, attempt, copy)
        finally:
            # A wrong request fails on both sides, so the prefill engine is not to blame.
            if copy.failure is not None and not client_error:
                self._note_prefill(copy.engine, copy.failure)

    async def _handoff(
        self, decode: BackendEngine, prefill: BackendEngine, rank: int | None
    ) -> engine_bodies.Handoff:
        """The requests to both engines. Raises RefusedError, EngineFailedError."""
        parsed, side = self._parsed, prefill_side(prefill, rank)
        if side.kind is (decode.kind or Kind.VLLM):
            return engine_bodies.of_one_kind(self._body(decode, prefill), parsed.path, side)
        if parsed.ids is None:
            parsed.ids = await prompt_ids(
                self._shared.connections,
                decode,
                parsed.body_for(decode),
                parsed.headers,
                self._config,
            )
        return engine_bodies.of_two_kinds(self._body(decode), side, parsed.ids)

    def _note_prefill(self, engine: BackendEngine, failure: EngineFailedError) -> None:
        """A prefill engine failed its copy of the request: the next attempt uses another one."""
        if not isinstance(failure, HandoffFailedError):
            self._candidates.prefill_failed(engine, failure)
        # The answering engine has accepted the request, so the refusal counts against the prefill engine.
        if failure.blames_request and not isinstance(failure, RefusedError):
            self._shared.pool.report_failure(engine, failure)
        self._shared.metrics.prefill_failures.labels(failure.cause).inc()
        logger.warning("request %s: prefill on %s failed: %s", self._parsed.id, engine.url, failure)

    def _body(self, engine: BackendEngine, *besides: BackendEngine) -> dict[str, Any]:
        """The body for the answering engine. It also asks for the ids that a resumption needs. `besides`: engines
        that get the same body."""
        body = self._parsed.body_for(engine, *besides)
        if self._record is None or engine.kind is Kind.SGLANG:
            return body
        return {**body, **self._record.asks}

    def _call(
        self, part: str, engine: BackendEngine, path: str, content: dict[str, Any]
    ) -> EngineCall:
        headers = CIMultiDict(self._spans.begin(part, engine.url, self._parsed.headers))
        if key := class_key(self._config.router_key):
            headers[CLASS_HEADER] = signed(self._parsed.request.qos, self._parsed.id, key)
        return EngineCall("POST", path, headers, encode(content))

    @asynccontextmanager
    async def _answer(
        self, engine: BackendEngine, call: EngineCall, copy: PrefillCopy | None
    ) -> AsyncIterator[Exchange]:
        """The engine's answer, once its status is fit for the client."""
        config = self._config
        streams = self._parsed.streams
        first_byte_s = config.first_byte_timeout_s if streams else config.answer_timeout_s
        timeouts = ResponseTimeouts(first_byte_s, config.idle_timeout_s)
        if copy is not None:
            await asyncio.sleep(0)  # send the copy first: the decode engine waits for its KV
        async with exchange(
            self._shared.connections,
            engine,
            call,
            timeouts,
            config,
            copy,
            elsewhere=self._can_go_elsewhere,
        ) as answer:
            await raise_for_status(answer)
            if answer.status in REFUSES and self._candidates.longer(engine):
                raise RefusedError(answer.status, await answer.read_all())
            yield answer

    def _can_go_elsewhere(self) -> bool:
        """Whether another engine can give the answer, or its rest."""
        begun = self._responder.begun
        if begun and (self._record is None or self._record.next_body() is None):
            return False
        return self._candidates.has_other(begun=begun)

    async def _pass_on(
        self, answer: Exchange, attempt: Attempt, copy: PrefillCopy | None = None
    ) -> tuple[web.StreamResponse, str]:
        parsed = self._parsed
        if self._record is not None and not self._record.resumed:
            self._record.context_tokens = attempt.answering.context_tokens

        def served() -> None:
            self._spans.answered()
            attempt.answering.circuit.succeeded()
            self._shared.pool.prefilled(attempt.answering, parsed.request.hashes)
            fresh = parsed.request.tokens if attempt.prefill is None else attempt.fresh_tokens
            self._noticed.first_token(fresh)
            if parsed.streams and attempt.expected_s is not None:
                self._shared.came(parsed.request, attempt.expected_s, parsed.arrived)

        pace = Pace(attempt.answering, self._record, self._shared.pool.learnt)
        response, outcome = await self._responder.pass_on(
            answer, attempt.flow, copy, self._record, served, pace
        )
        if outcome == "ok":
            self._noticed.answered(pace.tokens)
        return response, outcome
