# SPDX-License-Identifier: Apache-2.0
"""A cost model of a running engine, measured from outside: `pd-connector profile`.

Prefills are timed by requests for one token, from sending to that token. So the time per step, `c`, includes HTTP and
tokenizing. Decode steps are the times between the tokens of streams. A step with both is the time between the tokens of
streams while a new prompt is computed.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from pd_connector.tools.launch.client import Samples
from scheduler_plugins.cost.engine_profile import Errors
from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.cost.profile import Measurement, fitted, loads, mixed_loads
from scheduler_plugins.profile.client import AskError, EngineClient, Timed

DECODED = 24
"""Tokens of each stream of a decode measurement."""
STEPS_A_PROMPT, STEPS_BEFORE = 8, 6
"""Tokens of each stream of a measurement of mixed steps: for each prompt, and before the first one."""
ONE_STEP = 0.6
"""A prompt whose step took less than this part of the time to its first token was cut into several steps."""
FEWEST_GAPS = 4
OUTLIERS = 16
"""Divisor: this part of the times between tokens is left out on either side, such as a pause or a first compilation."""
_PAGE_SIZE = 16
_ROOM = 0.8
"""Fraction of the engine's cache that a decode measurement may fill."""

Say = Callable[[int, int, str], None]
"""Progress: number done, total number, next measurement."""


class Engine(NamedTuple):
    """The values of `/metrics` about the engine's cache."""

    page_size: int
    cache_tokens: int  # 0: not known
    caches: bool  # whether prefixes are found again


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure."""

    longest_tokens: int
    most_batch: int
    repeats: int
    chunk_tokens: int = 0
    """The engine's `--max-num-batched-tokens`; 0: prompts are not cut into chunks."""


class Profile(NamedTuple):
    """The results."""

    model: CostModel
    measured: list[Measurement]
    engine: Engine
    left_out: list[str]  # reasons why some loads could not be measured
    errors: Errors = Errors()


class Steps(NamedTuple):
    """Timed steps of an engine."""

    measured: list[Measurement]  # one for each load
    engine: Engine
    left_out: list[str]  # reasons why some loads could not be measured


async def measure(client: EngineClient, plan: Wanted, say: Say, seed: int = 0) -> Profile:
    """Time prefills and decode steps of an otherwise idle engine, and fit the model.

    Raises:
        AskError: the engine is busy or does not answer; ProfileError: nothing can be fitted.
    """
    measured = await time_steps(client, plan, say, seed)
    model, errors = fitted(measured.measured, plan.chunk_tokens)
    return Profile(model, *measured, errors)


async def time_steps(
    client: EngineClient,
    plan: Wanted,
    say: Say,
    seed: int = 0,
    only: Callable[[StepLoad], bool] = lambda load: True,
) -> Steps:
    """Time the steps of an otherwise idle engine. `only`: selects the loads to measure.

    Raises:
        AskError: the engine is busy or does not answer.
    """
    await _check_idle(client)
    prober = Prober(client, await client.pool(), Random(seed))
    engine = await prober.look(plan.longest_tokens)
    steps = loads(plan.longest_tokens, engine.page_size, plan.most_batch)
    steps += mixed_loads(plan.longest_tokens, plan.most_batch, plan.chunk_tokens)
    steps = [step for step in steps if only(step)]
    lengths = _prefills(steps, engine)
    batches = _decodes(steps)
    beside = _mixed(steps)
    total = len(lengths) * plan.repeats + len(batches) + len(beside) * plan.repeats
    measured, left_out, done = list[Measurement](), list[str](), 0
    for tokens, cached in lengths.items():
        for _ in range(plan.repeats):
            say(done, total, f"prefill of {tokens:,} tokens")
            measured += await prober.prefills(tokens, cached)
            done += 1
    for context, sizes in batches.items():
        say(done, total, f"decode at {context:,} tokens of context")
        decodes, why = await prober.decodes(context, sizes, engine)
        measured, left_out, done = measured + decodes, left_out + why, done + 1
    for (batch, context), prompts in beside.items():
        for _ in range(plan.repeats):
            say(done, total, f"prompts beside {batch} x {context:,} tokens")
            both, why = await prober.mixed(batch, context, prompts, engine)
            measured, left_out, done = measured + both, left_out + why, done + 1
    say(total, total, "fitting")
    return Steps(_medians(measured), engine, list(dict.fromkeys(left_out)))


