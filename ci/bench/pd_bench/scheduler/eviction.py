# SPDX-License-Identifier: Apache-2.0
"""Hits of the prefix cache with vLLM's scheduler and with ours, each with vLLM's own KV cache manager.

Both schedulers are real; nothing is computed. Requests come one after the other. So both schedulers take them in the
same order, and only the order of eviction differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from pd_bench.report import Comparison, Param
from pd_bench.sample import Sample
from pd_bench.scheduler.bare import PAGE_SIZE, config_of, scheduler_of
from pd_bench.scheduler.workload import shared_profiles
from scheduler_plugins.order.request import BlockHash, Waiting
from scheduler_plugins.vllm.scheduler import PrefixAwareScheduler

QUARTERS = 4
LAST_QUARTER = 0.98
"""Our scheduler must have at least this fraction of vLLM's hits in the last quarter of a trace."""
PROFILES = 14
"""User profiles that the cache holds in PrefillOnly's workload, of 20."""
POST_TOKENS = 150
_MODEL_TOKENS = 8192


class Run(NamedTuple):
    """One scheduler's hits, in blocks of the workload."""

    cached: Sequence[int]  # of each request
    blocks: Sequence[int]

    def rate(self, part: int = 0, parts: int = 1) -> float:
        """Fraction of the blocks found, in one of `parts` equal stretches of the workload."""
        size = len(self.cached) // parts
        stretch = slice(part * size, (part + 1) * size)
        return sum(self.cached[stretch]) / max(1, sum(self.blocks[stretch]))


def compare(requests: Sequence[Waiting], blocks: int, seeds: Sequence[int]) -> list[Comparison]:
    """A recorded workload with `blocks` blocks of cache, and PrefillOnly's workload.

    The trace is served twice: as prompts for another engine, like on a prefill engine, and as requests for one token,
    whose suffixes are evicted first.
    """
    theirs = serve(Scheduler, requests, blocks)
    comparisons = []
    for kind, remote in (("for another engine", True), ("for one token", False)):
        ours = serve(PrefixAwareScheduler, requests, blocks, remote_decode=remote)
        for part in range(QUARTERS):
            bar = LAST_QUARTER if part == QUARTERS - 1 else None
            params: dict[str, Param] = {"workload": "trace", "requests": kind, "quarter": part + 1}
            comparisons.append(
                _row(params, [ours.rate(part, QUARTERS)], [theirs.rate(part, QUARTERS)], bar)
            )
    room = PROFILES * 1400 // PAGE_SIZE
    pairs = list[list[float]]()
    for seed in seeds:
        posts = shared_profiles(seed, post_tokens=POST_TOKENS, page_size=PAGE_SIZE)
        pairs.append(
            [
                serve(scheduler, posts, room).rate()
                for scheduler in (PrefixAwareScheduler, Scheduler)
            ]
        )
    params = {"workload": "PrefillOnly's", "requests": "for one token", "quarter": "all"}
    mine, others = (list(rates) for rates in zip(*pairs, strict=True))
    return [*comparisons, _row(params, mine, others, 1.0)]


def serve(
    scheduler: Callable[..., Scheduler],
    requests: Sequence[Waiting],
    blocks: int,
    *,
    remote_decode: bool = False,
) -> Run:
    """Serve requests one after the other, with `blocks` blocks of cache.

    Args:
        requests: each of their block hashes stands for one block of any length.
        remote_decode: the prompts are for another engine.
    """
    config = config_of(budget=_MODEL_TOKENS, seqs=1, max_model_len=_MODEL_TOKENS)
    engine = scheduler_of(scheduler, config, StructuredOutputManager(config), blocks=blocks + 1)
    init_none_hash(sha256)
    hasher: Any = get_request_block_hasher(PAGE_SIZE, sha256)
    params = {"kv_transfer_params": {"do_remote_decode": True}} if remote_decode else None
    cached = []
    try:
        for n, request in enumerate(requests):
            engine.add_request(
                Request(
                    request_id=str(n),
                    prompt_token_ids=[*_prompt(request.block_hashes), 0],
                    sampling_params=SamplingParams(
                        max_tokens=1, ignore_eos=True, extra_args=params
                    ),
                    pooling_params=None,
                    arrival_time=1.7e9 + n,
                    block_hasher=hasher,
                )
            )
            cached.append(_run(engine))
    finally:
        engine.shutdown()
    return Run(cached, [len(request.block_hashes) for request in requests])


def _run(engine: Scheduler) -> int:
    """Run steps until nothing is left. Returns the blocks that were cached when the request started."""
    cached = 0
    while engine.has_requests():
        output = engine.schedule()
        engine.get_grammar_bitmask(output)
        for new in output.scheduled_new_reqs:
            cached = new.num_computed_tokens // PAGE_SIZE
        ids = list(output.num_scheduled_tokens)
        left = [engine.requests[request_id] for request_id in ids]
        sampled = [[7] if each.num_computed_tokens >= each.num_tokens else [] for each in left]
        places = {request_id: n for n, request_id in enumerate(ids)}
        result = ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=sampled)
        engine.update_from_output(output, result)
    return cached


def _prompt(hashes: Sequence[BlockHash]) -> list[int]:
    return [token for block in hashes for token in _block(block)]


@cache
def _block(block: BlockHash) -> bytes:
    """The tokens of a block: equal hashes give equal tokens."""
    return hashlib.sha256(repr(block).encode()).digest()[:PAGE_SIZE]


def _row(
    params: dict[str, Param],
    ours: Sequence[float],
    theirs: Sequence[float],
    bar: float | None,
) -> Comparison:
    return Comparison(
        "prefix hit",
        params,
        Sample(tuple(ours)),
        Sample(tuple(theirs)),
        "",
        bar,
        more_is_better=True,
    )
