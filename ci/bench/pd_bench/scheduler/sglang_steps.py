# SPDX-License-Identifier: Apache-2.0
"""SGLang's own policies and ours on one workload, in simulated time.

Policies, radix cache, allocator and prefill adder are SGLang's own objects, and steps are scheduled like in SGLang.
Only the model is invented: `_Clock` gives the duration of a step. So ratios count, not seconds, and other programs on
the machine have no effect. SGLang must be installed.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pd_bench.report import Comparison
from pd_bench.scheduler.replay import Outcome, p99
from pd_bench.scheduler.sending import prompt_ids
from pd_bench.scheduler.sglang_bars import FCFS, OURS, POLICIES, comparisons
from pd_bench.scheduler.workload import poisson, shared_profiles
from pd_connector.tools.demo import MODEL_DIR
from scheduler_plugins.order.request import Waiting

PAGE_SIZE = 16
CHUNK_TOKENS = 512
CACHE_TOKENS = 14 * 1400
_MOST_TOKENS = 16384
_VOCABULARY = range(1, 200)


class _Clock:
    """Durations of steps: about 15,000 prompt tokens a second, as in `sim`."""

    now_s = 0.0

    def step(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Chunks: earlier tokens and new tokens."""
        self.now_s += 0.004 + sum(
            6e-5 * new + 1e-9 * new * (2 * before + new) for before, new in chunks
        )


def compare(posts: int, loads: Sequence[float], seeds: Sequence[int]) -> list[Comparison]:
    """PrefillOnly's shape, 20 users x `posts`, at `loads` times what FCFS drains."""
    outcomes: dict[tuple[str, float], list[Outcome]] = {}
    for seed in seeds:
        requests = shared_profiles(seed, posts=posts, page_size=PAGE_SIZE)
        ids = {request.id: prompt_ids(request, PAGE_SIZE, _VOCABULARY) for request in requests}
        drained = _Engine(FCFS)
        drained.serve(requests, ids)
        rate = len(requests) / drained.clock.now_s
        for load in loads:
            timed = poisson(requests, load * rate, seed)
            for policy in POLICIES:
                outcomes.setdefault((policy, load), []).append(_Engine(policy).serve(timed, ids))
    return [row for load in loads for row in comparisons(load, outcomes)]


