# SPDX-License-Identifier: Apache-2.0
"""The prefill stage of a simulated engine: the prompts, and their parts, that a step computes."""

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
    """The parts computed in one step."""

    chunks: Sequence[PrefillChunk]
    load: StepLoad
    start_s: float
    end_s: float


@dataclass(slots=True)
class RunningPrefill:
    """A prefill that was started and has not ended."""

    record: Served
    request: Waiting
    done: int  # tokens, cached ones included

    @property
    def left(self) -> int:
        return self.request.tokens - self.done


class PrefillStage:
    """Chooses the prompt tokens of a step like vLLM with our scheduler.

    Running prefills go on first. Then requests are taken from the queue until the step has `truth.chunk_tokens` tokens
    (0: each step is one whole prompt), or fewer if classes share the engine (`step_length.step_tokens`). The prefills
    leave room for requests that overtake them (`step_length.tokens_before`), half a step at most. Between two steps a
    prefill may be preempted for a class that is owed (`FairShare.should_yield`). Requests can read blocks from the
    cache if they enter a step after the blocks were stored. `truth` gives the real durations of steps; the queue has
    its own cost model.
    """

    def __init__(
        self, queue: WaitingQueue, cache: LruBlocks, truth: CostModel, *, page_size: int
    ) -> None:
        """`queue` must be made with `cache.hashes`. The cache's notifications are connected to it here."""
        self.queue = queue
        self.cache = cache
        self._truth = truth
        self._page_size = page_size
        self._prompts: dict[str, tuple[Waiting, Served]] = {}
        self.running: list[RunningPrefill] = []
        self.decoding: Callable[[], int] = _none
        """Returns the sequences that decode in the same steps. Each takes a token of the step's budget."""
        self.may_start: Callable[[Waiting], bool] = _always
        """Called before a request leaves the queue. Returns whether there is room for its KV."""
        cache.on_added, cache.on_removed = queue.prefix_index.added, queue.prefix_index.removed

    def __len__(self) -> int:
        """Prompts that wait or run."""
        return len(self._prompts)

    def add(self, request: Waiting, record: Served) -> None:
        """Add a prompt to compute. `record` takes its outcome."""
        self._prompts[request.id] = request, record
        self.queue.add(request)

    def put_first(self, request: Waiting, record: Served) -> None:
        """Take back a prompt that lost its room. It goes before all others of its class."""
        self._prompts[request.id] = request, record
        self.queue.prepend(request)

    def cancel(self, request_id: str) -> Waiting | None:
        """Forget a prompt, and return it. None if it is not here."""
        request, _ = self._prompts.pop(request_id, (None, None))
        if request is not None:
            self.queue.remove(request_id)
            self.running = [prefill for prefill in self.running if prefill.request.id != request_id]
        return request

    def left_s(self) -> float:
        """Remaining time of the running prefills after the last scheduled step."""
        return sum(
            self._truth.prefill_s(prefill.request.tokens, prefill.done)
            for prefill in self.running
            if prefill.left
        )

    def take_ended(self) -> list[RunningPrefill]:
        """The prefills that have ended with the last step."""
        ended = [prefill for prefill in self.running if not prefill.left]
        if ended:
            self.running = [prefill for prefill in self.running if prefill.left]
            for prefill in ended:
                del self._prompts[prefill.request.id]
        return ended

    def next_step(self, now_s: float) -> list[PrefillChunk]:
        """The parts that the next step computes; empty if there are none. `store` stores their blocks."""
        queue, running = self.queue, self.running
        own_batch = queue.policy.wants_own_batch if queue.policy.splits_batches else None
        queue.begin_scan(prefilling=[active.request.id for active in running])
        if running:
            self._give_way()
        if own_batch and any(own_batch(active.request) for active in running):
            queue.begin_scan(full=True, prefilling=[active.request.id for active in running])
        chunks = list[PrefillChunk]()
        budget = self._truth.chunk_tokens
        if budget:
            own = step_tokens(queue, budget, (active.request.qos for active in running))
            budget = max(1, min(own, budget - self.decoding()))
        if running:
            before = self._before(budget)
            for active in running:
                budget -= self._compute(active, budget - before, chunks)
        while (budget > 0 or not chunks) and (prefill := self._start(now_s)):
            running.append(prefill)
            budget -= self._compute(prefill, budget, chunks)
        return chunks

    def _before(self, budget: int) -> int:
        """Tokens of the step reserved for requests that overtake the running prefills. At least one prefill must
        run."""
        first = min(self.running, key=lambda prefill: prefill.left)
        return tokens_before(self.queue, first.request, first.done, budget)

    def _compute(self, prefill: RunningPrefill, budget: int, chunks: list[PrefillChunk]) -> int:
        """Put the part of a prefill that fits into the step. Returns its tokens."""
        tokens = min(prefill.left, budget) if self._truth.chunk_tokens else prefill.left
        if tokens <= 0:
            return 0
        chunks.append(PrefillChunk(prefill.record, prefill.done, prefill.done + tokens))
        prefill.done += tokens
        self.cache.store(prefill.request.block_hashes[: prefill.done // self._page_size])
        return tokens

    def _start(self, now_s: float) -> RunningPrefill | None:
        head = self.queue.peek()
        if head is None:
            return None
        if not self.may_start(head):
            self.queue.turned_back.add(head.id)
            return None
        request = self.queue.pop()
        _, record = self._prompts[request.id]
        usable = min(len(request.block_hashes), (request.tokens - 1) // self._page_size)
        cached = self.cache.prefix(request.block_hashes, usable) * self._page_size
        if record.start_s is None:
            record.start_s, record.cached_tokens = now_s, cached
        return RunningPrefill(record, request, cached)

    def _give_way(self) -> None:
        """Preempt the newest prefill that should yield."""
        head = self.queue.head
        if head is None:
            return
        for prefill in reversed(self.running):
            if self.queue.fair_share.should_yield(prefill.request.qos, head.class_name):
                self.running.remove(prefill)
                self.queue.prepend(prefill.request)
                return


def _none() -> int:
    return 0


def _always(request: Waiting) -> bool:
    return True
