# SPDX-License-Identifier: Apache-2.0
"""SGLang's `SchedulePolicy` and `PrefillAdder` with our order.

SGLang decides everything except the order. In each step it calls `calc_priority`, which moves the requests that may
start to the front of its waiting queue. Then an adder takes them from there while they fit. A prompt that is computed
in chunks goes first. `shortest_prefill_chunk_limit` limits its tokens in the step.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from sglang.srt.mem_cache.common import match_kv_cache

from scheduler_plugins.cost.profile import load
from scheduler_plugins.qos.file import SchedulerSection
from scheduler_plugins.qos.live import LiveSettings
from scheduler_plugins.qos.settings import COST_MODEL_VARIABLE, SETTINGS_VARIABLE, path_in
from scheduler_plugins.sglang.decide import Outcome, StepDecider
from scheduler_plugins.sglang.ranks import Decision, Ranks

logger = logging.getLogger("scheduler_plugins.sglang")


class OrderedPolicy(SchedulePolicy):
    """Orders the waiting requests of each class by their cost with the present cache."""

    def __init__(self, scheduler: Any) -> None:
        """Raises QosError, ProfileError: the settings or the named cost model are invalid."""
        super().__init__(
            "fcfs",
            scheduler.tree_cache,
            scheduler.enable_hierarchical_cache,
            scheduler.enable_priority_scheduling,
            scheduler.schedule_low_priority_values_first,
        )
        group = scheduler.tp_group
        first = group.rank_in_group == 0
        self._ranks = Ranks(group.cpu_group, group.first_rank, first, group.world_size)
        # All ranks read the settings, so an invalid file ends the engine on all ranks.
        settings = LiveSettings(path_in(SETTINGS_VARIABLE), SchedulerSection())
        profile = path_in(COST_MODEL_VARIABLE)
        start = load(profile) if profile else None
        self.decider = StepDecider(scheduler, settings, start) if first else None
        """Decides for all ranks; None on the other ranks."""
        self._decision = Decision()
        self._adder: OrderedAdder | None = None
        name = type(settings.policy()).__name__
        logger.info("waiting requests are ordered by the policy %s", name)

    def calc_priority(
        self, waiting_queue: list[Any], running_batch: Any = None, processed_tokens: int = 0
    ) -> None:
        """Move the requests that may start in this step to the front, in order. Arguments are SGLang's."""
        outcome, self._adder = self._outcome(), None

        def decide() -> Decision:
            assert self.decider is not None
            return self.decider.decide(waiting_queue, running_batch, outcome)

        self._decision = decision = self._ranks.agree(decide)
        waiting = {req.rid: req for req in waiting_queue}
        if not self._ranks.decides:
            for request_id in decision.looked_up:
                match_kv_cache(waiting[request_id], self.tree_cache)
        first = [waiting.pop(request_id) for request_id in decision.start]
        waiting_queue[:] = [*first, *waiting.values()]

    def waiting_queue_prefix_matched(self, waiting_queue: list[Any]) -> bool:
        """False: not every waiting request was looked up in the prefix cache."""
        return False

    def shortest_prefill_chunk_limit(
        self, chunked_req: Any, waiting_queue: list[Any], budget: int, page_size: int
    ) -> int | None:
        """The most tokens of the running prefill in this step; None: no limit. Arguments are SGLang's."""
        left = (budget - self._decision.reserved_tokens) // page_size * page_size
        return left if self._decision.reserved_tokens and left >= page_size else None

    def adder(self, *args: Any, **kwargs: Any) -> PrefillAdder:
        """The adder of this step. Arguments are those of SGLang's `PrefillAdder`."""
        self._adder = OrderedAdder(self._decision, *args, **kwargs)
        return self._adder

    def ended(self, batch: Any) -> None:
        """Called when SGLang has processed the result of a step."""
        if self.decider is not None:
            self.decider.ended(batch, time.monotonic())

    def _outcome(self) -> Outcome:
        if self._adder is None:
            return Outcome()
        started = frozenset(req.rid for req in self._adder.can_run_list)
        return Outcome(started, self._adder.refused)


class OrderedAdder(PrefillAdder):
    """Starts the chosen requests, and no others."""

    rem_chunk_tokens: int | None
    """SGLang's attribute: prompt tokens left in the step; None: no limit."""

    def __init__(self, decision: Decision, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._may_start = frozenset(decision.start)
        self.refused = ""
        """The request for which the cache had no room, if any."""
        if decision.step_tokens is not None and self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens = min(self.rem_chunk_tokens, decision.step_tokens)

    def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> AddReqResult:
        if req.rid not in self._may_start:
            return AddReqResult.OTHER
        before = len(self.can_run_list)
        result = super().add_one_req(req, *args, **kwargs)
        if result is AddReqResult.NO_TOKEN and len(self.can_run_list) == before:
            self.refused = req.rid
        return result

    def _select_prefill_admission(self, req: Any, *args: Any, **how: Any) -> Any:
        admission = super()._select_prefill_admission(req, *args, **how)
        if how.get("has_chunked_req") and getattr(admission, "is_chunked", False):
            return AddReqResult.OTHER  # SGLang computes one prompt at a time in chunks
        return admission
