# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with our order: `--scheduler-cls scheduler_plugins.vllm.PrefixAwareScheduler`.

vLLM decides everything except the order: it calls our queue (`request_queue.py`) instead of its own. These are added
around its methods:

- before `schedule`: changed settings and changes of the prefix cache; a prefill can yield to a class that is owed; the
  length of the step and of its prefills is set, and the order of eviction
- behind the model and after `update_from_output`: the step's time, first tokens and the load report
- around `add_request` and the end of a request: its predictions, and the blocks that it leaves
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from scheduler_plugins.cost.online import OnlineFit
from scheduler_plugins.cost.profile import load
from scheduler_plugins.qos.file import SchedulerSection
from scheduler_plugins.qos.live import LiveSettings
from scheduler_plugins.qos.settings import cost_model_path, settings_path
from scheduler_plugins.queue.waiting import LOOKS_PER_PEEK, WaitingQueue
from scheduler_plugins.vllm.cache import CacheView
from scheduler_plugins.vllm.discard import SuffixDiscard
from scheduler_plugins.vllm.overtaking import GiveWay, StepShape
from scheduler_plugins.vllm.reporter import Reporter
from scheduler_plugins.vllm.request_queue import (
    OrderedRequests,
    describe,
    is_loaded,
    is_prefill_only,
)
from scheduler_plugins.vllm.steps import StepTimer

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

MAY_COME = 64
"""The number of expected requests for which spare blocks are put in front. If more come at once, some may evict shared
blocks."""

logger = logging.getLogger("scheduler_plugins.vllm")


