# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler, real, over a worker that is not.

The worker keeps the KV cache as a table: for every slot of every block, the prefix that was
computed into it. Before it computes it reads all slots of the request's context, so that a block
that was given out twice, or freed too early, or found under a wrong hash, is seen at once. The
token that follows a prefix is a function of the prefix, so every request has one right answer.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from pd_bench.scheduler.bare import PAGE_SIZE, config_of, scheduler_of
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.queue.waiting import WaitingQueue
from scheduler_plugins.vllm.cache import CacheView
from scheduler_plugins.vllm.discard import SuffixDiscard
from scheduler_plugins.vllm.scheduler import PrefixAwareScheduler

BLOCK = PAGE_SIZE
VOCABULARY = 251

init_none_hash(sha256)
_hasher = get_request_block_hasher(BLOCK, sha256)


def next_token(tokens: Sequence[int]) -> int:
    """The only right token after these."""
    return zlib.crc32(bytes(tokens)) % VOCABULARY


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """The only right answer to a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def words(seed: int, count: int) -> list[int]:
    """Tokens that no other seed gives."""
    chosen = random.Random(seed)
    return [chosen.randrange(VOCABULARY) for _ in range(count)]


class Worker:
    """Computes what a scheduler asks for, at once and in order."""

    def __init__(self) -> None:
        self.computed_tokens = 0
        self.steps: list[dict[str, int]] = []
        self._slots: dict[tuple[int, int], int] = {}
        self._tokens: dict[str, list[int]] = {}

    def run(self, output: SchedulerOutput, blocks: dict[str, list[int]]) -> ModelRunnerOutput:
        """`blocks`: of each request in the step, as the scheduler has them now."""
        before = {}
        for new in output.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.prompt_token_ids or ())
            before[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                self._tokens[request_id] = list(cached.all_token_ids[request_id])
            before[request_id] = computed
        self.steps.append(dict(output.num_scheduled_tokens))
        sampled = []
        for request_id, count in output.num_scheduled_tokens.items():
            sampled.append(self._compute(request_id, before[request_id], count, blocks[request_id]))
        ids = list(output.num_scheduled_tokens)
        places = {request_id: n for n, request_id in enumerate(ids)}
        return ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=sampled)

    def load(self, tokens: Sequence[int], blocks: Sequence[int], start: int, end: int) -> None:
        """KV comes from elsewhere."""
        for position in range(start, end):
            slot = blocks[position // BLOCK], position % BLOCK
            self._slots[slot] = zlib.crc32(bytes(tokens[: position + 1]))

    def _compute(self, request_id: str, before: int, count: int, blocks: list[int]) -> list[int]:
        tokens = self._tokens[request_id]
        after = before + count
        assert after <= len(tokens), f"{request_id}: {after} tokens asked for, {len(tokens)} known"
        checksum = 0
        for position, token in enumerate(tokens[:after]):
            slot = blocks[position // BLOCK], position % BLOCK
            checksum = zlib.crc32(bytes((token,)), checksum)
            if position >= before:
                self._slots[slot] = checksum
            assert self._slots.get(slot) == checksum, f"{request_id}: wrong KV at {position}"
        self.computed_tokens += count
        if after < len(tokens):
            return []
        tokens.append(next_token(tokens))
        return [tokens[-1]]


class Grammars:
    """Stands for vLLM's manager of structured outputs: accepts everything."""

    def accept_tokens(self, request: Request, tokens: Sequence[int]) -> bool:
        return True


