# SPDX-License-Identifier: Apache-2.0
"""A simulated engine: prefill in steps of a budget, a prefix cache, decode elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.queue.step_length import step_tokens, tokens_before
from scheduler_plugins.queue.waiting import WaitingQueue
from scheduler_plugins.sim.cache import LruBlocks
from scheduler_plugins.sim.decode import DecodeStage


@dataclass(slots=True)
class Served:
    """What became of one request; times in seconds, by the clock of the arrivals."""

    request: Waiting
    cached_tokens: int = 0
    """Prompt tokens found in the cache when it was first started."""
    start_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token; infinite for a request that was turned away."""
        if self.first_token_s is None:
            return float("inf")
        return self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float:
        """Time per token after the first; 0 where there is none."""
        if self.end_s is None or self.first_token_s is None or self.request.max_tokens < 2:
            return 0.0
        return (self.end_s - self.first_token_s) / (self.request.max_tokens - 1)


class PrefillChunk(NamedTuple):
    """A part of a prompt that is computed in one step."""

    record: Served
    first: int  # token
    stop: int


class SimulatedStep(NamedTuple):
    """What was computed together."""

    chunks: Sequence[PrefillChunk]
    load: StepLoad
    start_s: float
    end_s: float


@dataclass(slots=True)
class _Prefill:
    """One that was started and has not ended."""

    record: Served
    done: int  # tokens, cached ones included

    @property
    def request(self) -> Waiting:
        return self.record.request

    @property
    def left(self) -> int:
        return self.request.tokens - self.done


class SimulatedEngine:
    """Puts steps together as vLLM does with our scheduler.

    Prefills under way go on first; then requests are taken from the queue until the step has
    `truth.chunk_tokens` tokens (0: each step is one whole prompt), or fewer where classes share the engine
    (`step_length.step_tokens`). The prefills leave room for requests
    that overtake them (`step_length.tokens_before`), half a step at most. Between two steps a prefill
    may be preempted for a class that is owed (`FairShare.should_yield`). Blocks can be read from the
    cache by whatever enters a step after they were stored. `truth` says how long steps really take; the
    queue has a cost model of its own.
    """

    def __init__(
        self, queue: WaitingQueue, cache: LruBlocks, truth: CostModel, *, page_size: int
    ) -> None:
        """An idle engine. `queue` was made with `cache.hashes`; the cache's notifications are
        connected to it here.
        """
        self.queue = queue
        self.decode = DecodeStage(truth)
        self._cache = cache
        self._truth = truth
        self._page_size = page_size
        self._served: dict[str, Served] = {}
        self._running: list[_Prefill] = []
        self.admit: Callable[[Waiting, float], bool] = _everything
        """Asked on arrival, with the seconds until the prefills under way end."""
        self.on_first_token: Callable[[Served], None] = _ignore
        """Told when a prefill has ended."""
        self.on_end: Callable[[Served], None] = _ignore
        """Told when the last token was generated."""
        self.on_step: Callable[[SimulatedStep], None] = _ignore_step
        """Told of every step."""
        cache.on_added, cache.on_removed = queue.added, queue.removed

    def run(self, requests: Iterable[Waiting]) -> list[Served]:
        """Serve everything; the results are in the order of arrival.

        Args:
            requests: in order of arrival; one generates `max_tokens` tokens exactly.
        """
        arrivals, now_s = deque(requests), 0.0
        while arrivals or self.queue or self._running:
            if not self._running and not self.queue:
                now_s = max(now_s, arrivals[0].arrival_s)
            while arrivals and arrivals[0].arrival_s <= now_s:
                self._arrive(arrivals.popleft(), 0.0)
            step = self._step(now_s)
            if step is None:
                continue
            now_s = step.end_s
            left_s = sum(
                self._truth.prefill_s(one.request.tokens, one.done)
                for one in self._running
                if one.left
            )
            while arrivals and arrivals[0].arrival_s < now_s:
                coming = arrivals.popleft()
                self._arrive(coming, now_s - coming.arrival_s + left_s)
            ended = [one.record for one in self._running if not one.left]
            self._running = [one for one in self._running if one.left]
            for record in ended:
                self._finish(record, now_s)
        self._end(self.decode.advance(float("inf")))
        return list(self._served.values())

    def _arrive(self, request: Waiting, busy_s: float) -> None:
        self._served[request.id] = Served(request)
        self._end(self.decode.advance(request.arrival_s))
        if self.admit(request, busy_s):
            self.queue.add(request)

    def _step(self, now_s: float) -> SimulatedStep | None:
        """The next step; None if nothing can be computed."""
        running, own_batch = self._running, self.queue.policy.wants_own_batch
        self.queue.begin_scan(
            full=any(own_batch(one.request) for one in running),
            prefilling=[one.request.id for one in running],
        )
        self._give_way()
        chunks = list[PrefillChunk]()
        budget = self._truth.chunk_tokens
        if budget:
            budget = step_tokens(self.queue, budget, (one.request.qos for one in running))
        before = self._before(budget)
        for one in running:
            budget -= self._compute(one, budget - before, chunks)
        while (budget > 0 or not chunks) and (prefill := self._start(now_s)):
            running.append(prefill)
            budget -= self._compute(prefill, budget, chunks)
        if not chunks:
            return None
        load = StepLoad.of([(one.first, one.stop) for one in chunks])
        step = SimulatedStep(chunks, load, now_s, now_s + self._truth.step_s(load))
        self.on_step(step)
        return step

    def _before(self, budget: int) -> int:
        """Tokens of the step that are kept for those that go before the prefills under way."""
        if not self._running:
            return 0
        first = min(self._running, key=lambda one: one.left)
        return tokens_before(self.queue, first.request, first.done, budget)

    def _compute(self, one: _Prefill, budget: int, chunks: list[PrefillChunk]) -> int:
        """Put as much of a prefill into the step as there is room for; returns the tokens."""
        tokens = min(one.left, budget) if self._truth.chunk_tokens else one.left
        if tokens <= 0:
            return 0
        chunks.append(PrefillChunk(one.record, one.done, one.done + tokens))
        one.done += tokens
        self._cache.store(one.request.block_hashes[: one.done // self._page_size])
        return tokens

    def _start(self, now_s: float) -> _Prefill | None:
        if self.queue.peek() is None:
            return None
        record = self._served[self.queue.pop().id]
        request = record.request
        usable = min(len(request.block_hashes), (request.tokens - 1) // self._page_size)
        cached = self._cache.prefix(request.block_hashes, usable) * self._page_size
        if record.start_s is None:
            record.start_s, record.cached_tokens = now_s, cached
        return _Prefill(record, cached)

    def _give_way(self) -> None:
        """Preempt the prefill that was started last of those that should yield."""
        for one in reversed(self._running):
            if self.queue.fair_share.should_yield(one.request.qos):
                self._running.remove(one)
                self.queue.prepend(one.request)
                return

    def _finish(self, record: Served, now_s: float) -> None:
        request = record.request
        record.first_token_s = now_s
        self.on_first_token(record)
        self._end(self.decode.advance(now_s))
        if request.max_tokens > 1:
            self.decode.add(request.id, request.tokens, request.max_tokens - 1, now_s)
        else:
            self._end([(request.id, now_s)])

    def _end(self, ended: Iterable[tuple[str, float]]) -> None:
        for request_id, end_s in ended:
            record = self._served[request_id]
            record.end_s = end_s
            self.on_end(record)


def _everything(request: Waiting, busy_s: float) -> bool:
    return True


def _ignore(served: Served) -> None:
    pass


def _ignore_step(step: SimulatedStep) -> None:
    pass