@dataclass
class _Engine:
    """One engine with a policy; see `serve`."""

    name: str
    clock: _Clock = field(default_factory=_Clock)

    def __post_init__(self) -> None:
        self._publish()
        import torch
        from sglang.srt.managers.schedule_policy import SchedulePolicy
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.radix_cache import RadixCache

        pool = SimpleNamespace()
        self.allocator = TokenToKVPoolAllocator(CACHE_TOKENS, torch.float32, "cpu", pool, False)
        self.tree = RadixCache.create_simulated(mock_allocator=self.allocator, page_size=PAGE_SIZE)
        self.waiting: list[Any] = []
        self.chunked: Any = None
        self.processed_tokens = 0
        if self.name == OURS:
            from scheduler_plugins.sglang.policy import OrderedPolicy

            self.policy: Any = OrderedPolicy(self._scheduler())
        else:
            self.policy = SchedulePolicy(self.name, self.tree, False, False, False)

    def serve(self, requests: Sequence[Waiting], ids: dict[str, list[int]]) -> Outcome:
        """Serve requests, by arrival; one token each."""
        coming = iter(sorted(requests, key=lambda request: request.arrival_s))
        upcoming = next(coming, None)
        ttft_s: list[float] = []
        while upcoming is not None or self.waiting or self.chunked is not None:
            if upcoming is not None and not self.waiting and self.chunked is None:
                self.clock.now_s = max(self.clock.now_s, upcoming.arrival_s)
            while upcoming is not None and upcoming.arrival_s <= self.clock.now_s:
                self.waiting.append(self._request(upcoming, ids[upcoming.id]))
                upcoming = next(coming, None)
            ttft_s += self._step()
        computed = self.processed_tokens / sum(len(ids[request.id]) for request in requests)
        return Outcome(sum(ttft_s) / len(ttft_s), p99(ttft_s), 1 - computed)

    def _step(self) -> Iterator[float]:
        """Schedule a step and compute it. Yields the waits of the prompts that ended with it."""
        started = self._put_together()
        before = [req.prefix_len for req in started]
        new = [req.extend_end - n for req, n in zip(started, before, strict=True)]
        batch = SimpleNamespace(
            reqs=started,
            prefix_lens=before,
            extend_lens=new,
            forward_mode=SimpleNamespace(is_extend=lambda: True, is_decode=lambda: False),
            launch_ts=self.clock.now_s,
        )
        self.clock.step(list(zip(before, new, strict=True)))
        self.processed_tokens += sum(new)
        for req in started:
            self._store(req)
            req.prefix_len = req.extend_end
            if req is not self.chunked:
                self.tree.unlock(req.lock)
                yield self.clock.now_s - req.time_stats.wait_queue_entry_time
        if self.name == OURS:
            self.policy.decider.ended(batch, self.clock.now_s)

    def _put_together(self) -> list[Any]:
        """Does the same as SGLang's `Scheduler._get_new_batch_prefill_raw`."""
        from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

        running = SimpleNamespace(reqs=[])
        self.policy.calc_priority(self.waiting, running, processed_tokens=self.processed_tokens)
        make = self.policy.adder if self.name == OURS else PrefillAdder
        adder = make(PAGE_SIZE, self.tree, self.allocator, None, 0.5, _MOST_TOKENS, CHUNK_TOKENS)
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            adder.chunked_req_limit = self.policy.shortest_prefill_chunk_limit(
                self.chunked, self.waiting, CHUNK_TOKENS, PAGE_SIZE
            )
            self.chunked = adder.add_chunked_req(self.chunked)
        for req in self.waiting:
            if adder.budget_state() is AddReqResult.OTHER:
                break
            req.init_next_round_input(self.tree)
            chunked = self.chunked is not None
            if adder.add_one_req(req, chunked, None) is not AddReqResult.CONTINUE:
                break
        self.chunked = adder.new_chunked_req or self.chunked
        started = {id(req) for req in adder.can_run_list}
        self.waiting = [req for req in self.waiting if id(req) not in started]
        return list(adder.can_run_list)

    def _store(self, req: Any) -> None:
        """Put the computed part of a prompt into the radix cache."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        ids = req.origin_input_ids[: req.extend_end // PAGE_SIZE * PAGE_SIZE]
        if self.allocator.available_size() < len(ids):
            self.tree.evict(EvictParams(num_tokens=len(ids)))
        slots = self.allocator.alloc(len(ids))
        assert slots is not None, "more is locked than the cache holds"
        inserted = self.tree.insert(InsertParams(key=RadixKey(ids), value=slots))
        self.allocator.free(slots[: inserted.prefix_len])

    def _request(self, request: Waiting, ids: list[int]) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        made = Req(
            request.id, "", array("q", ids), SamplingParams(max_new_tokens=request.max_tokens)
        )
        made.time_stats.wait_queue_entry_time = request.arrival_s
        made.arrival_processed_tokens = self.processed_tokens
        return made

    def _scheduler(self) -> Any:
        """The attributes of SGLang's scheduler that our policy reads."""
        engine = self

        class Scheduler(SimpleNamespace):
            @property
            def chunked_req(self) -> Any:
                return engine.chunked

        return Scheduler(
            tree_cache=self.tree,
            page_size=PAGE_SIZE,
            chunked_prefill_size=CHUNK_TOKENS,
            max_prefill_tokens=_MOST_TOKENS,
            schedule_low_priority_values_first=False,
            enable_hierarchical_cache=False,
            enable_priority_scheduling=False,
            tp_group=SimpleNamespace(cpu_group=None, rank_in_group=0, first_rank=0, world_size=1),
            get_num_allocatable_reqs=lambda running_bs, running_batch: 64,
        )

    def _publish(self) -> None:
        """Parts of SGLang read the configuration of the process."""
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        from sglang.srt import runtime_context
        from sglang.srt.server_args import ServerArgs

        policy = FCFS if self.name == OURS else self.name
        args = ServerArgs(model_path=str(MODEL_DIR), device="cpu", schedule_policy=policy)
        runtime_context.publish(args, role="scheduler")