class PrefixAwareScheduler(AsyncScheduler):
    """Orders the waiting requests of each class by their cost with the present cache.

    It works with and without async scheduling, alone and on either engine of a pair.
    """

    max_num_scheduled_tokens: int  # vLLM's budget of a step; `StepShape` lowers it for one step

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """The arguments are vLLM's.

        Raises:
            QosError, ProfileError: the settings or the named cost model are invalid.
        """
        super().__init__(*args, **kwargs)
        if not self.scheduler_config.async_scheduling:
            # vLLM would not have used its async scheduler, so its bookkeeping must not be used either.
            for name in ("_update_after_schedule", "_update_request_with_output"):
                setattr(self, name, MethodType(getattr(Scheduler, name), self))
        # A file's policy overrides `--scheduling-policy priority`.
        by_priority = self.scheduler_config.policy == "priority"
        without = SchedulerSection(policy="priority") if by_priority else SchedulerSection()
        self._live = LiveSettings(settings_path(self.vllm_config), without)
        self._cache = CacheView(self.kv_cache_manager)
        self._page_size: int = self._cache.page_size
        profile = cost_model_path(self.vllm_config)
        start = load(profile) if profile else None
        self._steps = StepTimer(OnlineFit(start=start, chunk_tokens=self.max_num_scheduled_tokens))
        self._order = WaitingQueue(
            self._live.policy(),
            self._cache,
            page_size=self._page_size,
            costs=self._steps.fit,
            classes=self._live.classes,
            max_overtaken=self._live.max_overtaken,
        )
        self.waiting = OrderedRequests(self._order, self._cache)
        one_group = len(self.kv_cache_config.kv_cache_groups) == 1
        self._shape = StepShape(self, self.waiting, self._order)
        self._whole_cache = self._cache.enabled and one_group
        self._blocks_ahead: int = 1 - int(-self.num_lookahead_tokens // self._page_size)
        self._discard = SuffixDiscard(self._cache, self._order.prefix_index.ends_prefix)
        if self._whole_cache:
            self._cache.watch_evictions(self._discard.evicted)
        self._give_way = GiveWay(self, self.waiting, self._order, self._cache)
        self._untidy = False
        self._scheduled: tuple[SchedulerOutput, float] | None = None  # not noted yet, and when
        self._reporter = Reporter(self.vllm_config, self._order, self._steps)
        self._reporter.use(self._live.classes)
        logger.info("waiting requests are ordered by the policy %s", type(self._order.policy))

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._live.changed():
            self._apply_settings()
        if self._untidy:
            self._tidy_up()
        prefills = [request for request in self.running if request.is_prefill_chunk]
        ids = [request.request_id for request in prefills]
        self.waiting.begin_scan(prefilling=ids)
        if prefills:
            if self.pause_state == PauseState.UNPAUSED and self._whole_cache:
                self._give_way.step(prefills)
            if self._prefills_own_batch():
                self.waiting.begin_scan(full=True, prefilling=ids)
        if self.pause_state == PauseState.UNPAUSED:  # else no request can start and overtake
            self._shape.limit(prefills)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self._shape.lift()
        # If vLLM balances data-parallel ranks, it lets prefills start only in some steps.
        held_back = bool(args[0] if args else kwargs.get("throttle_prefills"))
        self.waiting.end_scan((lambda _: True) if held_back else self._has_room)
        self._scheduled = output, time.monotonic()
        self._untidy = True
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """vLLM calls this when the model has begun to compute the step. So the work for the next step runs in parallel
        with the model."""
        self._tidy_up()
        return super().get_grammar_bitmask(scheduler_output)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        self._note_step()
        load = self._steps.ended(scheduler_output, time.monotonic())
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if load.tokens:  # other requests only go on
            self._note_first_tokens(outputs)
        if not self.running and self.get_num_unfinished_requests() == 0:
            self._reporter.publish(self.running, time.monotonic(), idle=True)
        return outputs

    def add_request(self, request: Request) -> None:
        self._note_step()
        if self.connector is None:
            # A client can write anything. If no engine sent the KV, its prompt would still cost nothing.
            request.kv_transfer_params = None
        if request.request_id not in self.requests:
            waiting = describe(request, self._cache)
            self._reporter.arrived(waiting, self.running)
        super().add_request(request)

    def shutdown(self) -> None:
        self._reporter.close()
        super().shutdown()

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        ledger = self._reporter.ledger
        if request.num_output_tokens or request.status == RequestStatus.FINISHED_STOPPED:
            # The request may end with its first token, before the step's outputs are processed.
            ledger.token(request.request_id, time.time())
        ledger.gone(request.request_id, request.num_output_tokens, request.max_tokens)
        return super()._free_request(request, *args, **kwargs)

    def _free_blocks(self, request: Request) -> None:
        """Called when the blocks of a request that has ended are freed, because no connector holds them any more."""
        self._note_step()
        if self._whole_cache:
            blocks = self._cache.blocks(request.request_id)
            hashes = self._cache.stored(request) if is_prefill_only(request) else ()
            self._discard.ended(blocks, hashes)
        super()._free_blocks(request)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._note_step()
        super()._preempt_request(request, *args, **kwargs)

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        """Called when a load has ended. If it failed, vLLM keeps blocks reserved for it. In vLLM's queue that request
        is next. In our queue it could wait behind a request that has no room because of the reservation."""
        super()._update_waiting_for_remote_kv(request)
        if not request.num_computed_tokens:
            self._inflight_prefills.discard(request)

    def _tidy_up(self) -> None:
        """All work that the order of a step does not need at once. Called once between two steps."""
        self._untidy = False
        self._note_step()
        self._steps.fit.catch_up()
        self._cache.tell(self._order.prefix_index)
        self._order.refresh(LOOKS_PER_PEEK)
        if self._whole_cache:
            self._discard.catch_up()
            requests = min(len(self.requests) + MAY_COME, self.max_num_running_reqs)
            blocks = self._most_blocks(self.max_num_scheduled_tokens, requests)
            if self._discard.lacks(blocks):
                self._discard.make_room(blocks)
        self._reporter.publish(self.running, time.monotonic(), idle=False)

    def _apply_settings(self) -> None:
        self._order.set_policy(self._live.policy(), self._live.max_overtaken)
        self._order.set_classes(self._live.classes)
        self._reporter.use(self._live.classes)

    def _prefills_own_batch(self) -> bool:
        """Whether a request that wants its own batch is still in prefill."""
        policy = self._order.policy
        return policy.splits_batches and any(
            request.is_prefill_chunk and policy.wants_own_batch(describe(request, self._cache))
            for request in self.running
        )

    def _has_room(self, request: Request) -> bool:
        """Whether a waiting request certainly fits into the free blocks of the cache.

        False if this is unknown. A connector reserves blocks for the KV that it loads, and models with several KV cache
        groups need blocks of each group.
        """
        if not self._whole_cache or is_loaded(request):
            return False
        tokens = request.num_tokens
        if not self.scheduler_reserve_full_isl:
            ready = self._order.estimator.known_tokens(describe(request, self._cache))
            tokens = min(tokens, ready + self.max_num_scheduled_tokens)
        manager = self.kv_cache_manager
        needed = -int(-tokens // self._page_size) + self._blocks_ahead + manager.watermark_blocks
        return bool(needed <= manager.block_pool.get_num_free_blocks())

    def _most_blocks(self, tokens: int, requests: int) -> int:
        """The most blocks that a step takes for these numbers of tokens and requests, without the KV that a connector
        loads."""
        return tokens // self._page_size + requests * self._blocks_ahead

    def _note_first_tokens(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        now_s, ledger = time.time(), self._reporter.ledger
        for per_client in outputs.values():
            for output in per_client.outputs:
                if output.request_id in ledger.awaited and (
                    output.new_token_ids or output.pooling_output is not None
                ):
                    ledger.token(output.request_id, now_s)

    def _note_step(self) -> None:
        """Note the last scheduled step, once. This runs in parallel with the model, so nothing waits for it, and before
        anything of that step changes."""
        if self._scheduled is None:
            return
        (output, scheduled_s), self._scheduled = self._scheduled, None
        self._steps.scheduled(output, self.requests, scheduled_s)
        if self._whole_cache:
            self._note_blocks(output)

    def _note_blocks(self, output: SchedulerOutput) -> None:
        """Note the blocks that starting requests found in the cache, and the number of new blocks that the step has
        taken."""
        sizes, discard = output.num_scheduled_tokens, self._discard
        started = [request_data.req_id for request_data in output.scheduled_new_reqs]
        started += output.scheduled_cached_reqs.resumed_req_ids
        for request_id in started:
            request = self.requests[request_id]
            if not is_loaded(request):
                cached_blocks = (request.num_computed_tokens - sizes[request_id]) // self._page_size
                missing = self._cache.keys_from(request, cached_blocks)
                discard.started(self._cache.blocks(request_id), cached_blocks, missing)
        if self.connector is None and not output.preempted_req_ids:
            discard.took(self._most_blocks(output.total_num_scheduled_tokens, len(sizes)))
        else:
            discard.took(None)
