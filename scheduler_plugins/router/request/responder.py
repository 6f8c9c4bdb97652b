# SPDX-License-Identifier: Apache-2.0
"""An engine's answer on its way to the client."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

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
from scheduler_plugins.router.request.resume import StreamRecord

ENDS_S = 1.0
"""Longest wait for the end of a stream after its end mark."""


class Responder:
    """Answers one client.

    Args:
        arrived: when the request came, on the event loop's clock.
        wanted_abort: tells whether an engine that ended an answer early was told to do so (`aborts.py`).
        end_mark: whether the stream must end with `[DONE]`.
    """

    def __init__(
        self,
        client: Downstream,
        request_id: str,
        metrics: Metrics,
        arrived: float,
        wanted_abort: Callable[[BackendEngine], Awaitable[bool]],
        *,
        end_mark: bool = True,
    ) -> None:
        self._wanted_abort = wanted_abort
        self.whole = False
        """Whether the client got all events of a stream, including the end mark."""
        self._withheld, self._said = b"", False  # an abort and what came with it; a word has come
        self._aborts_pass = not end_mark
        self._end_mark = end_mark
        self._client = client
        self._request_id = request_id
        self._metrics = metrics
        self._arrived = arrived

    async def pass_on(
        self,
        answer: Exchange,
        flow: str,
        copy: PrefillCopy | None = None,
        record: StreamRecord | None = None,
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
        kind = answer.headers.get("Content-Type", "")
        if answer.status == 200 and kind.startswith(EVENT_STREAM):
            return await self._stream(answer, flow, copy, record, served, pace), "ok"
        if self._client.begun:
            raise EngineFailedError("refused_rest", f"{answer.status}: {await excerpt(answer)}")
        # Held until it is complete: if the engine dies halfway, another one can still answer.
        content = await answer.read_all()
        if self._end_mark and answer.status < 300 and not _can_answer(answer.status, content):
            raise _no_answer(answer.status, content)
        if answer.status == 200:
            aborted = self._end_mark and ABORTED in content
            if aborted and not await self._wanted_abort(answer.engine):
                raise ended_early()
            served()
            if pace is not None:
                pace.whole(content)
        if copy is not None and answer.status == 200:
            if copy.lends:
                content = FirstTokenPatch(await copy.first_logprobs()).whole(content)
            if DETAILS in content and (usage := await copy.usage_patch(answer.engine.kind)):
                content = usage.whole(content)
        answer.complete()
        response = web.Response(status=answer.status, headers=self._returned(answer), body=content)
        await self._client.begin(response)
        outcome = "ok" if answer.status < 400 else "client_error"
        return await self._client.finish(), outcome

    async def end(self, events: bytes) -> web.StreamResponse:
        """End a stream whose engine was lost after the last token. `events`: what it still owed."""
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
        self,
        answer: Exchange,
        flow: str,
        copy: PrefillCopy | None,
        record: StreamRecord | None,
        served: Callable[[], None],
        pace: Pace | None,
    ) -> web.StreamResponse:
        cutter, client = EventCutter(), self._client
        patch: FirstTokenPatch | None = None
        answered = False
        response = web.StreamResponse(status=answer.status, headers=self._returned(answer))
        while not answered and (chunk := await answer.read()):
            if events := _cut(cutter, chunk):
                if not client.begun and (error := error_in(events)):
                    raise _engines_own(error)
                events, failed = self._noted(events, record)
                if failed is not None and not client.begun and (record is None or not events):
                    events += await self._unless_wanted(failed, answer.engine, record)
                    failed = None
                answered = True
                served()
                if pace is not None:
                    pace.note(events)
                if copy is not None and copy.lends:
                    patch = FirstTokenPatch(await copy.first_logprobs())
                    events = patch.events(events)
                events = await _counted(events, answer, copy)
                if not client.begun:
                    await client.begin(response)
                    first_s = asyncio.get_running_loop().time() - self._arrived
                    self._metrics.first_token_s.labels(flow).observe(first_s)
                self.whole = cutter.finished and failed is None
                if events:
                    await client.write(events)
                if failed is not None:
                    await client.write(await self._unless_wanted(failed, answer.engine, record))
                    self.whole = cutter.finished
        left, failures = b"", list[EngineFailedError]()

        def take(chunk: bytes) -> bool:
            nonlocal left
            if events := _cut(cutter, chunk):
                events, failure = self._noted(events, record)
                if failure is not None:
                    failures.append(failure)
                if pace is not None:
                    pace.note(events)
            if events and patch is not None:
                events = patch.events(events)
            left = events  # only now: an event that could not be noted is not sent
            self.whole = cutter.finished and not failures
            if copy is not None and DETAILS in left:
                return False
            if left and client.write_now(left):
                left = b""
            return not left and not cutter.finished and not failures

        while not cutter.finished:
            try:
                ended = await answer.pass_to(take)
                left = await _counted(left, answer, copy)
            except BaseException:
                # Cancelled between `take` and here. Noted events are not asked for again, so they must be sent.
                if left:
                    client.push(left)
                raise
            if ended:
                break
            if left:
                if pace is not None:
                    pace.give_up()
                await client.write(left)
                left = b""
            if failures:
                failed = failures.pop()
                await client.write(await self._unless_wanted(failed, answer.engine, record))
                self.whole = cutter.finished
        answer.complete()
        if pace is not None:
            pace.end()
        if cutter.finished:
            await _to_its_end(answer)
        rest = cutter.rest() if self._end_mark else cutter.held
        if self._end_mark and not cutter.finished:
            raise EngineFailedError("truncated", "the stream ended without its end mark [DONE]")
        if rest:
            await client.begin(response)
            await client.write(rest)
        return await client.finish()

    def _noted(
        self, events: bytes, record: StreamRecord | None
    ) -> tuple[bytes, EngineFailedError | None]:
        """The events for the client, and the failure if the stream ended before the answer was complete."""
        failed: EngineFailedError | None = None
        came = events
        if record is not None:
            events, error = before_error(events)
            failed = None if error is None else _engines_own(error)
        if not self._aborts_pass:
            self._said = self._said or NOTHING.fullmatch(events) is None
            events, aborted = before_abort(events, self._said)
            if aborted:
                failed, self._withheld = ended_early(), came[len(events) :]
        return (events if record is None else record.feed(events)), failed

    async def _unless_wanted(
        self, failed: EngineFailedError, engine: BackendEngine, record: StreamRecord | None
    ) -> bytes:
        """The withheld events if the abort was wanted. Otherwise raises `failed`."""
        if failed.cause != "aborted" or not await self._wanted_abort(engine):
            raise failed
        self._aborts_pass = True
        events, failure = self._noted(self._withheld, record)
        if failure is None:
            return events
        raise failure

    def _returned(self, answer: Exchange) -> CIMultiDict[str]:
        return headers_to_client(answer.headers, self._request_id)


def _engines_own(error: tuple[int, str]) -> EngineFailedError:
    """The failure for an error (status and message) that an engine put into its stream."""
    return EngineFailedError(f"status_{error[0]}", f"{error[0]}: {error[1]}")


def _cut(cutter: EventCutter, chunk: bytes) -> bytes:
    """The events that the chunk completes."""
    events = cutter.feed(chunk)
    if cutter.overlong:
        raise EngineFailedError("malformed", f"an event of more than {MOST_EVENT_BYTES} bytes")
    return events


def _can_answer(status: int, content: bytes) -> bool:
    """Whether this can be a completion: 200, and a JSON object. It is not parsed: engines may write NaN."""
    stripped = content.strip()
    return status == 200 and stripped.startswith(b"{") and stripped.endswith(b"}")


def _no_answer(status: int, content: bytes) -> EngineFailedError:
    """The failure for a page of a proxy, or another server's answer. It comes fast, so an engine that were believed
    would get nearly all requests."""
    said = " ".join(content[:EXCERPT_BYTES].decode("utf-8", "replace").split())
    told = f"it answered {status} (wanted: 200 and a JSON object): {said}"
    return EngineFailedError("malformed", told)


async def _to_its_end(answer: Exchange) -> None:
    """Read and drop the bytes after the end mark, so the connection can be used again."""
    with suppress(TimeoutError, EngineFailedError):
        async with asyncio.timeout(ENDS_S):
            while await answer.read():
                pass


async def _counted(events: bytes, answer: Exchange, copy: PrefillCopy | None) -> bytes:
    """The events, with the count of cached tokens corrected if they have one."""
    if copy is None or DETAILS not in events:
        return events
    usage = await copy.usage_patch(answer.engine.kind)
    return events if usage is None else usage.events(events)
