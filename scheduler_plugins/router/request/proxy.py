# SPDX-License-Identifier: Apache-2.0
"""The life of one client request: attempts on engines until one answers, or none is left."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from scheduler_plugins.router.client.downstream import Downstream
from scheduler_plugins.router.engines.failures import EngineFailedError, OverloadedError
from scheduler_plugins.router.handoff.prefill import PrefillRefusedError
from scheduler_plugins.router.policies.base import Reject, Request
from scheduler_plugins.router.request.aborts import is_wanted_abort
from scheduler_plugins.router.request.client_request import ParsedRequest
from scheduler_plugins.router.request.decision import next_attempt
from scheduler_plugins.router.request.dispatch import Dispatch
from scheduler_plugins.router.request.request_events import RequestEvents
from scheduler_plugins.router.request.responder import Responder
from scheduler_plugins.router.request.resumable import cut_to_whole_characters, record_of
from scheduler_plugins.router.request.shared import Shared
from scheduler_plugins.router.routing.attempt import (
    AllOverloadedError,
    Attempt,
    RejectedError,
    UnavailableError,
)
from scheduler_plugins.router.routing.candidates import Candidates
from scheduler_plugins.router.routing.front import QueueFullError, turn_of

logger = logging.getLogger(__name__)


class ClientRequest:
    """One request to `/v1/completions`, to `/v1/chat/completions`, or to an endpoint that one engine serves."""

    def __init__(
        self,
        shared: Shared,
        request: web.Request,
        headers: CIMultiDict[str],
        body: dict[str, Any],
    ) -> None:
        self._shared = shared
        arrived = asyncio.get_running_loop().time()
        self._parsed = parsed = ParsedRequest(shared, request.path, headers, body, arrived)
        self._record = record_of(parsed)
        """The sent part of a stream that another engine can go on with."""
        self._client = Downstream(request, shared.config.idle_timeout_s)
        self._responder = Responder(
            self._client,
            parsed.id,
            shared.metrics,
            arrived,
            lambda engine: is_wanted_abort(engine, shared, headers),
            completes=not parsed.one_engine,
            streams=parsed.streams,
        )
        self._candidates = Candidates(
            shared.pool,
            shared.config.attempts,
            parsed.fields,
            request.path,
        )
        self.trace = shared.tracing.request(headers, request.path, parsed.id)
        """The spans of the request; its server finishes them."""
        self._noticed = RequestEvents(shared.pool.history, parsed)
        self._dispatch = Dispatch(
            shared,
            parsed,
            self._candidates,
            self._responder,
            self._record,
            self.trace,
            self._noticed,
        )

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
            UnavailableError: no engine could answer, and nothing has been sent.
            AllOverloadedError: as UnavailableError, but some engine only lacked room.
            BadRequestError: none of the router's engines can ever answer such a request.
            ClientGoneError: the client has left.
        """
        self._shared.retries.request()
        await self._parsed.tokenize()
        self._noticed.arrived()
        try:
            if self._shared.config.front_queue:
                await _wait_for_turn(self._shared, self._parsed.request)
            return await self._served()
        except (UnavailableError, AllOverloadedError) as error:
            if not self._client.begun:
                if isinstance(error, AllOverloadedError):
                    self._noticed.refused()
                raise
            logger.warning("request %s: %s", self._parsed.id, error)
            return await self.interrupt("no engine could go on"), "interrupted"

    async def interrupt(self, why: str) -> web.StreamResponse:
        """End a stream that has begun with an error event."""
        message = f"the stream broke off: {why}; request {self._parsed.id}"
        return await self._client.interrupt(message)

    async def _served(self) -> tuple[web.StreamResponse, str]:
        while (attempt := await self._next_attempt()) is not None:
            self._shared.metrics.flows.labels(attempt.flow, attempt.cause).inc()
            if attempt.pool:
                self._shared.metrics.pool_requests.labels(attempt.pool).inc()
            logger.debug("request %s: %s", self._parsed.id, attempt)
            if attempt.prefill is None:
                self._shared.metrics.handoffs.labels("alone", attempt.cause).inc()
            try:
                return await self._dispatch.make(attempt)
            except EngineFailedError as failure:
                if self._responder.whole:
                    return await self._responder.end(b""), "ok"
                logger.warning(
                    "request %s: %s (%s) failed: %s",
                    self._parsed.id,
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
                    # The failure's message may name the engine, so only the log gets it.
                    why = f"a {attempt.answering.role} engine failed ({failure.cause})"
                    return await self.interrupt(why), "interrupted"
                self._shared.metrics.retries.labels(failure.cause).inc()
                self._candidates.failed(attempt, failure)
                if to_blame and failure.accepted and not self._shared.retries.allows(failure.cause):
                    logger.warning(
                        "request %s: no retry, because the retry budget is used up", self._parsed.id
                    )
                    break
        if (refusal := self._candidates.refusal) is not None and not self._client.begun:
            return await self._responder.refuse(refusal), "client_error"
        raise self._candidates.exhausted()

    def _to_blame(self, attempt: Attempt, failure: EngineFailedError) -> bool:
        """Whether the answering engine is to blame. It is not for lack of room, for a wrong request, or for missing
        KV: a dying prefill engine takes the KV of all its requests with it."""
        if failure.blames_request or isinstance(failure, PrefillRefusedError | OverloadedError):
            return False
        return not (failure.answered and self._candidates.lost_prefill(attempt))

    async def _goes_on(self, attempt: Attempt, failure: EngineFailedError) -> bool:
        """Whether the stream can go on at another engine. If so, the next attempt asks for the rest."""
        record, parsed = self._record, self._parsed
        if record is None or record.next_body() is None:
            return False
        self._candidates.failed(attempt, failure, progressed=record.advanced)
        able = self._candidates.able(begun=True)
        if able is None:
            return False
        engine, model = able.decode[0], parsed.body.get("model")
        whole = await cut_to_whole_characters(record, engine, self._shared, parsed.headers, model)
        rest = record.next_body()
        if not whole or rest is None:
            return False
        record.resume()
        parsed.ask_for_rest(rest)
        self._shared.metrics.resumed.inc()
        logger.warning("request %s: its stream goes on at another engine", parsed.id)
        return True

    async def _next_attempt(self) -> Attempt | None:
        """See `next_attempt`."""
        parsed = self._parsed
        self._candidates.knows(parsed.prompt_tokens, parsed.request.group)
        return await next_attempt(
            self._shared, self._candidates, parsed.request, parsed.arrived, begun=self._client.begun
        )


async def _wait_for_turn(shared: Shared, request: Request) -> None:
    """Wait in the front queue while all prefill engines are busy, or no decode engine has room.

    Raises:
        QueueFullError: the queue of the class is full. RejectedError: the wait would break the
            class's promise.
    """
    config, metrics = shared.config, shared.metrics
    turn = turn_of(request, shared.pool)
    late_s = shared.front.expected_s(turn, config.classes) - request.ttft_slo_s
    if late_s > 0:
        metrics.rejected.labels(request.qos, "ttft").inc()
        raise RejectedError(Reject("ttft", late_s))
    try:
        with metrics.waiting.labels(request.qos).track_inprogress():
            await shared.front.wait(turn, config)
    except QueueFullError:
        metrics.rejected.labels(request.qos, "queue_full").inc()
        raise
