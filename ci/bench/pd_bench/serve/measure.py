# SPDX-License-Identifier: Apache-2.0
"""Measures both stacks in turn, at loads derived from the rival's capacity, and compares them."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pd_bench.machine import Noise
from pd_bench.report import BenchError, Comparison, Say
from pd_bench.sample import Sample
from pd_bench.serve.sending import Answer, completion_rate, send
from pd_bench.serve.stack import Stack
from pd_bench.serve.trace import Line, TimedRequest, timed
from pd_connector.tools.launch import Client

TTFT_BARS = {0.8: 0.5}
P99_BARS = {0.8: 0.6}
GOODPUT_BARS = {1.1: 1.5}
TPOT_BAR = 1.05
TTFT_PROMISE = 5.0
TPOT_PROMISE = 2.0
"""The promise, as multiples of the rival's mean times on idle engines."""

WARM_UPS = 8
AT_REST = 10
"""Requests sent one after the other: to compile everything, and to set the promise."""
AT_ONCE = 8
"""Requests under way at all times while capacity is measured."""
MOST_FAILED = 0.05
"""A run in which a larger share fails is not compared."""
LOOK_S = 3.0


@dataclass(frozen=True)
class Plan:
    """The parameters of one measurement.

    Args:
        loads: shares of the rival's capacity.
        requests: number of requests in one run.
        rounds: repetitions, each with other requests of the trace.
        scale: divisor of the trace's lengths.
    """

    loads: Sequence[float]
    requests: int
    rounds: int
    scale: float


@dataclass(frozen=True)
class Promise:
    """A request that keeps both limits was served in time."""

    ttft_s: float
    tpot_s: float

    def kept(self, answer: Answer) -> bool:
        """Whether this answer was in time."""
        return not answer.failure and answer.ttft_s <= self.ttft_s and answer.tpot_s <= self.tpot_s


@dataclass(frozen=True)
class Turn:
    """One run of one stack."""

    answers: Sequence[Answer]
    span_s: float  # first request due -> last request due

    @property
    def served(self) -> list[Answer]:
        """The answers that did not fail."""
        return [answer for answer in self.answers if not answer.failure]


@dataclass(frozen=True)
class ServeFindings:
    """The results of all measurements."""

    comparisons: Sequence[Comparison]
    promise: Promise
    capacity: float  # the rival's, requests a second
    failed: Mapping[str, Counter[str]]  # by stack, then by the error's text
    sources: Mapping[str, Mapping[str, float]]  # of the decode engines' prompt tokens, by stack
    rest_cores: Mapping[str, float]
    others_cores: float


