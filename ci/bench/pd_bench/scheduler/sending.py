# SPDX-License-Identifier: Apache-2.0
"""Sends requests to a running engine at their times, and records the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from pd_bench.report import BenchError
from scheduler_plugins.order.request import BlockHash, Waiting
from scheduler_plugins.profile.client import EngineClient, Timed, at

_AHEAD_S = 0.5


class RequestRecord(NamedTuple):
    """One request and its answer; None if there was no answer in time."""

    request: Waiting
    answer: Timed | None
    late_s: float  # delay of its sending

    @property
    def ttft_s(self) -> float:
        """Counted from the planned sending time; infinite if it got no token."""
        if self.answer is None or self.answer.status != 200:
            return float("inf")
        return self.answer.ttft_s + self.late_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 if there is none."""
        if self.answer is None or len(self.answer.token_s) < 2:
            return 0.0
        times = self.answer.token_s
        return (times[-1] - times[0]) / (len(times) - 1)


async def send_all(
    client: EngineClient,
    requests: Sequence[Waiting],
    pool: Sequence[int],
    *,
    page_size: int,
    until_s: float | None = None,
    headers: Callable[[Waiting], dict[str, str]] | None = None,
    by_length: bool = False,
    salt: str | None = None,
    answered: Callable[[], None] = lambda: None,
) -> list[RequestRecord]:
    """Send requests at their times, and wait for the answers.

    Args:
        requests: by arrival.
        pool: token ids from which prompts are made.
        page_size: of their hashes.
        until_s: disconnect all requests at this time, by the clock of the arrivals; None: never.
        headers: of each request.
        by_length: each has the length of its prompt as vLLM's `priority`.
        salt: requests with another salt, or without one, share no KV with these.
        answered: called with each answer.

    Raises:
        BenchError: a request was answered with neither 200 nor 429.
    """
    prompts = [prompt_ids(each, page_size, pool) for each in requests]
    begun_s = time.perf_counter() + _AHEAD_S

    async def send_one(request: Waiting, prompt: list[int]) -> RequestRecord:
        due_s = begun_s + request.arrival_s
        await at(due_s)
        extra: dict[str, Any] = {"priority": len(prompt)} if by_length else {}
        if salt is not None:
            extra["cache_salt"] = salt
        given = headers(request) if headers else {}
        answer = await client.complete(prompt, request.max_tokens, headers=given, **extra)
        answered()
        if answer.status not in (200, 429):
            raise BenchError(f"{client.url}: {answer.status}: {answer.error}")
        return RequestRecord(request, answer, answer.sent_s - due_s)

    pairs = zip(requests, prompts, strict=True)
    tasks = [asyncio.create_task(send_one(request, prompt)) for request, prompt in pairs]
    left_s = None if until_s is None else begun_s + until_s - time.perf_counter()
    done, pending = await asyncio.wait(tasks, timeout=left_s)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return [
        task.result() if task in done else RequestRecord(request, None, 0.0)
        for request, task in zip(requests, tasks, strict=True)
    ]


def prompt_ids(request: Waiting, page_size: int, pool: Sequence[int]) -> list[int]:
    """The request's prompt. Equal hashes give equal tokens. Later tokens are unique to the request."""
    tokens = list[int]()
    for block in request.block_hashes:
        tokens += _block(block, page_size, pool)
    own = Random(f"own {request.id}").choices(pool, k=max(0, request.tokens - len(tokens)))
    return [*tokens, *own][: request.tokens]


def _block(block: BlockHash, page_size: int, pool: Sequence[int]) -> list[int]:
    return Random(f"block {block}").choices(pool, k=page_size)
