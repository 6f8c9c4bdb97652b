# SPDX-License-Identifier: Apache-2.0
"""A simulated engine: one prefill at a time, in chunks, a prefix cache, decode elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.policy.queue.request import Waiting
from scheduler_plugins.queue.waiting import WaitingQueue
from scheduler_plugins.sim.cache import LruBlocks
from scheduler_plugins.sim.decode import DecodeStage


@dataclass(slots=True)
class Served:
    """What became of one request; times in seconds, by the clock of the arrivals."""

    request: Waiting
    cached_tokens: int = 0
    """What the cache spared when it was first started."""
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


class Step(NamedTuple):
    """One chunk of a prefill."""

    record: Served
    load: StepLoad
    start_s: float
    end_s: float


class Engine:
    """Takes requests from a queue one at a time and prefills each, chunk by chunk.

    Between two chunks the request may be preempted for a class that is owed
    (`Turns.should_yield`). A prompt's blocks can be read from the cache once its prefill has
    ended or was preempted. `truth` is how long things really take, and how long chunks are; what
    the queue believes is its own affair.
    """

    def __init__(
        self, queue: WaitingQueue, cache: LruBlocks, truth: CostModel, *, block_tokens: int
    ) -> None:
        """An idle engine. `queue` was made with `cache.hashes`; the cache's notifications are
        connected to it here.
        """
        self.queue = queue
        self.decode = DecodeStage(truth)
        self._cache = cache
        self._truth = truth
        self._block_tokens = block_tokens
        self._served: dict[str, Served] = {}
        self.admit: Callable[[Waiting, float], bool] = _everything
        """Asked on arrival, with the seconds until the running prefill ends."""
        self.on_first_token: Callable[[Served], None] = _ignore
        """Told when a prefill has ended."""
        self.on_end: Callable[[Served], None] = _ignore
        """Told when the last token was generated."""
        self.on_step: Callable[[Step], None] = _ignore_step
        """Told of every chunk."""
        cache.on_added, cache.on_removed = queue.added, queue.removed

    def run(self, requests: Iterable[Waiting]) -> list[Served]:
        """Serve everything; the results are in the order of arrival.

        Args:
            requests: in order of arrival; one generates `max_tokens` tokens exactly.
        """
        arrivals = deque(requests)
        now_s, running, done = 0.0, None, 0
        while arrivals or self.queue or running:
            if running is None and not self.queue:
                now_s = max(now_s, arrivals[0].arrival_s)
            while arrivals and arrivals[0].arrival_s <= now_s:
                self._arrive(arrivals.popleft(), 0.0)
            self.queue.begin_scan()
            if running is not None and self.queue.turns.should_yield(running.request.qos):
                self._preempt(running, done)
                running = None
            if running is None:
                running, done = self._start(now_s)
            if running is None:
                continue
            step = self._step(running, now_s, done)
            now_s, done = step.end_s, done + step.load.tokens
            left_s = self._left_s(running, done)
            while arrivals and arrivals[0].arrival_s < now_s:
                coming = arrivals.popleft()
                self._arrive(coming, now_s - coming.arrival_s + left_s)
            if done == running.request.tokens:
                self._finish(running, now_s)
                running = None
        self._end(self.decode.advance(float("inf")))
        return list(self._served.values())

    def _arrive(self, request: Waiting, busy_s: float) -> None:
        self._served[request.id] = Served(request)
        self._end(self.decode.advance(request.arrival_s))
        if self.admit(request, busy_s):
            self.queue.add(request)

    def _start(self, now_s: float) -> tuple[Served | None, int]:
        if self.queue.peek() is None:
            return None, 0
        record = self._served[self.queue.pop().id]
        request = record.request
        usable = min(len(request.block_hashes), (request.tokens - 1) // self._block_tokens)
        cached = self._cache.prefix(request.block_hashes, usable) * self._block_tokens
        if record.start_s is None:
            record.start_s, record.cached_tokens = now_s, cached
        return record, cached

    def _step(self, record: Served, now_s: float, done: int) -> Step:
        left = record.request.tokens - done
        tokens = min(left, self._truth.chunk_tokens or left)
        load = StepLoad.of([(done, done + tokens)])
        step = Step(record, load, now_s, now_s + self._truth.step_s(load))
        self.on_step(step)
        return step

    def _left_s(self, record: Served, done: int) -> float:
        tokens = record.request.tokens
        return self._truth.prefill_s(tokens, done) if done < tokens else 0.0

    def _preempt(self, record: Served, done: int) -> None:
        self._cache.store(record.request.block_hashes[: done // self._block_tokens])
        self.queue.prepend(record.request)

    def _finish(self, record: Served, now_s: float) -> None:
        request = record.request
        self._cache.store(request.block_hashes)
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


def _ignore_step(step: Step) -> None:
    pass
