# SPDX-License-Identifier: Apache-2.0
"""The events of an engine's stream, complete, and corrected by what the prefill side knows."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from scheduler_plugins.router.client.answers import MOST_EVENT_BYTES, EventCutter
from scheduler_plugins.router.engines.exchange import Exchange
from scheduler_plugins.router.engines.failures import EngineFailedError
from scheduler_plugins.router.handoff.first_token import FirstTokenPatch
from scheduler_plugins.router.handoff.prefill import PrefillCopy
from scheduler_plugins.router.handoff.usage import DETAILS
from scheduler_plugins.router.request.pace import Pace
from scheduler_plugins.router.request.resume import StreamRecord
from scheduler_plugins.router.request.resume_tokens import TokenRecord

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
    record: StreamRecord | TokenRecord | None
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
