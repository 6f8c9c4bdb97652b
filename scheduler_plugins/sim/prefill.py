# SPDX-License-Identifier: Apache-2.0
"""The prefill stage of a simulated engine: which prompts, and how much of them, a step computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.queue.step_length import step_tokens, tokens_before
from scheduler_plugins.queue.waiting import WaitingQueue
from scheduler_plugins.sim.cache import LruBlocks
from scheduler_plugins.sim.served import Served


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
class RunningPrefill:
    """One that was started and has not ended."""

    record: Served
    request: Waiting
    done: int  # tokens, cached ones included

    @property
    def left(self) -> int:
        return self.request.tokens - self.done


class PrefillStage:
    """Puts the prompt tokens of a step together as vLLM does with our scheduler.

    Prefills under way go on first; then requests are taken from the queue until the step has
    `truth.chunk_tokens` tokens (0: each step is one whole prompt), or fewer where classes share the
    engine (`step_length.step_tokens`). The prefills leave room for requests
    that overtake them (`step_length.tokens_before`), half a step at most. Between two steps a
    prefill may be preempted for a class that is owed (`FairShare.should_yield`). Blocks can be read
    from the cache by whatever enters a step after they were stored. `truth` says how long steps
    really take; the queue has a cost model of its own.
    """

    def __init__(
        self, queue: WaitingQueue, cache: LruBlocks, truth: CostModel, *, page_size: int
    ) -> None:
        """`queue` was made with `cache.hashes`; the cache's notifications are connected to it
        here."""
        self.queue = queue
        self.cache = cache
        self._truth = truth
        self._page_size = page_size
        self._prompts: dict[str, tuple[Waiting, Served]] = {}
        self.running: list[RunningPrefill] = []
        self.may_start: Callable[[Waiting], bool] = _always
        """Asked before a request leaves the queue: whether there is room for its KV."""
        cache.on_added, cache.on_removed = queue.added, queue.removed

    def __len__(self) -> int:
        """Prompts that wait or are under way."""
        return len(self._prompts)

    def add(self, request: Waiting, record: Served) -> None:
        """A prompt to compute. `record` is what becomes of it."""
        self._prompts[request.id] = request, record
        self.queue.add(request)

    def put_first(self, request: Waiting, record: Served) -> None:
        """A prompt that lost its room: it goes before all others of its class."""
        self._prompts[request.id] = request, record
        self.queue.prepend(request)

    def cancel(self, request_id: str) -> Waiting | None:
        """Forget a prompt, and return it. None if it is not here."""
        request, _ = self._prompts.pop(request_id, (None, None))
        if request is not None:
            self.queue.remove(request_id)
            self.running = [one for one in self.running if one.request.id != request_id]
        return request

    def left_s(self) -> float:
        """Time that the prefills under way still take after the step that was put together last."""
        return sum(
            self._truth.prefill_s(one.request.tokens, one.done) for one in self.running if one.left
        )

    def take_ended(self) -> list[RunningPrefill]:
        """The prefills that have ended with the last step."""
        ended = [one for one in self.running if not one.left]
        if ended:
            self.running = [one for one in self.running if one.left]
            for one in ended:
                del self._prompts[one.request.id]
        return ended

    def next_step(self, now_s: float) -> list[PrefillChunk]:
        """What the next step computes; empty if nothing can be. Blocks are stored by `store`."""
        queue, running = self.queue, self.running
        own_batch = queue.policy.wants_own_batch if queue.policy.splits_batches else None
        queue.begin_scan(prefilling=[one.request.id for one in running])
        if running:
            self._give_way()
        if own_batch and any(own_batch(one.request) for one in running):
            queue.begin_scan(full=True, prefilling=[one.request.id for one in running])
        chunks = list[PrefillChunk]()
        budget = self._truth.chunk_tokens
        if budget:
            budget = step_tokens(queue, budget, (one.request.qos for one in running))
        if running:
            before = self._before(budget)
            for one in running:
                budget -= self._compute(one, budget - before, chunks)
        while (budget > 0 or not chunks) and (prefill := self._start(now_s)):
            running.append(prefill)
            budget -= self._compute(prefill, budget, chunks)
        return chunks

    def _before(self, budget: int) -> int:
        """Tokens of the step that are kept for those that go before the prefills under way, of
        which there are some."""
        first = min(self.running, key=lambda one: one.left)
        return tokens_before(self.queue, first.request, first.done, budget)

    def _compute(self, one: RunningPrefill, budget: int, chunks: list[PrefillChunk]) -> int:
        """Put as much of a prefill into the step as there is room for; returns the tokens."""
        tokens = min(one.left, budget) if self._truth.chunk_tokens else one.left
        if tokens <= 0:
            return 0
        chunks.append(PrefillChunk(one.record, one.done, one.done + tokens))
        one.done += tokens
        self.cache.store(one.request.block_hashes[: one.done // self._page_size])
        return tokens

    def _start(self, now_s: float) -> RunningPrefill | None:
        head = self.queue.peek()
        if head is None:
            return None
        if not self.may_start(head):
            self.queue.no_room(head.id)
            return None
        request = self.queue.pop()
        _, record = self._prompts[request.id]
        usable = min(len(request.block_hashes), (request.tokens - 1) // self._page_size)
        cached = self.cache.prefix(request.block_hashes, usable) * self._page_size
        if record.start_s is None:
            record.start_s, record.cached_tokens = now_s, cached
        return RunningPrefill(record, request, cached)

    def _give_way(self) -> None:
        """Preempt the prefill that was started last of those that should yield."""
        head = self.queue.head
        if head is None:
            return
        for one in reversed(self.running):
            if self.queue.fair_share.should_yield(one.request.qos, head.class_name):
                self.running.remove(one)
                self.queue.prepend(one.request)
                return


def _always(request: Waiting) -> bool:
    return True
