# SPDX-License-Identifier: Apache-2.0
"""The two ways in which a waiting request overtakes a running prefill: room in the prefill's step, or its preemption."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from scheduler_plugins.queue.step_length import MOST_SHARED, step_tokens
from scheduler_plugins.queue.waiting import WaitingQueue
from scheduler_plugins.vllm.cache import CacheView
from scheduler_plugins.vllm.request_queue import OrderedRequests, describe, qos_of, tokens_left

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


class StepShape:
    """Lowers two limits of vLLM while vLLM schedules a step.

    - The budget of the step, while classes share the engine (`step_length.step_tokens`).
    - The tokens of each running prefill. vLLM schedules these before waiting requests, so the limit leaves room for the
      requests that overtake them (`step_length.tokens_before`).
    """

    def __init__(self, scheduler: Scheduler, waiting: OrderedRequests, order: WaitingQueue) -> None:
        self._scheduler = scheduler
        self._tokens: int = scheduler.max_num_scheduled_tokens
        self._chunk: int = scheduler.scheduler_config.long_prefill_token_threshold
        self._adaptive: bool = getattr(scheduler, "adaptive_long_prefill_threshold", False)
        self._waiting = waiting
        self._order = order
        # A request that must be computed in one piece may need a whole step.
        self._may_cut = (
            scheduler.scheduler_config.enable_chunked_prefill
            and not scheduler.has_mamba_layers
            and not scheduler.vllm_config.model_config.is_multimodal_model
        )

    def limit(self, prefills: Sequence[Request]) -> None:
        """Set the limits of the next step; `prefills` are running."""
        if not self._may_cut or not (prefills or self._order.fair_share.is_shared):
            return  # nothing to share: vLLM's own limits apply
        scheduler, config = self._scheduler, self._scheduler.scheduler_config
        tokens = self._step_tokens(prefills)
        scheduler.max_num_scheduled_tokens = tokens
        if prefills and (chunk := self._chunk_tokens(tokens, prefills)):
            config.long_prefill_token_threshold = min(chunk, self._own_chunk_tokens() or chunk)
            scheduler.adaptive_long_prefill_threshold = False  # it would raise our limit

    def lift(self) -> None:
        """Restore vLLM's own limits."""
        self._scheduler.max_num_scheduled_tokens = self._tokens
        self._scheduler.scheduler_config.long_prefill_token_threshold = self._chunk
        self._scheduler.adaptive_long_prefill_threshold = self._adaptive

    def _step_tokens(self, prefills: Sequence[Request]) -> int:
        """The budget of the step. A short step limits prompts; decodes get their tokens in addition."""
        classes = (qos_of(prefill) for prefill in prefills)
        tokens = step_tokens(self._order, self._tokens, classes)
        decoding = len(self._scheduler.running) - len(prefills)
        return int(min(self._tokens, tokens + decoding * (1 + self._scheduler.num_spec_tokens)))

    def _chunk_tokens(self, budget: int, prefills: Sequence[Request]) -> int:
        """The most tokens of a prefill; 0: no limit."""
        scheduler = self._scheduler
        reserved = 0
        if len(scheduler.running) < scheduler.max_num_active_reqs:
            shortest = min(prefills, key=tokens_left)
            loaded = self._loaded_tokens(tokens_left(shortest), budget)
            reserved = loaded + self._waiting.tokens_before(shortest, budget - MOST_SHARED * loaded)
        if not reserved and not self._holds_up_decoding(prefills):
            return 0
        decoding = sum(map(_may_decode, scheduler.running)) - len(prefills)
        budget -= int(decoding * (1 + scheduler.num_spec_tokens))
        left = sorted(map(tokens_left, prefills))
        if sum(left) <= budget - reserved:
            return 0
        share = largest_share(left, budget - reserved)
        # vLLM's limit also applies to prefills that start.
        if share < reserved:
            share = largest_share(left, budget) if self._holds_up_decoding(prefills) else 0
        return share

    def _loaded_tokens(self, below: int, budget: int) -> int:
        """Tokens that are left of requests whose KV has come, if fewer than `below` are. vLLM starts these requests before
        all others, and they hold pages until then."""
        scheduler, tokens = self._scheduler, 0
        if not self._order.policy.overtakes_running:
            return 0
        for request_id in scheduler.finished_recving_kv_req_ids:
            left = max(1, tokens_left(scheduler.requests[request_id]))
            if left < below and tokens + left <= budget // MOST_SHARED:
                tokens += left
        return tokens

    def _own_chunk_tokens(self) -> int:
        """vLLM's own limit of a prefill's tokens; 0: none."""
        if not self._chunk or not self._adaptive:
            return self._chunk
        requests: int = sum(self._scheduler.get_request_counts())
        most: int = self._scheduler.scheduler_config.max_num_batched_tokens
        return max(self._chunk, most // requests)

    def _holds_up_decoding(self, prefills: Sequence[Request]) -> bool:
        """Whether a decoding request started after one of these prefills. vLLM schedules running requests in the order
        in which they started, and gives a prefill the whole rest of the step."""
        last = self._scheduler.running[-len(prefills) :]
        return not all(request.is_prefill_chunk for request in last)


def _may_decode(request: Request) -> bool:
    """Whether vLLM may schedule the request. With async scheduling, vLLM knows that a token is the last before the
    token exists, and keeps such requests among the running requests."""
    placeholders = request.num_output_placeholders
    last = request.num_prompt_tokens + request.max_tokens - 2
    return not placeholders or request.num_computed_tokens - placeholders < last


def largest_share(wants: Sequence[int], budget: int) -> int:
    """The largest limit with which all `wants`, in ascending order, fit in the budget; at least 1."""
    for index, want in enumerate(wants):
        share = budget // (len(wants) - index)
        if want > share:
            return max(1, share)
        budget -= want
    return max(1, wants[-1])


class GiveWay:
    """Preempts a prefill for the next request, like vLLM's reset of the cache does it before a step.

    The computed KV stays in the prefix cache, so this is only for caches that return whole prefixes. It is done once
    per waiting request, so a request that cannot start after all does not stop a prefill again and again. It must not
    be done while vLLM is paused: a preempted request would wait until vLLM resumes, and vLLM would consider the engine
    drained.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        waiting: OrderedRequests,
        order: WaitingQueue,
        cache: CacheView,
    ) -> None:
        self._scheduler = scheduler
        self._waiting = waiting
        self._order = order
        self._cache = cache
        self._done_for: set[str] = set()

    def step(self, prefills: list[Request]) -> None:
        """A step is about to be scheduled: preempt one of the running `prefills`, and take it out of the list, if a
        class of higher priority is owed and its request waits only for its turn."""
        head = self._waiting.head()
        if (
            head is None
            or head.request_id in self._done_for
            or head.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        ):
            return
        scheduler = self._scheduler
        for request in reversed(prefills):
            if not self._waiting.is_owed_over(request):
                continue
            if self._fits_beside(head, request):
                return
            if scheduler._request_blocks_can_be_freed(request):
                self._done_for = {
                    request_id for request_id in self._done_for if request_id in self._order
                }
                self._done_for.add(head.request_id)
                scheduler.running.remove(request)
                prefills.remove(request)
                scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
                # The request may start again in this very step, so the worker must get all of it.
                scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
                return

    def _fits_beside(self, head: Request, request: Request) -> bool:
        """Whether this step can compute all of `head`, or nearly as much as without `request`. A preempted prefill
        computes up to one block again."""
        scheduler = self._scheduler
        needed = sum(
            running.num_tokens_with_spec
            + running.num_output_placeholders
            - running.num_computed_tokens
            for running in scheduler.running
        )
        spared = self._order.estimator.known_tokens(describe(head, self._cache))
        room: int = scheduler.max_num_scheduled_tokens - needed
        full = len(scheduler.running) >= scheduler.max_num_active_reqs
        small = tokens_left(request) <= 2 * self._cache.page_size and room > 0
        return not full and (small or head.num_tokens - spared <= room)