class Rig:
    """One scheduler and its worker.

    Args:
        blocks: of the KV cache; one is vLLM's null block.
        budget: tokens in a step.
        depth: steps that are scheduled before the first one's result is taken; 2 is what vLLM does
            with async scheduling.
    """

    def __init__(
        self,
        scheduler: type = PrefixAwareScheduler,
        *,
        blocks: int = 65,
        budget: int = 64,
        seqs: int = 8,
        max_model_len: int = 512,
        caching: bool = True,
        depth: int = 1,
        policy: str = "fcfs",
        groups: Sequence[Any] | None = None,
        additional: dict[str, Any] | None = None,
        seconds_per_token: float | None = 1e-3,
    ) -> None:
        self.config = config_of(
            budget=budget,
            seqs=seqs,
            max_model_len=max_model_len,
            caching=caching,
            async_scheduling=depth > 1,
            policy=policy,
            additional=additional,
        )
        self.scheduler = scheduler_of(
            scheduler, self.config, Grammars(), blocks=blocks, specs=groups or ()
        )
        if seconds_per_token and isinstance(self.scheduler, PrefixAwareScheduler):
            # Times of a worker that takes none teach nothing.
            # With several classes the fixed cost of a step is so high that no step is kept short.
            shared = len(self.scheduler._live.classes) > 1
            fixed = CostModel(a=seconds_per_token, c=shared * seconds_per_token * budget / 10)
            self.scheduler._steps.fit = SimpleNamespace(
                model=fixed, note=lambda *_: None, catch_up=lambda: None
            )
            self.order.estimator._costs = self.fit
        self.worker = Worker()
        whole = [isinstance(one, FullAttentionSpec) for one in groups or ()]
        self._group = whole.index(True) if whole else 0
        self.answers: dict[str, list[int]] = {}
        self.ended: list[str] = []
        self._depth = depth
        self._open: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.arrivals = 0

    @property
    def order(self) -> WaitingQueue:
        """The order of what waits."""
        return self.scheduler._order

    @property
    def cache(self) -> CacheView:
        """What the scheduler knows of the engine's prefix cache."""
        return self.scheduler._cache

    @property
    def discard(self) -> SuffixDiscard:
        """What the scheduler drops from the cache first."""
        return self.scheduler._discard

    @property
    def fit(self) -> Any:
        """The cost model that the scheduler learns from its steps."""
        return self.scheduler._steps.fit

    def set_balances(self, seconds: Mapping[str, float]) -> None:
        """Let classes have earned this much, and not used."""
        fair_share = self.order.fair_share
        fair_share.refund({name: fair_share.balance_s(name) - one for name, one in seconds.items()})

    def request(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        qos: str | None = None,
        kv: dict[str, Any] | None = None,
        arrival_s: float | None = None,
        priority: int = 0,
        lora: Any = None,
    ) -> Request:
        """A request that is not added yet. It arrives later than all before it, by 1 ms."""
        extra: dict[str, Any] = {"kv_transfer_params": kv} if kv else {}
        if qos is not None:
            extra["qos"] = qos
        self.arrivals += 1
        self.asked[name] = list(prompt), max_tokens
        return Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, extra_args=extra or None
            ),
            pooling_params=None,
            arrival_time=1.7e9 + self.arrivals * 1e-3 if arrival_s is None else arrival_s,
            lora_request=lora,
            priority=priority,
            block_hasher=_hasher,
        )

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> Request:
        """A request arrives."""
        request = self.request(name, prompt, max_tokens, **more)
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.asked.pop(name, None)
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self, kv: KVConnectorOutput | None = None) -> dict[str, int]:
        """One step, as vLLM's engine core takes it. Returns the tokens of each request in it."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        scheduler.get_grammar_bitmask(output)
        manager = scheduler.kv_cache_manager
        blocks = {
            one: manager.get_block_ids(one)[self._group] for one in output.num_scheduled_tokens
        }
        result = self.worker.run(output, blocks)
        result.kv_connector_output = kv
        self._open.append((output, result))
        if len(self._open) >= self._depth or not output.total_num_scheduled_tokens:
            self.take()
        return dict(output.num_scheduled_tokens)

    def take(self) -> None:
        """Hand the oldest result to the scheduler."""
        output, result = self._open.popleft()
        for per_client in self.scheduler.update_from_output(output, result).values():
            for one in per_client.outputs:
                self.answers.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    assert one.request_id not in self.ended, f"{one.request_id} ended twice"
                    self.ended.append(one.request_id)

    def run(self, most_steps: int = 2000) -> list[str]:
        """Until nothing is left. Returns the requests in the order in which they ended."""
        for _ in range(most_steps):
            if not self.scheduler.has_requests() and not self._open:
                return self.ended
            if self.scheduler.has_requests():
                self.step()
            else:
                self.take()
        raise AssertionError(f"requests left: {sorted(self.scheduler.requests)}")

    def assert_served(self) -> None:
        """Every request that was not aborted has its one right answer; nothing is held."""
        for name, (prompt, count) in self.asked.items():
            assert self.answers.get(name) == answer(prompt, count), name
        scheduler = self.scheduler
        assert not scheduler.requests
        assert not scheduler.running
        assert len(scheduler.waiting) == 0
        assert list(scheduler.waiting) == []
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        free = pool.free_block_queue.get_all_free_blocks()
        assert len({block.block_id for block in free}) == len(free) == pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in free)

    def hit_tokens(self, request: Request) -> int:
        """What vLLM itself would find in its cache for a request."""
        return int(self.scheduler.kv_cache_manager.get_computed_blocks(request)[1])