class Measurement:
    """Measures two stacks that are already running.

    Args:
        ours, rival: the stacks.
        lines: the trace; each round takes `plan.requests` of them.
        say: gets a line for each event worth telling.
    """

    def __init__(
        self, ours: Stack, rival: Stack, lines: Sequence[Line], plan: Plan, say: Say
    ) -> None:
        self._stacks = (ours, rival)
        self._lines = lines
        self._plan = plan
        self._say = say
        self._model = ours.engines[0].client.model()
        self._seed = 0
        self._failed: dict[str, Counter[str]] = {stack.name: Counter() for stack in self._stacks}

    def measure(self) -> ServeFindings:
        """Measure everything.

        Raises:
            BenchError: a stack fails too many requests.
        """
        rest_cores = {stack.name: self._rest_cores(stack) for stack in self._stacks}
        for stack in self._stacks:
            with _Turn(stack):
                self._one_by_one(stack, WARM_UPS, seed=1)
        rival = self._stacks[1]
        with _Turn(rival):
            promise = self._promise(rival)
        noise = Noise()
        before = {stack.name: _tokens(stack) for stack in self._stacks}
        rates = [self._capacity(stack) for stack in self._stacks]
        turns = self._rounds(rates[1])
        sources = {stack.name: _grown(_tokens(stack), before[stack.name]) for stack in self._stacks}
        capacity = Comparison(
            "requests/s", {}, Sample((rates[0],)), Sample((rates[1],)), "/s", None, True
        )
        return ServeFindings(
            [*compared(turns, promise), capacity],
            promise,
            rates[1],
            self._failed,
            sources,
            rest_cores,
            noise.cores(),
        )

    def _rounds(self, capacity: float) -> dict[float, list[tuple[Turn, Turn]]]:
        """Runs by load: pairs of ours and the rival's with the same requests."""
        turns: dict[float, list[tuple[Turn, Turn]]] = {load: [] for load in self._plan.loads}
        for number in range(self._plan.rounds):
            lines = self._lines_of(number)
            for load in self._plan.loads:
                requests = timed(lines, load * capacity, self._plan.scale, self._next_seed())
                turn_of: dict[str, Turn] = {}
                # The stacks begin alternately, so that neither always has the quieter minute.
                for stack in self._stacks if number % 2 else reversed(self._stacks):
                    turn_of[stack.name] = turn = self._turn(stack, requests)
                    times = [answer.ttft_s for answer in turn.served]
                    self._say(
                        f"round {number + 1}, load {load:g}, {stack.name}: mean TTFT "
                        f"{statistics.mean(times):.2f} s"
                    )
                ours, rival = (turn_of[stack.name] for stack in self._stacks)
                turns[load].append((ours, rival))
        return turns

    def _turn(self, stack: Stack, requests: Sequence[TimedRequest]) -> Turn:
        with _Turn(stack):
            answers = send(self._client(stack), self._model, requests)
        self._note(stack, answers)
        return Turn(answers, requests[-1].at_s)

    def _capacity(self, stack: Stack) -> float:
        requests = timed(self._lines_of(0), 1.0, self._plan.scale, seed=2)
        with _Turn(stack):
            rate, answers = completion_rate(self._client(stack), self._model, requests, AT_ONCE)
        self._note(stack, answers)
        self._say(f"{stack.name}: {rate:.2f} requests/s with {AT_ONCE} under way")
        return rate

    def _promise(self, rival: Stack) -> Promise:
        answers = self._one_by_one(rival, AT_REST, seed=3)
        return Promise(
            TTFT_PROMISE * statistics.mean(answer.ttft_s for answer in answers),
            TPOT_PROMISE * statistics.mean(answer.tpot_s for answer in answers),
        )

    def _one_by_one(self, stack: Stack, count: int, seed: int) -> list[Answer]:
        requests = timed(self._lines_of(0)[:count], 1.0, self._plan.scale, seed)
        _, answers = completion_rate(self._client(stack), self._model, requests, 1)
        self._note(stack, answers)
        return [answer for answer in answers if not answer.failure]

    def _note(self, stack: Stack, answers: Sequence[Answer]) -> None:
        """Count failures. Raises BenchError if there are too many."""
        failures = [answer.failure for answer in answers if answer.failure]
        self._failed[stack.name].update(failures)
        if len(failures) > MOST_FAILED * len(answers):
            raise BenchError(
                f"{stack.name}: {len(failures)} of {len(answers)} requests failed, the first: "
                f"{failures[0]}. See {stack.router.log_path.parent}"
            )

    def _rest_cores(self, stack: Stack) -> float:
        with _Turn(stack):
            began, used_s = time.monotonic(), stack.cpu_seconds()
            time.sleep(LOOK_S)
            return (stack.cpu_seconds() - used_s) / (time.monotonic() - began)

    def _lines_of(self, number: int) -> Sequence[Line]:
        return self._lines[number * self._plan.requests : (number + 1) * self._plan.requests]

    def _client(self, stack: Stack) -> Client:
        return stack.router.client

    def _next_seed(self) -> int:
        self._seed += 1
        return 100 + self._seed


class _Turn:
    """A stack's turn. Outside of its turn a stack disturbs no other."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def __enter__(self) -> None:
        self._stack.wake()

    def __exit__(self, *_: object) -> None:
        self._stack.rest()


def compared(
    turns: Mapping[float, Sequence[tuple[Turn, Turn]]], promise: Promise
) -> list[Comparison]:
    """Ours beside the rival for every load: one value per round."""
    comparisons = []
    for load, pairs in turns.items():
        ours, rival = ([pair[side] for pair in pairs] for side in (0, 1))

        def add(
            name: str,
            value: Callable[[Turn], float],
            unit: str,
            bar: float | None,
            more: bool = False,
            ours: Sequence[Turn] = ours,
            rival: Sequence[Turn] = rival,
            load: float = load,
        ) -> None:
            mine, theirs = (Sample(tuple(value(turn) for turn in side)) for side in (ours, rival))
            comparisons.append(Comparison(name, {"load": load}, mine, theirs, unit, bar, more))

        add("TTFT mean", _mean_ttft, "s", TTFT_BARS.get(load))
        add("TTFT p99", _p99_ttft, "s", P99_BARS.get(load))
        add("TPOT mean", _mean_tpot_ms, "ms", TPOT_BAR)
        add("goodput", lambda turn: goodput(turn, promise), "/s", GOODPUT_BARS.get(load), True)
    return comparisons


def goodput(turn: Turn, promise: Promise) -> float:
    """Requests a second that were served in time; one request at least is counted, because a ratio needs a
    number."""
    kept = sum(promise.kept(answer) for answer in turn.answers)
    return max(1, kept) / turn.span_s


def _mean_ttft(turn: Turn) -> float:
    return statistics.mean(answer.ttft_s for answer in turn.served)


def _p99_ttft(turn: Turn) -> float:
    times = [answer.ttft_s for answer in turn.served]
    return statistics.quantiles(times, n=100, method="inclusive")[98]


def _mean_tpot_ms(turn: Turn) -> float:
    return statistics.mean(answer.tpot_s for answer in turn.served) * 1e3


def _tokens(stack: Stack) -> dict[str, float]:
    with _Turn(stack):
        return stack.prompt_tokens()


def _grown(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {source: value - before.get(source, 0.0) for source, value in after.items()}
