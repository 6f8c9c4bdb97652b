# SPDX-License-Identifier: Apache-2.0
"""An engine's answer on its way to the client: whole, or as the events of a stream (`EngineStream`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from aiohttp import web
from multidict import CIMultiDict

from scheduler_plugins.router.client.answers import (
    ABORTED,
    EVENT_STREAM,
    MOST_EVENT_BYTES,
    NOTHING,
    EventCutter,
    before_abort,
    before_error,
    error_in,
    headers_to_client,
)
from scheduler_plugins.router.client.downstream import Downstream
from scheduler_plugins.router.engines.completion import good_events, status_of
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.exchange import Exchange, excerpt
from scheduler_plugins.router.engines.failures import (
    EXCERPT_BYTES,
    EngineFailedError,
    RefusedError,
    ended_early,
)
from scheduler_plugins.router.handoff.first_token import FirstTokenPatch
from scheduler_plugins.router.handoff.prefill import PrefillCopy
from scheduler_plugins.router.handoff.usage import DETAILS
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.request.pace import Pace
from scheduler_plugins.router.request.resume import AnswerRecord


class Responder:
    """Answers one client.

    Args:
        arrived: when the request came, on the event loop's clock.
        wanted_abort: returns whether a client asked for the abort that ended an answer (`aborts.py`).
        completes: whether the answer is a completion: a stream of it ends with `[DONE]`.
        streams: whether the client wants a stream.
    """

    def __init__(
        self,
        client: Downstream,
        request_id: str,
        metrics: Metrics,
        arrived: float,
        wanted_abort: Callable[[BackendEngine], Awaitable[bool]],
        *,
        completes: bool = True,
        streams: bool | None = None,
    ) -> None:
        self._streams = streams
        self._wanted_abort = wanted_abort
        self.whole = False
        """Whether the client got all events of a stream, including the end mark."""
        self._withheld, self._said = (
            b"",
            False,
        )  # an abort and the events with it; whether text has come
        self._aborts_pass = not completes
        self._completes = completes
        self._client = client
        self._request_id = request_id
        self._metrics = metrics
        self._arrived = arrived

    @property
    def begun(self) -> bool:
        """Whether the client has been sent anything."""
        return self._client.begun

    async def pass_on(
        self,
        answer: Exchange,
        flow: str,
        copy: PrefillCopy | None = None,
        record: AnswerRecord | None = None,
        served: Callable[[], None] = lambda: None,
        pace: Pace | None = None,
    ) -> tuple[web.StreamResponse, str]:
        """Pass an engine's answer to the client. Returns the response and the outcome for the metrics.

        Args:
            flow: the attempt's flow, as a metric label.
            copy: the prefill side. Its answer has the count of cached tokens, and the first token's log probabilities
                if `answer` lacks them.
            record: notes the sent part of a stream that another engine can go on with.
            served: called once the engine has begun a good answer.
            pace: watches the pace of the stream's tokens.

        Raises:
            EngineFailedError: the engine broke off, or reported a failure in a stream's first event.
            ClientGoneError: the client has left.
        """
        kind, status = answer.headers.get("Content-Type", ""), answer.status
        streamed = kind.startswith(EVENT_STREAM)
        if status == 200 and self._completes and self._streams not in (None, streamed):
            form = "a stream" if streamed else f"no stream ({kind}): {await excerpt(answer)}"
            raise EngineFailedError(
                "malformed", f"it answered with {form}, which was not asked for"
            )
        if status == 200 and streamed:
            stream = EngineStream(answer, copy, record, pace)
            return await self._stream(stream, flow, served), "ok"
        if self._client.begun:
            raise EngineFailedError("refused_rest", f"{answer.status}: {await excerpt(answer)}")
        # Held until it is complete: if the engine dies halfway, another one can still answer.
        content = await answer.read_all()
        if status < 300:
            status = await status_of(status, kind, content, completes=self._completes)
        if status == 200:
            aborted = self._completes and ABORTED in content
            if aborted and not await self._wanted_abort(answer.engine):
                raise ended_early()
            served()
            if pace is not None:
                pace.whole(content)
        if copy is not None and status == 200:
            if copy.lends:
                content = FirstTokenPatch(await copy.first_logprobs()).whole(content)
            if DETAILS in content and (usage := await copy.usage_patch(answer.engine.kind)):
                content = usage.whole(content)
        answer.complete()
        response = web.Response(status=status, headers=self._returned(answer), body=content)
        await self._client.begin(response)
        outcome = "ok" if status < 400 else "client_error"
        return await self._client.finish(), outcome

    async def end(self, events: bytes) -> web.StreamResponse:
        """End a stream whose engine was lost after the last token. `events`: the events that the engine had yet to
        send."""
        if events:
            await self._client.write(events)
        return await self._client.finish()

    async def refuse(self, error: RefusedError) -> web.StreamResponse:
        """Pass on the engine's own refusal of the request."""
        returned = headers_to_client({"Content-Type": "application/json"}, self._request_id)
        response = web.StreamResponse(status=error.status, headers=returned)
        await self._client.begin(response)
        await self._client.write(error.content)
        return await self._client.finish()

    async def _stream(
        self, stream: EngineStream, flow: str, served: Callable[[], None]
    ) -> web.StreamResponse:
        answer = stream.answer
        response = web.StreamResponse(status=answer.status, headers=self._returned(answer))
        if events := await stream.first_events():
            await self._begin(stream, events, response, flow, served)
        await self._go_on(stream)
        return await self._finish(stream, response)

    async def _begin(
        self,
        stream: EngineStream,
        events: bytes,
        response: web.StreamResponse,
        flow: str,
        served: Callable[[], None],
    ) -> None:
        """Pass on the first events, and begin the response with them if no engine before has."""
        client = self._client
        if not client.begun and (error := error_in(events)):
            raise _engines_own(error)
        events, failed = self._noted(events, stream.record)
        if failed is not None and not client.begun and (stream.record is None or not events):
            events += await self._unless_wanted(failed, stream)
            failed = None
        served()
        if stream.pace is not None:
            stream.pace.note(events)
        events = await stream.counted(await stream.with_first_logprobs(events))
        if not client.begun:
            await client.begin(response)
            first_s = asyncio.get_running_loop().time() - self._arrived
            self._metrics.first_token_s.labels(flow).observe(first_s)
        self.whole = stream.cutter.finished and failed is None
        if events:
            await client.write(events)
        if failed is not None:
            await self._go_on_after(failed, stream)

    async def _go_on(self, stream: EngineStream) -> None:
        """Pass on the events after the first."""
        take = partial(self._take, stream)
        while not stream.cutter.finished:
            try:
                ended = await stream.answer.pass_to(take)
                stream.left = await stream.counted(stream.left)
            except BaseException:
                # Cancelled between `take` and here. Noted events are not asked for again, so they must be sent.
                if stream.left:
                    self._client.push(stream.left)
                raise
            if ended:
                break
            if stream.left:
                if stream.pace is not None:
                    stream.pace.give_up()
                await self._client.write(stream.left)
                stream.left = b""
            if stream.failed is not None:
                failed, stream.failed = stream.failed, None
                await self._go_on_after(failed, stream)

    def _take(self, stream: EngineStream, chunk: bytes) -> bool:
        """Note the events that a chunk completes, and write them if that needs no wait. Returns whether more can come:
        nothing is left to write, and the stream goes on."""
        if events := stream.completed(chunk):
            events, stream.failed = self._noted(events, stream.record)
            if stream.pace is not None:
                stream.pace.note(events)
        if events and stream.patch is not None:
            events = stream.patch.events(events)
        stream.left = events  # only now: an event that could not be noted is not sent
        self.whole = stream.cutter.finished and stream.failed is None
        if stream.copy is not None and DETAILS in stream.left:
            return False
        if stream.left and self._client.write_now(stream.left):
            stream.left = b""
        return not stream.left and not stream.cutter.finished and stream.failed is None

    async def _finish(
        self, stream: EngineStream, response: web.StreamResponse
    ) -> web.StreamResponse:
        """The engine's stream is over: end the client's."""
        cutter = stream.cutter
        stream.answer.complete()
        if stream.pace is not None:
            stream.pace.end()
        if cutter.finished:
            await stream.read_to_its_end()
        rest = cutter.rest() if self._completes else cutter.held
        if good_events(rest, completes=self._completes) != rest:
            raise _no_event(rest)
        if self._completes and not cutter.finished:
            raise EngineFailedError("truncated", "the stream ended without its end mark [DONE]")
        if rest:
            await self._client.begin(response)
            await self._client.write(rest)
        return await self._client.finish()

    def _noted(
        self, events: bytes, record: AnswerRecord | None
    ) -> tuple[bytes, EngineFailedError | None]:
        """The events for the client, and the failure if the stream ended before the answer was complete."""
        failed: EngineFailedError | None = None
        came = events
        events = good_events(came, completes=self._completes)
        if len(events) < len(came):
            failed = _no_event(came[len(events) :])
        if self._completes:
            events, error = before_error(events)
            failed = failed if error is None else _engines_own(error)
        if not self._aborts_pass:
            self._said = self._said or NOTHING.fullmatch(events) is None
            events, aborted = before_abort(events, self._said)
            if aborted:
                failed, self._withheld = ended_early(), came[len(events) :]
        return (events if record is None else record.feed(events)), failed

    async def _go_on_after(self, failed: EngineFailedError, stream: EngineStream) -> None:
        """Send the withheld events if a client asked for the abort. Otherwise raise `failed`."""
        await self._client.write(await self._unless_wanted(failed, stream))
        self.whole = stream.cutter.finished

    async def _unless_wanted(self, failed: EngineFailedError, stream: EngineStream) -> bytes:
        """The withheld events, if a client asked for the abort. Otherwise raises `failed`."""
        if failed.cause != "aborted" or not await self._wanted_abort(stream.answer.engine):
            raise failed
        self._aborts_pass = True
        events, failure = self._noted(self._withheld, stream.record)
        if failure is None:
            return events
        raise failure

    def _returned(self, answer: Exchange) -> CIMultiDict[str]:
        return headers_to_client(answer.headers, self._request_id)