class Prober:
    """Sends the timed requests. Prompts share tokens only if they must."""

    def __init__(self, client: EngineClient, pool: Sequence[int], random: Random) -> None:
        self._client = client
        self._pool = pool
        self._random = random

    async def look(self, longest_tokens: int) -> Engine:
        """Warm the engine up, and examine its cache."""
        samples = await self._client.metrics()
        page_size, cache_tokens = _cache(samples)
        prompt = self._prompt(max(4 * page_size, longest_tokens // 2))
        for tokens in (prompt, self._prompt(longest_tokens)):
            await self._ask(tokens, 1)
        before = await self._client.metrics()
        await self._ask(prompt, 2)
        grown = (await self._client.metrics()).since(before)
        caches = grown.total("vllm:prefix_cache_hits_total") >= len(prompt) / 2
        return Engine(page_size, cache_tokens, caches)

    async def prefills(self, tokens: int, cached: Sequence[int]) -> list[Measurement]:
        """Send a new prompt, then prompts that share its first tokens. `cached` has the numbers of shared tokens."""
        first = self._prompt(tokens)
        measurements = []
        for shared in (0, *(size for size in cached if size)):
            prompt = [*first[:shared], *self._prompt(tokens - shared)] if shared else first
            answer = await self._ask(prompt, 1)
            measurements.append(Measurement(StepLoad.of([(shared, tokens)]), answer.ttft_s))
        return measurements

    async def decodes(
        self, context: int, batches: Sequence[int], engine: Engine
    ) -> tuple[list[Measurement], list[str]]:
        """Time streams of prompts of `context` tokens, for each batch size. Also return the batches that could not be
        measured."""
        measurements, left_out = list[Measurement](), list[str]()
        prompts = list[list[int]]()
        for batch in batches:
            if engine.cache_tokens and batch * (context + DECODED) > _ROOM * engine.cache_tokens:
                left_out.append(f"{batch} x {context:,} tokens: do not fit into the engine's cache")
                continue
            prompts += [self._prompt(context) for _ in range(batch - len(prompts))]
            # The prompts are computed before, so all streams begin to decode at once.
            await asyncio.gather(*(self._ask(prompt, 1) for prompt in prompts))
            answers = await asyncio.gather(*(self._ask(prompt, DECODED) for prompt in prompts))
            gaps = _gaps(answers)
            if len(gaps) < FEWEST_GAPS * batch:
                left_out.append(
                    f"{batch} x {context:,} tokens: the engine did not decode all of them at the same time"
                )
                continue
            load = StepLoad(0, 0, batch, batch * (context + DECODED // 2))
            measurements.append(Measurement(load, step_s(gaps)))
        return measurements, left_out

    async def mixed(
        self, batch: int, context: int, prompts: Sequence[int], engine: Engine
    ) -> tuple[list[Measurement], list[str]]:
        """Time the steps that compute new prompts of `prompts` tokens, one after another, while `batch` streams decode
        at about `context` tokens. Also return what could not be measured."""
        decoded = STEPS_BEFORE + STEPS_A_PROMPT * len(prompts)
        name = f"prompts beside {batch} x {context:,} tokens"
        used = batch * (context + decoded) + sum(prompts)
        if engine.cache_tokens and used > _ROOM * engine.cache_tokens:
            return [], [f"{name}: do not fit into the engine's cache"]
        before = [self._prompt(context) for _ in range(batch)]
        await asyncio.gather(*(self._ask(prompt, 1) for prompt in before))
        streams = [asyncio.ensure_future(self._ask(prompt, decoded)) for prompt in before]
        try:
            computed = await self._beside(streams, prompts)
            answers = await asyncio.gather(*streams)
        finally:
            for stream in streams:
                stream.cancel()
        measurements, left_out = list[Measurement](), list[str]()
        for tokens, answer in computed:
            load, duration_s = mixed_step(tokens, answer, answers, context)
            if load is None:
                left_out.append(f"{name}: the streams ended before {tokens:,} tokens were computed")
            elif duration_s < ONE_STEP * (answer.ttft_s - duration_s):
                left_out.append(
                    f"{name}: {tokens:,} tokens took longer than one step; give the engine's --max-num-batched-tokens as --chunk-tokens, or measure while the machine is idle"
                )
            else:
                measurements.append(Measurement(load, duration_s))
        return measurements, left_out

    async def _beside(
        self, streams: Sequence[asyncio.Future[Timed]], prompts: Sequence[int]
    ) -> list[tuple[int, Timed]]:
        """Send new prompts one after another, until all are computed or a stream has ended."""
        computed = list[tuple[int, Timed]]()
        await self._ask(self._prompt(1), STEPS_BEFORE)  # all streams decode by then
        for tokens in prompts:
            if any(stream.done() for stream in streams):
                break
            computed.append((tokens, await self._ask(self._prompt(tokens), 1)))
        return computed

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(self._pool, k=tokens)

    async def _ask(self, prompt: Sequence[int], max_tokens: int) -> Timed:
        answer = await self._client.complete(prompt, max_tokens)
        if answer.status != 200:
            hint = ""
            if answer.status == 429:
                hint = "; profile it without --middleware, or with a class that has no SLO"
            raise AskError(
                f"{self._client.url}: a prompt of {len(prompt):,} tokens was answered with "
                f"{answer.status}{hint}: {answer.error}"
            )
        return answer


def _prefills(steps: Sequence[StepLoad], engine: Engine) -> dict[int, list[int]]:
    """The cached tokens to try for each length."""
    lengths: dict[int, list[int]] = {}
    for load in steps:
        if load.tokens and not load.batch:
            both = load.pairs // load.tokens  # length + cached
            length, cached = (both + load.tokens) // 2, (both - load.tokens) // 2
            lengths.setdefault(length, [])
            lengths[length] += [cached] if engine.caches else []
    return lengths


def _decodes(steps: Sequence[StepLoad]) -> dict[int, list[int]]:
    """The batches to try for each context."""
    contexts: dict[int, list[int]] = {}
    for load in steps:
        if load.batch and not load.tokens:
            contexts.setdefault(load.context // load.batch, []).append(load.batch)
    return {context: sorted(set(batches)) for context, batches in sorted(contexts.items())}


def _mixed(steps: Sequence[StepLoad]) -> dict[tuple[int, int], list[int]]:
    """The prompts to try for each batch and context."""
    beside: dict[tuple[int, int], list[int]] = {}
    for load in steps:
        if load.batch and load.tokens:
            beside.setdefault((load.batch, load.context // load.batch), []).append(load.tokens)
    return beside


def mixed_step(
    tokens: int, prompt: Timed, streams: Sequence[Timed], context: int
) -> tuple[StepLoad | None, float]:
    """The step in which a prompt of `tokens` tokens got its first token, and its duration in seconds. The duration is
    the median, over the streams, of the time between a stream's last token before that step and its token of that step.
    None: a stream did not decode then.

    Args:
        context: tokens of each stream's prompt.
    """
    gaps, decoded, at_s = list[float](), 0, prompt.token_s[0]
    for stream in streams:
        times = stream.token_s
        n = min(range(len(times)), key=lambda n: abs(times[n] - at_s))
        if not (prompt.sent_s > times[0] and n > 0 and times[-1] > at_s):
            return None, 0.0
        # Tokens that came together have one time; the step began at the one before.
        earlier = [time_s for time_s in times[:n] if time_s < times[n]]
        gaps.append(times[n] - earlier[-1])
        decoded += n
    load = StepLoad(tokens, tokens**2, len(streams), len(streams) * context + decoded)
    return load, statistics.median(gaps)


def _gaps(answers: Sequence[Timed]) -> list[float]:
    """Times between two tokens while all streams decode, in seconds."""
    begin = max(answer.token_s[0] for answer in answers)
    end = min(answer.token_s[-1] for answer in answers)
    return [
        after - before
        for answer in answers
        for before, after in zip(answer.token_s, answer.token_s[1:], strict=False)
        if begin <= before and after <= end
    ]


def step_s(gaps: Sequence[float]) -> float:
    """Mean time of a step, in seconds, from times between tokens.

    It is not a median: tokens that come together have times of 0 and of two steps, and steps beside other work have two
    usual durations.
    """
    left_out = len(gaps) // OUTLIERS
    return statistics.mean(sorted(gaps)[left_out : len(gaps) - left_out])


def _medians(measured: Sequence[Measurement]) -> list[Measurement]:
    """One measurement for each load: the median of its repetitions."""
    times: dict[StepLoad, list[float]] = {}
    for measurement in measured:
        times.setdefault(measurement.load, []).append(measurement.duration_s)
    return [Measurement(load, statistics.median(seconds)) for load, seconds in times.items()]


def _cache(samples: Samples) -> tuple[int, int]:
    """Tokens in a block, and in all blocks (0: unknown)."""
    for name, labels in samples:
        if name == "vllm:cache_config_info":
            config = dict(labels)
            block, blocks = config.get("block_size", ""), config.get("num_gpu_blocks", "")
            if block.isdecimal():
                return int(block), int(block) * int(blocks) if blocks.isdecimal() else 0
    return _PAGE_SIZE, 0


async def _check_idle(client: EngineClient) -> None:
    samples = await client.metrics()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    if not samples.has(names[0]):
        raise AskError(f"{client.url}/metrics: has no {names[0]}; it must be a vLLM server")
    if busy := sum(samples.total(name) for name in names):
        raise AskError(f"{client.url}: has {busy:.0f} requests; profile an engine without traffic")
