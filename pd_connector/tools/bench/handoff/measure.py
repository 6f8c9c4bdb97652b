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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pd_connector.tools.bench.flow import Run
from pd_connector.tools.bench.handoff.contender import Contender
from pd_connector.tools.bench.handoff.pair import Pair, Prompts
from pd_connector.tools.bench.handoff.receiving import Receiving, measure_receiving
from pd_connector.tools.bench.machine import Noise
from pd_connector.tools.bench.report import Comparison, Param
from pd_connector.tools.bench.sample import Sample

SPINNING_CORES = 0.2
"""A pair that uses more cores than this at rest polls. A pair that waits uses a hundredth of a core."""
LOOK_S = 3.0
"""How long engines at rest are watched."""
REST_WINDOW_S = 0.2
REST_CORES = 0.15
"""A pair has come to rest when it uses at most this many cores more than its value at rest."""
REST_TIMEOUT_S = 10.0
LONG_ANSWER_PROMPT_TOKENS = 64
TOKEN_RATE_BAR = 0.95
"""Least share of the baseline's token rate that a decode engine must keep while it receives."""

Say = Callable[[str], None]
Runs = Mapping[int, Sequence[Run]]
"""By prompt length."""


@dataclass(frozen=True)
class Series:
    """Measurements of one pair."""

    contender: Contender
    runs: Runs
    rest_cores: float  # cores that the pair uses with nothing to do
    frozen: bool  # it polls, and was frozen while others were measured
    receiving: Receiving | None = None  # with the longest prompt


@dataclass(frozen=True)
class MeasuredPairs:
    """Measurements of pairs that ran at once."""

    series: Sequence[Series]
    restless: int  # runs that began while some engine was not at rest
    others_cores: float  # used by programs outside the measurement


@dataclass(frozen=True)
class HandoffFindings:
    """The results of all measurements together."""

    tables: list[
        tuple[str, list[Comparison]]
    ]  # each with the contender that ours are compared with
    series: list[Series]
    restless: int
    others_cores: float
    unlike: int  # prompts that two pairs answered differently
    drift: dict[int, float]  # the first baseline's last median / its first, where it ran twice
    failures: Mapping[str, str]  # contenders whose measurement did not end, and why

    @property
    def comparisons(self) -> list[Comparison]:
        """The comparisons of all tables."""
        return [one for _, several in self.tables for one in several]


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
        noise = Noise([pid for pair in self._pairs for pid in pair.pids])
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
                {tokens: [runs[index] for runs in found] for tokens, found in rounds.items()},
                self._rest_cores[index],
                self._freezes(index),
                receiving[index],
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
        found = []
        for pair in self._pairs:
            for other in self._pairs:
                if other is not pair:
                    other.pause()
            pair.resume()
            before, started = pair.cpu_seconds(), time.monotonic()
            time.sleep(LOOK_S)
            found.append((pair.cpu_seconds() - before) / (time.monotonic() - started))
        for pair in self._pairs:
            pair.resume()
        return found

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


def findings(
    measured: Sequence[MeasuredPairs], failures: Mapping[str, str] | None = None
) -> HandoffFindings:
    """Compare ours with the baseline, over all measurements of the same prompt lengths.

    Args:
        failures: contenders whose measurement did not end, and why.

    Raises:
        ValueError: a baseline or ours is missing.
    """
    series = [found for one in measured for found in one.series]
    baselines = [found.runs for found in series if found.contender.is_baseline]
    ours = [found for found in series if not found.contender.is_baseline]
    if not baselines or not ours:
        raise ValueError("findings need measurements of a baseline and of ours")
    others = {found.contender.name: found.contender for found in series}
    tables = [(name, _compare_all(ours, name, series)) for name in others]
    first = next(found.contender for found in series if found.contender.is_baseline)
    repeated = [found.runs for found in series if found.contender == first]
    return HandoffFindings(
        [(name, comparisons) for name, comparisons in tables if comparisons],
        series,
        sum(one.restless for one in measured),
        max(one.others_cores for one in measured),
        _unlike([found.runs for found in series]),
        _drift(repeated[0], repeated[-1]) if len(repeated) > 1 else {},
        failures or {},
    )


def _compare_all(ours: Sequence[Series], other: str, series: Sequence[Series]) -> list[Comparison]:
    """Those of ours to compare with this contender, which may have been measured twice."""
    against = [found for found in series if found.contender.name == other]
    compared = [one for one in ours if other in one.contender.against]
    found = [
        _compare(what, tokens, one, against, _bar(what, tokens, one.contender, other, series))
        for tokens in against[0].runs
        for what in ("handoff", "prefill")
        for one in compared
    ]
    return found + [row for one in compared for row in _compare_receiving(one, against)]


def _bar(
    what: str, tokens: int, ours: Contender, other: str, series: Sequence[Series]
) -> float | None:
    """The bar of `ours` beside `other`; None if there is no bar."""
    if what != "handoff":
        return None
    if ours.slowest:
        measured = {found.contender.name for found in series} & set(ours.against)
        medians = {
            name: _sample(what, tokens, [f for f in series if f.contender.name == name]).median
            for name in measured
        }
        if other != max(medians, key=medians.__getitem__):
            return None
    return ours.bar(other, tokens)


def _sample(what: str, tokens: int, series: Sequence[Series]) -> Sample:
    """A figure of all runs of these series, in milliseconds."""
    runs = [run for one in series for run in one.runs[tokens]]
    return Sample(tuple(getattr(run, f"{what}_s") for run in runs)).scaled(1e3)


def _compare(
    what: str, tokens: int, ours: Series, against: Sequence[Series], bar: float | None
) -> Comparison:
    params: dict[str, Param] = {"prompt_tokens": tokens, **ours.contender.params}
    sides = _sample(what, tokens, [ours]), _sample(what, tokens, against)
    return Comparison(what, params, *sides, "ms", bar)


def _compare_receiving(ours: Series, against: Sequence[Series]) -> list[Comparison]:
    theirs = [one.receiving for one in against if one.receiving]
    if ours.receiving is None or not theirs:
        return []
    tokens = max(ours.runs)
    params: dict[str, Param] = {"prompt_tokens": tokens, **ours.contender.params}
    cpu = Sample(tuple(value for one in theirs for value in one.cpu_s_per_gb))
    rate = Sample(tuple(value for one in theirs for value in one.tokens_per_s))
    bar = TOKEN_RATE_BAR if against[0].contender.is_baseline else None
    return [
        Comparison("CPU per GB", params, Sample(ours.receiving.cpu_s_per_gb), cpu, "s"),
        Comparison("tokens/s", params, Sample(ours.receiving.tokens_per_s), rate, "", bar, True),
    ]


def _unlike(all_runs: Sequence[Runs]) -> int:
    """Prompts that pairs answered differently. All measurements sent the same prompts in the same order."""
    return sum(
        len({run.text for run in runs}) > 1
        for tokens in all_runs[0]
        for runs in zip(*(found[tokens] for found in all_runs), strict=True)
    )


def _drift(first: Runs, last: Runs) -> dict[int, float]:
    def median(runs: Sequence[Run]) -> float:
        return Sample(tuple(run.handoff_s for run in runs)).median

    return {tokens: median(last[tokens]) / median(first[tokens]) for tokens in first}
