# SPDX-License-Identifier: Apache-2.0
"""Time that our scheduler adds to a step of vLLM, on the thread that drives the engine.

Both schedulers are real, with vLLM's own KV cache manager. The model is replaced by a wait.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count, product
from statistics import fmean, median
from time import monotonic, thread_time
from typing import Any, NamedTuple

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from pd_bench.report import Comparison, Param
from pd_bench.sample import Sample
from pd_bench.scheduler.bare import PAGE_SIZE, config_of, scheduler_of
from pd_bench.scheduler.overhead import LIMITS_S
from scheduler_plugins.vllm.scheduler import PrefixAwareScheduler

_BLOCKS = 4000
_PROFILE_TOKENS = 480
_OWN_TOKENS = 20
_REQUESTS_PER_PROFILE = 50
_PAUSES_S = (0.0, 0.002)
"""Wait between `get_grammar_bitmask` and `update_from_output`, where an engine computes. After a pause the processor's
caches may hold other data, especially on a shared machine."""


def compare(steps: int = 300) -> list[Comparison]:
    """Mean and median time of a step, our time minus vLLM's, against the limits.

    In each step one request of 500 tokens starts and ends, and another comes. The two take their steps in turn, so the
    machine's other load affects both. Work in parallel with the model is shown too, but has no bar. If the model
    computes on another device or in another process, nothing waits for this work.
    """
    comparisons = []
    for (waiting, limit_s), pause_s in product(LIMITS_S.items(), _PAUSES_S):
        theirs, ours = step_times((Scheduler, PrefixAwareScheduler), waiting, steps, pause_s)
        params: dict[str, Param] = {
            "waiting": waiting,
            "pause_ms": pause_s * 1e3,
            "against": "allowed",
        }
        vllm_s = [step.waited_s for step in theirs]
        added_s = [a.waited_s - b.waited_s for a, b in zip(ours, theirs, strict=True)]
        both_s = [a + step.behind_s for a, step in zip(added_s, ours, strict=True)]
        for name, of, values, bar in (
            ("added to a step, median", median, added_s, 1.0),
            ("added to a step, mean", fmean, added_s, 1.0),
            ("and behind the model, median", median, both_s, None),
            ("and behind the model, mean", fmean, both_s, None),
        ):
            comparisons.append(
                Comparison(
                    name,
                    {**params, "vllm_us": round(of(vllm_s) * 1e6)},
                    Sample((of(values) * 1e6,)),
                    Sample((limit_s * 1e6,)),
                    "us",
                    bar,
                )
            )
    return comparisons


def step_times(
    schedulers: Sequence[Callable[..., Scheduler]],
    waiting: int,
    steps: int,
    pause_s: float = 0.0,
) -> list[list[StepTime]]:
    """The time of each scheduler in each of its steps."""
    engines = [_Engine(scheduler, waiting) for scheduler in schedulers]
    gc.collect()
    gc.freeze()  # like vLLM
    try:
        rounds = [[engine.step(pause_s) for engine in engines] for _ in range(steps)]
    finally:
        gc.unfreeze()
        for engine in engines:
            engine.close()
    return [list(times) for times in zip(*rounds, strict=True)]


class StepTime(NamedTuple):
    """Seconds of CPU of the thread that drives the engine."""

    waited_s: float  # before the model can begin, and after it has ended
    behind_s: float  # when the model has begun


class _Engine:
    """A scheduler with this number of waiting requests."""

    def __init__(self, scheduler: Callable[..., Scheduler], waiting: int) -> None:
        config = config_of(budget=512, seqs=1, max_model_len=4096)
        grammars = StructuredOutputManager(config)
        self._scheduler = scheduler_of(scheduler, config, grammars, blocks=_BLOCKS)
        self._requests = _requests(max(2, waiting // _REQUESTS_PER_PROFILE))
        for _ in range(waiting):
            self._scheduler.add_request(next(self._requests))

    def step(self, pause_s: float) -> StepTime:
        """One step, like in vLLM's engine core."""
        begun_s = thread_time()
        output = self._scheduler.schedule()
        scheduled_s = thread_time()
        self._scheduler.get_grammar_bitmask(output)
        behind_s = thread_time() - scheduled_s
        spent_s = scheduled_s - begun_s
        result = _result(self._scheduler, output)
        _spin(pause_s)
        begun_s = thread_time()
        self._scheduler.update_from_output(output, result)
        spent_s += thread_time() - begun_s
        for _ in output.scheduled_new_reqs:
            self._scheduler.add_request(next(self._requests))
        return StepTime(spent_s, behind_s)

    def close(self) -> None:
        self._scheduler.shutdown()


def _spin(duration_s: float) -> None:
    end_s = monotonic() + duration_s
    while monotonic() < end_s:
        pass


def _requests(profiles: int) -> Iterator[Request]:
    """Requests for one token that share the profiles in turn."""
    chosen = random.Random(1)
    init_none_hash(sha256)
    hasher: Any = get_request_block_hasher(PAGE_SIZE, sha256)
    shared = [_words(chosen, _PROFILE_TOKENS) for _ in range(profiles)]
    for n in count():
        yield Request(
            request_id=f"request-{n}",
            prompt_token_ids=[*shared[n % profiles], *_words(chosen, _OWN_TOKENS)],
            sampling_params=SamplingParams(max_tokens=1, ignore_eos=True),
            pooling_params=None,
            arrival_time=1.7e9 + n * 1e-3,
            block_hasher=hasher,
        )


def _words(chosen: random.Random, tokens: int) -> Sequence[int]:
    return [chosen.randrange(250) for _ in range(tokens)]


def _result(engine: Scheduler, output: SchedulerOutput) -> ModelRunnerOutput:
    """A token for each request whose prompt is computed."""
    ids = list(output.num_scheduled_tokens)
    requests = [engine.requests[request_id] for request_id in ids]
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: n for n, request_id in enumerate(ids)},
        sampled_token_ids=[[7] if r.num_computed_tokens >= r.num_tokens else [] for r in requests],
    )
