# SPDX-License-Identifier: Apache-2.0
"""`bench handoff`: the time from a finished prefill to the first decoded token, beside a baseline.

A `TurnMeasurement` is of pairs of engines that run at once. They are measured in turn, A B A B, so that
all see the same noise. A pair that keeps cores busy while it has nothing to do (NIXL's progress
threads poll) would slow the others: it is frozen while they are measured, and spins as it likes
while it is measured itself. Where a machine holds one pair only, there is a measurement for each,
with the same prompts. `findings` puts measurements together.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pd_connector.tools.bench.flow import Run
from pd_connector.tools.bench.handoff.contender import BASELINE, Contender
from pd_connector.tools.bench.handoff.pair import Pair, Prompts
from pd_connector.tools.bench.machine import Noise
from pd_connector.tools.bench.report import Comparison, Param
from pd_connector.tools.bench.sample import Sample

SPINNING_CORES = 0.2
"""A pair that uses more than this at rest spins. One that waits uses a hundredth."""
LOOK_S = 3.0
"""How long to look at engines at rest."""
REST_WINDOW_S = 0.2
REST_CORES = 0.15
"""A pair has come to rest when it uses no more than this above what it uses at rest."""
REST_TIMEOUT_S = 10.0

Say = Callable[[str], None]
Runs = Mapping[int, Sequence[Run]]
"""By prompt length."""


@dataclass(frozen=True)
class Series:
    """What was measured of one pair."""

    contender: Contender
    runs: Runs
    rest_cores: float  # what the pair uses while it has nothing to do
    frozen: bool  # it spins, and was frozen while others were measured


@dataclass(frozen=True)
class MeasuredPairs:
    """What was measured of pairs that ran at once."""

    series: Sequence[Series]
    restless: int  # runs that began although some engine was not at rest
    others_cores: float  # used by programs that do not belong to the measurement


@dataclass(frozen=True)
class HandoffFindings:
    """Everything the measurements tell together."""

    comparisons: list[Comparison]
    series: list[Series]
    restless: int
    others_cores: float
    unlike: int  # prompts that two pairs answered differently
    drift: dict[int, float]  # the baseline's last median / its first, where it ran twice
    failures: Mapping[str, str]  # contenders that were not measured to the end, and why


class TurnMeasurement:
    """Pairs of engines that run already.

    Args:
        pairs: measured in turn.
        runs: measured rounds for each prompt length; in a round every pair runs once.
        warm_ups: rounds before them, not counted.
        say: gets a line whenever there is something to tell.
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
        noise = Noise([pid for pair in self._pairs for pid in pair.pids])
        for pair in self._pairs:
            pair.begin()
        rounds = {tokens: self._rounds(tokens) for tokens in prompt_tokens}
        for pair in self._pairs:
            pair.resume()
            pair.check()
        series = [
            Series(
                pair.contender,
                {tokens: [runs[index] for runs in found] for tokens, found in rounds.items()},
                self._rest_cores[index],
                self._freezes(index),
            )
            for index, pair in enumerate(self._pairs)
        ]
        return MeasuredPairs(series, self._restless, noise.cores())

    def _rounds(self, tokens: int) -> list[list[Run]]:
        """Measured rounds, each with a run of every pair."""
        found = []
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
                found.append(runs)
        return found

    def _run(self, index: int, prompt: Sequence[int], salt: str) -> Run:
        for other, pair in enumerate(self._pairs):
            if other != index and self._freezes(other):
                pair.pause()
        self._pairs[index].resume()
        self._rest()
        return self._pairs[index].run(prompt, salt)

    def _freezes(self, index: int) -> bool:
        return len(self._pairs) > 1 and self._rest_cores[index] > SPINNING_CORES

    def _look(self) -> list[float]:
        """Cores that each pair uses now; none of them has anything to do."""
        before = [pair.cpu_seconds() for pair in self._pairs]
        started = time.monotonic()
        time.sleep(LOOK_S)
        after = [pair.cpu_seconds() for pair in self._pairs]
        passed_s = time.monotonic() - started
        return [(b - a) / passed_s for a, b in zip(before, after, strict=True)]

    def _rest(self) -> None:
        """Wait until no engine works any more."""
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


def findings(
    measured: Sequence[MeasuredPairs], failures: Mapping[str, str] | None = None
) -> HandoffFindings:
    """Compare ours with the baseline, over all measurements of the same prompt lengths.

    Args:
        failures: contenders that were not measured to the end, and why.

    Raises:
        ValueError: the baseline or ours is missing.
    """
    series = [found for one in measured for found in one.series]
    baselines = [found.runs for found in series if found.contender == BASELINE]
    ours = [found for found in series if found.contender != BASELINE]
    if not baselines or not ours:
        raise ValueError("findings need measurements of the baseline and of ours")
    comparisons = [
        _compare(what, tokens, one, [run for runs in baselines for run in runs[tokens]])
        for tokens in baselines[0]
        for what, one in itertools.product(("handoff", "prefill"), ours)
    ]
    return HandoffFindings(
        comparisons,
        series,
        sum(one.restless for one in measured),
        max(one.others_cores for one in measured),
        _unlike([found.runs for found in series]),
        _drift(baselines[0], baselines[-1]) if len(baselines) > 1 else {},
        failures or {},
    )


def _compare(what: str, tokens: int, ours: Series, baseline: Sequence[Run]) -> Comparison:
    def sample(runs: Sequence[Run]) -> Sample:
        return Sample(tuple(getattr(run, f"{what}_s") for run in runs)).scaled(1e3)

    params: dict[str, Param] = {"prompt_tokens": tokens, **ours.contender.params}
    bar = ours.contender.bar(tokens) if what == "handoff" else None
    return Comparison(what, params, sample(ours.runs[tokens]), sample(baseline), "ms", bar)


def _unlike(all_runs: Sequence[Runs]) -> int:
    """All measurements sent the same prompts in the same order."""
    return sum(
        len({run.text for run in runs}) > 1
        for tokens in all_runs[0]
        for runs in zip(*(found[tokens] for found in all_runs), strict=True)
    )


def _drift(first: Runs, last: Runs) -> dict[int, float]:
    def median(runs: Sequence[Run]) -> float:
        return Sample(tuple(run.handoff_s for run in runs)).median

    return {tokens: median(last[tokens]) / median(first[tokens]) for tokens in first}
