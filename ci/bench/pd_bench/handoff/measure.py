# SPDX-License-Identifier: Apache-2.0
"""`bench handoff`: the time from a finished prefill to the first decoded token, beside a baseline.

A `TurnMeasurement` measures pairs of engines that run at once. It measures them in turn, A B A B, so that all see the
same noise. Some pairs keep cores busy even with nothing to do (NIXL's progress threads poll). Such a pair would
slow the others, so it is frozen while they are measured; during its own measurement it runs freely. If a machine
holds only one pair, each pair has its own measurement, with the same prompts. `findings` joins measurements.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from pd_bench.flow import Run
from pd_bench.handoff.findings import MeasuredPairs, Series
from pd_bench.handoff.pair import Pair, Prompts
from pd_bench.handoff.receiving import Receiving, measure_receiving
from pd_bench.machine import Noise
from pd_bench.report import Say

SPINNING_CORES = 0.2
"""A pair that uses more cores than this at rest polls. A pair that waits uses a hundredth of a core."""
LOOK_S = 3.0
"""How long engines at rest are watched."""
REST_WINDOW_S = 0.2
REST_CORES = 0.15
"""A pair has come to rest when it uses at most this many cores more than its value at rest."""
REST_TIMEOUT_S = 10.0
LONG_ANSWER_PROMPT_TOKENS = 64


class TurnMeasurement:
    """Measures pairs of engines that are already running.

    Args:
        pairs: measured in turn.
        runs: measured rounds for each prompt length; in a round every pair runs once.
        warm_ups: rounds before them, not counted.
        say: gets a line for each event worth telling.
    """

    def __init__(self, pairs: Sequence[Pair], runs: int, warm_ups: int, say: Say) -> None:
        self._pairs = pairs
        self._runs = runs
        self._warm_ups = warm_ups
        self._say = say
        self._prompts = Prompts(pairs[0].engines[0].client)
        self._restless = 0
        self._rest_cores = self._look()

    def measure(self, prompt_tokens: Sequence[int]) -> MeasuredPairs:
        """Measure all prompt lengths.

        Raises:
            BenchError: a decode engine computed a prompt itself.
            HttpError: an engine refused a request.
        """
        noise = Noise()
        for pair in self._pairs:
            pair.begin()
        rounds = {tokens: self._rounds(tokens) for tokens in prompt_tokens}
        receiving = self._receiving(max(prompt_tokens))
        for pair in self._pairs:
            pair.resume()
            pair.check()
        series = [
            Series(
                pair.contender,
                {
                    tokens: [runs[index] for runs in runs_of_round]
                    for tokens, runs_of_round in rounds.items()
                },
                self._rest_cores[index],
                self._freezes(index),
                receiving[index],
            )
            for index, pair in enumerate(self._pairs)
        ]
        return MeasuredPairs(series, self._restless, noise.cores())

    def _rounds(self, tokens: int) -> list[list[Run]]:
        """Measured rounds, each with a run of every pair."""
        rounds = []
        for number in range(self._warm_ups + self._runs):
            prompt, salt = self._prompts.make(tokens), uuid.uuid4().hex
            runs = [self._run(index, prompt, salt) for index in range(len(self._pairs))]
            warming = number < self._warm_ups
            label = "warm-up" if warming else f"run {number - self._warm_ups + 1}/{self._runs}"
            times = ", ".join(
                f"{pair.contender.name} {run.handoff_s * 1e3:.1f} ms"
                for pair, run in zip(self._pairs, runs, strict=True)
            )
            self._say(f"{tokens:,} tokens, {label}: {times}")
            if not warming:
                rounds.append(runs)
        return rounds

    def _run(self, index: int, prompt: Sequence[int], salt: str) -> Run:
        return self._turn(index).run(prompt, salt)

    def _receiving(self, tokens: int) -> list[Receiving | None]:
        """The cost of receiving to each pair."""
        prompt, other = self._prompts.make(tokens), self._prompts.make(LONG_ANSWER_PROMPT_TOKENS)
        return [
            measure_receiving(self._turn(index), prompt, other, self._runs)
            if pair.measured_receiving
            else None
            for index, pair in enumerate(self._pairs)
        ]

    def _turn(self, index: int) -> Pair:
        """The pair whose turn it is, once every engine is at rest."""
        for other, pair in enumerate(self._pairs):
            if other != index and self._freezes(other):
                pair.pause()
        self._pairs[index].resume()
        self._rest()
        return self._pairs[index]

    def _freezes(self, index: int) -> bool:
        return len(self._pairs) > 1 and self._rest_cores[index] > SPINNING_CORES

    def _look(self) -> list[float]:
        """Cores that each pair uses with nothing to do. The other pairs are frozen meanwhile: two polling pairs would
        share the cores, and neither would show what it uses alone."""
        cores = []
        for pair in self._pairs:
            for other in self._pairs:
                if other is not pair:
                    other.pause()
            pair.resume()
            before, started = pair.cpu_seconds(), time.monotonic()
            time.sleep(LOOK_S)
            cores.append((pair.cpu_seconds() - before) / (time.monotonic() - started))
        for pair in self._pairs:
            pair.resume()
        return cores

    def _rest(self) -> None:
        """Wait until every engine is idle."""
        allowed = [cores + REST_CORES for cores in self._rest_cores]
        deadline = time.monotonic() + REST_TIMEOUT_S
        while True:
            before = [pair.cpu_seconds() for pair in self._pairs]
            started = time.monotonic()
            time.sleep(REST_WINDOW_S)
            after = [pair.cpu_seconds() for pair in self._pairs]
            now = time.monotonic()
            used = [(b - a) / (now - started) for a, b in zip(before, after, strict=True)]
            if all(u <= most for u, most in zip(used, allowed, strict=True)):
                return
            if now > deadline:
                self._restless += 1
                cores = ", ".join(f"{u:.2f}" for u in used)
                self._say(f"engines do not come to rest: the pairs use {cores} cores")
                return
