# SPDX-License-Identifier: Apache-2.0
"""The choice of the requests that the next step starts, made on one rank from SGLang's waiting requests.

SGLang sorts a list, and starts requests from its front until the step is full. Here requests are popped from the queue
of `scheduler_plugins.queue` until the step is full. SGLang may start only these. Requests that it did not start are put
back before the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.cost.online import OnlineFit
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.qos.live import LiveSettings
from scheduler_plugins.queue.step_length import step_tokens, tokens_before
from scheduler_plugins.queue.waiting import LOOKS_PER_PEEK, WaitingQueue
from scheduler_plugins.sglang.prefixes import Grain, PrefixView
from scheduler_plugins.sglang.ranks import Decision
from scheduler_plugins.sglang.requests import describe

_MOST_ENDED = 4096
"""The most remembered requests that neither wait nor have stored their prompt."""


def load_of(batch: Any) -> StepLoad:
    """The work of a `ScheduleBatch`. A mixed batch holds decodes as prompts of one new token."""
    if batch.forward_mode.is_extend():
        chunks = zip(batch.prefix_lens, batch.extend_lens, strict=True)
        return StepLoad.of((before, before + new) for before, new in chunks)
    if batch.forward_mode.is_decode():
        return StepLoad(0, 0, len(batch.reqs), int(batch.seq_lens_cpu.sum()))
    return StepLoad(0, 0, 0, 0)


class StepTimer:
    """Measures steps from their launch to their result, and teaches the cost model.

    SGLang may launch a step while the previous step runs. Its time is counted from the end of the previous step, so no
    time is counted twice.
    """

    def __init__(self, fit: OnlineFit) -> None:
        self.fit = fit
        self._ended_s = 0.0

    def ended(self, batch: Any, now_s: float) -> None:
        """Called when the result of a step has been processed. `now_s` is `time.monotonic()`, as `launch_ts` is."""
        begun_s = max(batch.launch_ts or now_s, self._ended_s)
        self.fit.note(load_of(batch), now_s - begun_s)
        self._ended_s = now_s
        self.fit.catch_up()


@dataclass(frozen=True)
class Outcome:
    """SGLang's result of the last decision."""

    started: frozenset[str] = frozenset()
    refused: str = ""
    """The request for which SGLang's cache had no room, if any."""


class Prefill(NamedTuple):
    """The request whose prompt is computed in chunks. SGLang has one at a time."""

    request: Waiting
    computed_tokens: int

    @property
    def left_tokens(self) -> int:
        return self.request.tokens - self.computed_tokens


