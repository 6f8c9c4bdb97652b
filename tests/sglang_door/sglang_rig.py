# SPDX-License-Identifier: Apache-2.0
"""SGLang's own requests, radix cache and prefill adder without its scheduler's process: steps are put
together as `Scheduler._get_new_batch_prefill_raw` does, and computed by nobody."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from scheduler_plugins.qos.file import SchedulerSection, parse
from scheduler_plugins.qos.live import LiveSettings
from scheduler_plugins.sglang.policy import OrderedPolicy

STEP_TOKENS = 512
POOL_TOKENS = 8192


def request(
    rid: str,
    ids: Sequence[int],
    *,
    at_s: float = 1.0,
    qos: str | None = None,
    max_tokens: int = 4,
    priority: int | None = None,
) -> Req:
    """A request as SGLang's scheduler has it in its waiting queue."""
    custom = None if qos is None else {"qos": qos}
    sampling = SamplingParams(max_new_tokens=max_tokens, custom_params=custom)
    made = Req(rid, "", array("q", ids), sampling, priority=priority)
    made.time_stats.wait_queue_entry_time = at_s
    return made


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """A prompt that shares no prefix with one of another seed."""
    return [(seed * 1009 + n) % 30000 + 1 for n in range(tokens)]


class Rig:
    """A scheduler of SGLang's, as far as policy and adder look at it.

    `step` puts a step together and computes it: what starts is in the radix cache afterwards.
    """

    def __init__(
        self,
        settings: str = "",
        *,
        page_size: int = 1,
        pool_tokens: int = POOL_TOKENS,
        cached: bool = True,
        group: Any = None,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self.page_size = page_size
        self.allocator = TokenToKVPoolAllocator(
            pool_tokens, torch.float32, "cpu", SimpleNamespace(), False
        )
        self.tree = RadixCache.create_simulated(
            disable=not cached, mock_allocator=self.allocator, page_size=page_size
        )
        self.scheduler = SimpleNamespace(
            tree_cache=self.tree,
            page_size=page_size,
            chunked_prefill_size=STEP_TOKENS,
            max_prefill_tokens=16384,
            chunked_req=None,
            schedule_low_priority_values_first=False,
            enable_hierarchical_cache=False,
            enable_priority_scheduling=False,
            tp_group=SimpleNamespace(
                cpu_group=group, rank_in_group=rank, first_rank=0, world_size=size
            ),
            get_num_allocatable_reqs=lambda running_bs, running_batch: 64,
        )
        self.policy = OrderedPolicy(self.scheduler)
        if self.policy.decider is not None and settings:
            section: SchedulerSection = parse(settings.encode()).scheduler
            decider = self.policy.decider
            decider._settings = LiveSettings(None, section)
            decider.queue.set_policy(decider._settings.policy(), section.max_overtaken)
            decider.queue.set_classes(section.qos_classes)
        self.waiting: list[Req] = []
        self.running = SimpleNamespace(reqs=[])

    def cache(self, ids: Sequence[int]) -> None:
        """Put a prompt into the radix cache."""
        if self.allocator.available_size() < len(ids):
            self.tree.evict(EvictParams(num_tokens=len(ids)))
        slots = self.allocator.alloc(len(ids))
        assert slots is not None
        found = self.tree.insert(InsertParams(key=RadixKey(array("q", ids)), value=slots))
        self.allocator.free(slots[: found.prefix_len])

    def order(self) -> list[str]:
        """What the next step may start, in its order."""
        self.policy.calc_priority(self.waiting, self.running)
        return list(self.policy._decision.start)

    def step(self) -> list[str]:
        """Put a step together; returns who is in it. Prompts that do not fit whole go on with the next."""
        self.order()
        adder = self.policy.adder(
            self.page_size,
            self.tree,
            self.allocator,
            None,
            0.5,
            self.scheduler.max_prefill_tokens,
            STEP_TOKENS,
        )
        # It asks the configuration of a whole engine, which is not here.
        adder._replay_len = lambda req, prefix_len: 0  # type: ignore[method-assign]
        chunked = self.scheduler.chunked_req
        if chunked is not None:
            chunked.init_next_round_input()
            adder.chunked_req_limit = self.policy.shortest_prefill_chunk_limit(
                chunked, self.waiting, adder.rem_chunk_tokens or 0, self.page_size
            )
            self.scheduler.chunked_req = adder.add_chunked_req(chunked)
        for req in self.waiting:
            req.init_next_round_input(self.tree)
            result = adder.add_one_req(
                req,
                has_chunked_req=self.scheduler.chunked_req is not None,
                truncation_align_size=None,
            )
            if result != AddReqResult.CONTINUE:
                break
        started = adder.can_run_list
        self.waiting = [req for req in self.waiting if req not in started]
        if adder.new_chunked_req is not None:
            assert self.scheduler.chunked_req is None, "two prompts in chunks"
            self.scheduler.chunked_req = adder.new_chunked_req
        self._computed(started)
        return [req.rid for req in started]

    def _computed(self, started: Sequence[Req]) -> None:
        before = [req.prefix_len for req in started]
        batch = SimpleNamespace(
            reqs=list(started),
            prefix_lens=before,
            extend_lens=[req.extend_end - n for req, n in zip(started, before, strict=True)],
            forward_mode=SimpleNamespace(is_extend=lambda: True, is_decode=lambda: False),
            launch_ts=0.0,
        )
        for req in started:
            done = req.extend_end // self.page_size * self.page_size
            self.cache(list(req.origin_input_ids)[:done])
            req.prefix_len = req.extend_end
            if req is not self.scheduler.chunked_req:
                self.tree.unlock(req.lock)
        self.policy.ended(batch)
