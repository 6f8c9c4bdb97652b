# SPDX-License-Identifier: Apache-2.0
"""An engine's answer on its way to the client."""

from collections.abc import Callable

from aiohttp import web
from multidict import CIMultiDict

from scheduler_plugins.router.answers import (
    EVENT_STREAM,
    EventCutter,
    error_in,
    headers_to_client,
)
from scheduler_plugins.router.attempt import Attempt
from scheduler_plugins.router.downstream import Downstream
from scheduler_plugins.router.exchange import EngineFailedError, Exchange, excerpt
from scheduler_plugins.router.first_token import FirstTokenPatch
from scheduler_plugins.router.prefill import PrefillCopy
from scheduler_plugins.router.prompt_ids import NotTokenizedError
from scheduler_plugins.router.resume import StreamRecord


class Responder:
    """Answers one client with what one attempt brings.

    Args:
        record: what the client was sent of a stream that another engine could go on with.
        lender: whose answer has the first token's log probabilities, if the other has not.
        on_first: called once there is something for the client.
    """

    def __init__(
        self,
        client: Downstream,
        attempt: Attempt,
        request_id: str,
        record: StreamRecord | None,
        lender: PrefillCopy | None,
        on_first: Callable[[Attempt], None],
    ) -> None:
        self._client = client
        self._attempt = attempt
        self._request_id = request_id
        self._record = record
        self._lender = lender
        self._on_first = on_first
        self._patch: FirstTokenPatch | None = None

    async def pass_on(self, answer: Exchange) -> tuple[web.StreamResponse, str]:
        """Hand an engine's answer to the client. Returns the response and the outcome for the metrics.

        Raises:
            EngineFailedError: the engine broke off, or said in a stream's first event that it failed.
            ClientGoneError: there is nobody to answer any more.
        """
        kind = answer.headers.get("Content-Type", "")
        if answer.status == 200 and kind.startswith(EVENT_STREAM):
            return await self._stream(answer), "ok"
        if self._client.begun:
            raise EngineFailedError("refused_rest", f"{answer.status}: {await excerpt(answer)}")
        # Held until it is whole: should the engine die halfway, another one can still answer.
        content = await answer.read_all()
        self._attempt.answering.circuit.succeeded()
        if answer.status == 200:
            if self._lender is not None:
                content = FirstTokenPatch(await self._lender.first_logprobs()).whole(content)
            self._on_first(self._attempt)
        response = web.StreamResponse(status=answer.status, headers=self._returned(answer))
        response.content_length = len(content)
        await self._client.begin(response)
        await self._client.write(content)
        outcome = "ok" if answer.status < 400 else "client_error"
        return await self._client.finish(), outcome

    async def refuse(self, error: NotTokenizedError) -> web.StreamResponse:
        """Hand on the engine's own words on what is wrong with the request."""
        returned = headers_to_client({"Content-Type": "application/json"}, self._request_id)
        response = web.StreamResponse(status=error.status, headers=returned)
        await self._client.begin(response)
        await self._client.write(error.content)
        return await self._client.finish()

    async def _stream(self, answer: Exchange) -> web.StreamResponse:
        cutter, client, engine = EventCutter(), self._client, self._attempt.answering
        response = web.StreamResponse(status=answer.status, headers=self._returned(answer))
        begun = False
        while chunk := await answer.read():
            if not (events := cutter.feed(chunk)):
                continue
            if not begun and (error := error_in(events)):
                raise EngineFailedError(f"status_{error[0]}", f"{error[0]}: {error[1]}")
            begun = True
            engine.circuit.succeeded()
            events = await self._changed(events)
            if not client.begun:
                await client.begin(response)
                self._on_first(self._attempt)
            await client.write(events)
        rest = cutter.rest()
        if not cutter.finished:
            raise EngineFailedError("truncated", "the stream ended without its end mark [DONE]")
        if rest:
            await client.begin(response)
            await client.write(rest)
        return await client.finish()

    async def _changed(self, events: bytes) -> bytes:
        """What the client is sent instead of these events of the engine."""
        if self._lender is not None:
            self._patch = self._patch or FirstTokenPatch(await self._lender.first_logprobs())
            events = self._patch.events(events)
        return self._record.feed(events) if self._record is not None else events

    def _returned(self, answer: Exchange) -> CIMultiDict[str]:
        return headers_to_client(answer.headers, self._request_id)
