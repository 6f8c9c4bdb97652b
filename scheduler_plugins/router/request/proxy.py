# SPDX-License-Identifier: Apache-2.0
"""The life of one client request: attempts on engines until one answers, or none is left."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from scheduler_plugins.qos.trust import HEADER as CLASS_HEADER
from scheduler_plugins.qos.trust import signed
from scheduler_plugins.router.client.answers import REQUEST_ID
from scheduler_plugins.router.client.downstream import Downstream
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.exchange import (
    EngineCall,
    EngineFailedError,
    Exchange,
    OverloadedError,
    ResponseTimeouts,
    exchange,
    raise_for_status,
)
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.engines.ranks import for_rank, rank_of_prefill
from scheduler_plugins.router.handoff import engine_bodies
from scheduler_plugins.router.handoff.prefill import PrefillCopy, PrefillRefusedError, as_told
from scheduler_plugins.router.handoff.prompt_ids import NotTokenizedError, prompt_ids
from scheduler_plugins.router.index.hashes import token_bytes, token_list
from scheduler_plugins.router.index.prefixes import PromptKeys
from scheduler_plugins.router.policies.base import Request
from scheduler_plugins.router.prompt.body import (
    COMPLETIONS,
    GENERATES_ALONE,
    ONE_ENGINE,
    encode,
    with_tokens,
)
from scheduler_plugins.router.prompt.describe import describe
from scheduler_plugins.router.request.decision import next_attempt
from scheduler_plugins.router.request.responder import Responder
from scheduler_plugins.router.request.resume import StreamRecord, resumable
from scheduler_plugins.router.request.shared import Shared
from scheduler_plugins.router.request.tail import cut_to_whole_characters
from scheduler_plugins.router.request.turns import wait_for_turn
from scheduler_plugins.router.routing.attempt import AllOverloadedError, Attempt, UnavailableError
from scheduler_plugins.router.routing.candidates import Candidates
from scheduler_plugins.router.routing.promises import promised
from scheduler_plugins.router.tokens.prompt_tokens import NOT_TOKENIZED, Tokenized

logger = logging.getLogger(__name__)


class ClientRequest:
    """One request to `/v1/completions`, to `/v1/chat/completions`, or to an endpoint that one engine serves."""

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
        self._one_engine = request.path in ONE_ENGINE
        resumes = not self._one_engine and resumable(parsed)
        self._record = StreamRecord(parsed, request.path) if resumes else None
        """What the client was sent of a stream that another engine could go on with."""
        self._request = self._described()
        if self._config.router_key:
            key = self._config.router_key.encode()
            headers[CLASS_HEADER] = signed(self._request.qos, self._request_id, key)
        self._client = Downstream(request, shared.config.idle_timeout_s)
        self._responder = Responder(
            self._client,
            self._request_id,
            shared.metrics,
            self._arrived,
            end_mark=not self._one_engine,
        )
        self._candidates = Candidates(
            shared.pool,
            shared.config.attempts,
            parsed,
            endpoint=self._path if self._one_engine else "",
        )
        self._ids: list[int] | None = None
        self.trace = shared.tracing.request(headers, request.path, self._request_id)
        """Its spans; whoever serves it finishes them."""

    @property
    def begun(self) -> bool:
        """Whether the client has been sent anything."""
        return self._client.begun

    @property
    def ended(self) -> bool:
        """Whether the client has been sent all of its answer."""
        return self._client.ended

    async def serve(self) -> tuple[web.StreamResponse, str]:
        """Answer the client. Returns the response and the outcome for the metrics.

        Raises:
            UnavailableError: no engine could, and nothing has been sent.
            AllOverloadedError: the same, and some engine only lacked room.
            BadRequestError: no engine of the router's ever answers such a request.
            ClientGoneError: there is nobody to answer any more.
        """
        self._shared.retries.request()
        await self._tokenize()
        if self._config.front_queue:
            await wait_for_turn(self._shared, self._request)
        try:
            return await self._served()
        except (UnavailableError, AllOverloadedError) as error:
            if not self._client.begun:
                raise
            logger.warning("request %s: %s", self._request_id, error)
            return await self.interrupt("no engine could go on"), "interrupted"

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
                to_blame = self._to_blame(attempt, failure)
                if to_blame:
                    self._shared.pool.report_failure(attempt.answering, failure)
                if self._client.begun and self._record is not None:
                    if (ending := self._record.ending()) is not None:
                        return await self._responder.end(ending), "ok"
                    if await self._goes_on(attempt, failure):
                        continue
                if self._client.begun:
                    # The failure's own words may name the engine; the log has them.
                    why = f"a {attempt.answering.role} engine failed ({failure.cause})"
                    return await self.interrupt(why), "interrupted"
                self._shared.metrics.retries.labels(failure.cause).inc()
                self._candidates.failed(attempt, failure)
                if to_blame and failure.accepted and not self._shared.retries.allows(failure.cause):
                    logger.warning("request %s: no retry, the budget is used up", self._request_id)
                    break
        raise self._candidates.exhausted()

    def _to_blame(self, attempt: Attempt, failure: EngineFailedError) -> bool:
        """Whether the answering engine is; not for lack of room, nor if it only says that it got no KV: a prefill engine dies
        with that of all its requests."""
        if isinstance(failure, PrefillRefusedError | OverloadedError):
            return False
        return not (failure.answered and self._candidates.lost_prefill(attempt))

    async def _goes_on(self, attempt: Attempt, failure: EngineFailedError) -> bool:
        """Whether the stream can go on at another engine; the next attempt asks for the rest then."""
        record = self._record
        if record is None or record.next_body() is None:
            return False
        self._candidates.failed(attempt, failure)
        able = self._candidates.able(begun=True)
        if able is None:
            return False
        engine, model = able.decode[0], self._body.get("model")
        whole = await cut_to_whole_characters(record, engine, self._shared, self._headers, model)
        rest = record.next_body()
        if not whole or rest is None:
            return False
        record.resume()
        if "messages" not in rest:
            self._body, self._path, self._ids = rest, COMPLETIONS, None
            self._request = self._request._replace(
                tokens=len(rest["prompt"]),
                hashes=PromptKeys((), token_bytes(rest["prompt"])),
                max_tokens=rest["max_tokens"] or self._request.max_tokens,
            )
        self._shared.metrics.resumed.inc()
        logger.warning("request %s: its stream goes on at another engine", self._request_id)
        return True

    def _described(self, known: Tokenized = NOT_TOKENIZED) -> Request:
        """The request as policies see it, with what its class is promised."""
        found = describe(
            self._body,
            self._headers,
            self._request_id,
            self._arrived,
            self._shared.lengths,
            known.tokens,
            known.adapter,
        )
        found = promised(found, self._config, self._headers)
        generates = not self._one_engine or self._path in GENERATES_ALONE
        return found if generates else found._replace(max_tokens=1, tpot_slo_s=inf)

    async def _tokenize(self) -> None:
        """Learn the prompt's tokens, where engines are told apart by them."""
        if self._one_engine:
            return
        found = await self._shared.tokens.of(self._body)
        if found.tokens is not None:
            self._request = self._described(found)
            if found.certain:
                self._body = with_tokens(self._body, token_list(found.tokens))

    async def _next_attempt(self) -> Attempt | None:
        """See `next_attempt`."""
        return await next_attempt(
            self._shared, self._candidates, self._request, self._arrived, begun=self._client.begun
        )

    async def _try(self, attempt: Attempt) -> tuple[web.StreamResponse, str]:
        request, circuit = self._request, attempt.answering.circuit
        circuit.sent()
        try:
            with attempt.answering.decoding(uuid.uuid4().hex, request.tokens, request.max_tokens):
                return await self._send(attempt)
        finally:
            circuit.given_up()

    async def _send(self, attempt: Attempt) -> tuple[web.StreamResponse, str]:
        prefill = attempt.prefill
        if prefill is None or prefill.address is None:
            alone = engine_bodies.alone(self._asked(attempt.answering))
            call = self._call("decode", attempt.answering, self._path, alone)
            call = for_rank(call, attempt.answering, self._request, self._shared.pool.prefixes)
            async with self._answer(attempt.answering, call, None) as answer:
                return await self._pass_on(answer, attempt)
        rank = rank_of_prefill(prefill, self._request, self._shared.pool.prefixes, self._headers)
        try:
            plan = await self._handoff(attempt.answering, prefill, rank)
        except NotTokenizedError as error:
            return await self._responder.refuse(error), "client_error"
        call = self._call("decode", attempt.answering, self._path, plan.decode)
        copy = PrefillCopy(
            prefill,
            self._call("prefill", prefill, plan.path, plan.prefill),
            rank,
            self._shared.pool,
            self._shared.connections,
            self._shared.config,
            self._request.tokens,
            attempt.fresh_tokens,
            self._request.hashes,
            lambda: self._candidates.other_prefill(prefill),
        )
        copy.on_end = lambda failure: self.trace.end(
            "prefill", "" if failure is None else failure.cause
        )
        lender = copy if plan.lends_logprobs else None
        client_error = False
        try:
            async with copy, self._answer(attempt.answering, call, copy) as answer:
                client_error = 400 <= answer.status < 500
                return await self._pass_on(answer, attempt, lender)
        finally:
            # A request that is wrong in itself fails on both sides, which says nothing about P.
            if copy.failure is not None and not client_error:
                self._note_prefill(copy.engine, copy.failure)

    async def _handoff(
        self, decode: BackendEngine, prefill: BackendEngine, rank: int | None
    ) -> engine_bodies.Handoff:
        """What both engines are sent. Raises NotTokenizedError, EngineFailedError."""
        asked = as_told(prefill, rank)
        if asked.kind is (decode.kind or Kind.VLLM):
            return engine_bodies.of_one_kind(self._asked(decode), self._path, asked)
        if self._ids is None:
            self._ids = await prompt_ids(
                self._shared.connections, decode, self._body, self._headers, self._config
            )
        return engine_bodies.of_two_kinds(self._asked(decode), asked, self._ids)

    def _note_prefill(self, engine: BackendEngine, failure: EngineFailedError) -> None:
        """A prefill engine failed its copy: the next attempt uses another one."""
        self._candidates.prefill_failed(engine, failure)
        self._shared.metrics.prefill_failures.labels(failure.cause).inc()
        logger.warning(
            "request %s: prefill on %s failed: %s", self._request_id, engine.url, failure
        )

    def _asked(self, engine: BackendEngine) -> dict[str, Any]:
        """What the answering engine is asked: the client's request, and for the ids that a resumption needs."""
        if self._record is None or engine.kind is Kind.SGLANG:
            return self._body
        return {**self._body, **self._record.asks}

    def _call(
        self, part: str, engine: BackendEngine, path: str, content: dict[str, Any]
    ) -> EngineCall:
        headers = self.trace.begin(part, engine.url, self._headers)
        return EngineCall("POST", path, headers, encode(content))

    @asynccontextmanager
    async def _answer(
        self, engine: BackendEngine, call: EngineCall, copy: PrefillCopy | None
    ) -> AsyncIterator[Exchange]:
        """The engine's answer, once it is one that the client should see."""
        config = self._config
        first_byte_s = config.first_byte_timeout_s if self._streams else config.answer_timeout_s
        timeouts = ResponseTimeouts(first_byte_s, config.idle_timeout_s)
        if copy is not None:
            await asyncio.sleep(0)  # the copy goes out first: the decode engine waits for its KV
        async with exchange(
            self._shared.connections, engine, call, timeouts, config, copy
        ) as answer:
            await raise_for_status(answer)
            yield answer

    async def _pass_on(
        self, answer: Exchange, attempt: Attempt, lender: PrefillCopy | None = None
    ) -> tuple[web.StreamResponse, str]:
        def served() -> None:
            self.trace.answered()
            attempt.answering.circuit.succeeded()
            self._shared.pool.prefilled(attempt.answering, self._request.hashes)
            if self._streams and attempt.expected_s is not None:
                self._shared.came(self._request, attempt.expected_s, self._arrived)

        return await self._responder.pass_on(answer, attempt.flow, lender, self._record, served)
