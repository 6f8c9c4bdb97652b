# SPDX-License-Identifier: Apache-2.0
"""A running prefill gives way to a class of higher priority, between two of its chunks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from scheduler_plugins.queue.waiting import WaitingQueue
from scheduler_plugins.vllm.cache import CacheView
from scheduler_plugins.vllm.request_queue import OrderedRequests, describe, tokens_left

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


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
                self._done_for = {one for one in self._done_for if one in self._order}
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
        wanted = sum(
            one.num_tokens_with_spec + one.num_output_placeholders - one.num_computed_tokens
            for one in scheduler.running
        )
        spared = self._order.estimator.known_tokens(describe(head, self._cache))
        room: int = scheduler.max_num_scheduled_tokens - wanted
        full = len(scheduler.running) >= scheduler.max_num_active_reqs
        small = tokens_left(request) <= 2 * self._cache.page_size and room > 0
        return not full and (small or head.num_tokens - spared <= room)
