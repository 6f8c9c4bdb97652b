# SPDX-License-Identifier: Apache-2.0
"""Sends a trace to a router, `speed` times faster than recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from pd_bench.router.scaled import Sent

_AHEAD_S = 0.5
_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Outcome:
    """The answer to one request. Times are in the trace's time."""

    status: int
    ttft_s: float = 0.0  # due -> first token read
    end_s: float = 0.0  # due -> last token read
    tokens: int = 0
    error: str = ""

    @property
    def served(self) -> bool:
        """Whether the answer is complete."""
        return self.status == 200 and not self.error

    @property
    def tpot_s(self) -> float:
        """Mean time between two tokens."""
        return (self.end_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


async def play(
    urls: Sequence[str],
    requests: Sequence[Sent],
    speed: float,
    sent: Callable[[int], None] = lambda number: None,
) -> list[Outcome]:
    """Send every request at its time, to each URL in turn, and wait for all answers. Before each request, `sent` gets
    the number already sent."""
    loop = asyncio.get_running_loop()
    began = loop.time() + _AHEAD_S
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)

    async def ask(number: int, sent_request: Sent) -> Outcome:
        due = began + sent_request.at_s / speed
        await asyncio.sleep(due - loop.time())
        sent(number)
        # Mocks ignore `ignore_eos`; a real engine generates all tokens with it.
        body = {
            "model": "mock",
            "prompt": sent_request.prompt,
            "max_tokens": sent_request.max_tokens,
        }
        body["ignore_eos"] = True
        url = urls[number % len(urls)] + "/v1/completions"
        try:
            async with session.post(url, json={**body, "stream": True, "temperature": 0}) as answer:
                return await _read(answer, lambda: (loop.time() - due) * speed)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return Outcome(0, error=repr(error))

    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        return list(
            await asyncio.gather(*(ask(n, sent_request) for n, sent_request in enumerate(requests)))
        )


async def _read(answer: aiohttp.ClientResponse, passed_s: Callable[[], float]) -> Outcome:
    if answer.status != 200:
        return Outcome(answer.status, end_s=passed_s(), error=(await answer.text())[:200])
    first_s, tokens, error, ended = 0.0, 0, "", False
    async for line in answer.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            ended = True
            continue
        event = json.loads(data)
        if "error" in event:
            error = str(event["error"])
        elif event.get("choices"):
            first_s = first_s or passed_s()
            tokens += event["choices"][0].get("text", "").count("word")
    if not ended and not error:
        error = "the stream ended before [DONE]"
    return Outcome(answer.status, first_s, passed_s(), tokens, error)