def _engines_own(error: tuple[int, str]) -> EngineFailedError:
    """The failure for an error (status and message) that an engine put into its stream."""
    return EngineFailedError(f"status_{error[0]}", f"{error[0]}: {error[1]}")


def _no_event(events: bytes) -> EngineFailedError:
    """The failure for a stream with something in it that is not an event of an answer."""
    said = " ".join(events[:EXCERPT_BYTES].decode("utf-8", "replace").split())
    return EngineFailedError("malformed", f"its stream has an event that is not one: {said}")


ENDS_S = 1.0
"""Longest wait for the end of a stream after its end mark."""


@dataclass
class EngineStream:
    """One engine's stream on its way to the client.

    Attributes:
        answer, copy, record, pace: as in `Responder.pass_on`.
        patch: corrects the first token; None before the first events, and where there is nothing to correct.
        left: events that the client has yet to get.
        failed: why the stream ends before the answer is complete.
    """

    answer: Exchange
    copy: PrefillCopy | None
    record: AnswerRecord | None
    pace: Pace | None
    cutter: EventCutter = field(default_factory=EventCutter)
    patch: FirstTokenPatch | None = None
    left: bytes = b""
    failed: EngineFailedError | None = None

    async def first_events(self) -> bytes:
        """Read until an event is complete. Empty if the stream ends without one."""
        while chunk := await self.answer.read():
            if events := self.completed(chunk):
                return events
        return b""

    def completed(self, chunk: bytes) -> bytes:
        """The events that the chunk completes."""
        events = self.cutter.feed(chunk)
        if self.cutter.overlong:
            raise EngineFailedError("malformed", f"an event of more than {MOST_EVENT_BYTES} bytes")
        return events

    async def with_first_logprobs(self, events: bytes) -> bytes:
        """The first events, with the first token's log probabilities if this engine lacks them."""
        if self.copy is None or not self.copy.lends:
            return events
        self.patch = FirstTokenPatch(await self.copy.first_logprobs())
        return self.patch.events(events)

    async def counted(self, events: bytes) -> bytes:
        """The events, with the count of cached tokens corrected if they have one."""
        if self.copy is None or DETAILS not in events:
            return events
        usage = await self.copy.usage_patch(self.answer.engine.kind)
        return events if usage is None else usage.events(events)

    async def read_to_its_end(self) -> None:
        """Read and drop the bytes after the end mark, so the connection can be used again."""
        with suppress(TimeoutError, EngineFailedError):
            async with asyncio.timeout(ENDS_S):
                while await self.answer.read():
                    pass