class StepDecider:
    """Decides step by step. It only reads SGLang's scheduler, except for look-ups in the radix cache."""

    def __init__(self, scheduler: Any, settings: LiveSettings, start: CostModel | None) -> None:
        """
        Args:
            scheduler: SGLang's, initialised up to its schedule policy.
            start: a profile's cost model.
        """
        self._scheduler = scheduler
        self._settings = settings
        self._page_size: int = scheduler.page_size
        chunk_tokens = scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        self._most_tokens: int = min(chunk_tokens, scheduler.max_prefill_tokens)
        self._steps = StepTimer(OnlineFit(start=start, chunk_tokens=chunk_tokens))
        self._view = PrefixView(scheduler.tree_cache, self._page_size)
        self.queue = WaitingQueue(
            settings.policy(),
            self._view,
            page_size=self._view.page_size,
            costs=self._steps.fit,
            classes=settings.classes,
            max_overtaken=settings.max_overtaken,
        )
        self._sign = 1 if scheduler.schedule_low_priority_values_first else -1
        self._waiting: dict[str, Waiting] = {}
        """All waiting requests of SGLang. Requests in `_popped` are not in the queue."""
        self._popped: dict[str, Waiting] = {}

    def decide(self, waiting: Sequence[Any], running_batch: Any, outcome: Outcome) -> Decision:
        """The requests that the step that is scheduled now may start.

        Args:
            waiting: SGLang's waiting requests (`Req`).
            outcome: the outcome of the last decision.
        """
        self._view.begin()
        requests = {req.rid: req for req in waiting}
        self._settle(requests, outcome)
        if self._settings.changed():
            self.queue.set_policy(self._settings.policy(), self._settings.max_overtaken)
            self.queue.set_classes(self._settings.classes)
        self.queue.prefix_index.removed()  # prefixes that may have been evicted are looked up again
        prefill = self._prefill_under_way()
        self.queue.begin_scan(
            full=prefill is not None and self._wants_own_batch(prefill.request),
            prefilling=[] if prefill is None else [prefill.request.id],
        )
        self._take_in(requests)
        budget = self._step_tokens(prefill)
        reserved, left = 0, budget
        if prefill is not None:
            reserved = self._reserved(prefill, budget)
            left -= min(prefill.left_tokens, budget - reserved)
        slots = self._scheduler.get_num_allocatable_reqs(
            len(running_batch.reqs), running_batch=running_batch
        )
        start = self._choose(left, slots, prefill)
        limit = budget if budget < self._most_tokens else None
        return Decision(start, self._view.looked_up, limit, reserved)

    def ended(self, batch: Any, now_s: float) -> None:
        """Called when SGLang has processed the result of a step. The step's prompts are in the radix cache, or will be
        before the next decision. `now_s` is `time.monotonic()`."""
        self._steps.ended(batch, now_s)
        if not batch.forward_mode.is_extend():
            return
        size = self._view.page_size
        for req, before, new in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            grains = self._view.grains(req.rid)
            self.queue.prefix_index.added(grains[before // size : (before + new) // size])
            if req.rid not in self._waiting and before + new >= len(grains) * size:
                self._view.forget(req.rid)

    def _settle(self, requests: Mapping[str, Any], outcome: Outcome) -> None:
        """Put back requests that were popped and not started, and forget requests that no longer wait."""
        for request_id, request in reversed(self._popped.items()):
            if request_id in outcome.started:
                del self._waiting[request_id]
                continue
            self.queue.skipped(request_id)
            if request_id in requests:
                self.queue.prepend(request)
            if request_id == outcome.refused:
                self.queue.turned_back.add(request_id)
        self._popped = {}
        for request_id in self._waiting.keys() - requests.keys():
            del self._waiting[request_id]
            self.queue.remove(request_id)
            self._view.forget(request_id)
        if len(self._view) > _MOST_ENDED + 2 * len(requests):
            self._view.retain(requests)

    def _take_in(self, requests: Mapping[str, Any]) -> None:
        """Add requests that came since the last step."""
        for request_id, req in requests.items():
            if request_id in self._waiting:
                continue
            described = describe(req, self._view.add(req), self._sign)
            self._waiting[request_id] = described
            if req.retracted_stain:  # the request ran, and SGLang took its pages back
                self.queue.prepend(described)
            else:
                self.queue.add(described)

    def _prefill_under_way(self) -> Prefill | None:
        req = self._scheduler.chunked_req
        if req is None:
            return None
        return Prefill(describe(req, self._view.grains(req.rid), self._sign), req.extend_end)

    def _wants_own_batch(self, request: Waiting) -> bool:
        policy = self.queue.policy
        return policy.splits_batches and policy.wants_own_batch(request)

    def _step_tokens(self, prefill: Prefill | None) -> int:
        """Prompt tokens of the step, in whole pages."""
        classes = [] if prefill is None else [prefill.request.qos]
        tokens = step_tokens(self.queue, self._most_tokens, classes)
        if tokens >= self._most_tokens or self._scheduler.chunked_prefill_size is None:
            return self._most_tokens
        return max(self._page_size, tokens // self._page_size * self._page_size)

    def _reserved(self, prefill: Prefill, budget_tokens: int) -> int:
        """Prompt tokens of the step for requests that overtake a running prefill. They are whole pages, and leave at
        least one page for the prefill.

        SGLang does not preempt a prefill between two chunks. So a class that is owed gets room for its next request, up
        to the size of the step, and the prefill gets the rest.
        """
        head = self.queue.head
        if head is None or not self._view.enabled or head.request.id in self.queue.turned_back:
            return 0
        tokens = tokens_before(self.queue, prefill.request, prefill.computed_tokens, budget_tokens)
        most = budget_tokens - self._page_size
        if self.queue.fair_share.should_yield(prefill.request.qos, head.class_name):
            fresh = self._pages(self._fresh(head.request))
            tokens = max(tokens, fresh if fresh <= most else 0)
        return min(self._pages(tokens), max(0, most))

    def _choose(self, left_tokens: int, slots: int, prefill: Prefill | None) -> list[str]:
        """Pop the requests that fill the step.

        If a prompt continues a prefix that this step computes anyway, the request waits for a later step, which finds
        the prefix in the cache.
        """
        start: list[str] = []
        coming: set[Grain] = set()
        if prefill is not None:
            computed = prefill.computed_tokens // self._view.page_size
            coming.update(self._view.grains(prefill.request.id)[computed:])
        late = 0
        while left_tokens > 0 and len(start) < slots and late < LOOKS_PER_PEEK:
            if self.queue.peek() is None:
                break
            request = self.queue.pop()
            self._popped[request.id] = request
            fresh = self._fresh(request)
            grains = self._view.grains(request.id)
            missing = grains[(request.tokens - fresh) // self._view.page_size :]
            if missing and missing[0] in coming:
                self.queue.skipped(request.id)
                late += 1
                continue
            coming.update(missing)
            start.append(request.id)
            left_tokens -= self._pages(fresh)
        return start

    def _fresh(self, request: Waiting) -> int:
        """Tokens of a request that are not cached."""
        return request.tokens - self.queue.estimator.known_tokens(request)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size) * self._page_size
