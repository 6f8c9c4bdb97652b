# SPDX-License-Identifier: Apache-2.0
"""What measurements of pairs say together: ours beside the baselines, with bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pd_bench.flow import Run
from pd_bench.handoff.contender import Contender
from pd_bench.handoff.receiving import Receiving
from pd_bench.report import Compared, Comparison, Param
from pd_bench.sample import Sample

TOKEN_RATE_BAR = 0.95
"""Least share of the baseline's token rate that a decode engine must keep while it receives."""


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

    tables: list[Compared]  # each with the contender that ours are compared with
    series: list[Series]
    restless: int
    others_cores: float
    unlike: int  # prompts that two pairs answered differently
    drift: dict[int, float]  # the first baseline's last median / its first, where it ran twice
    failures: Mapping[str, str]  # contenders whose measurement did not end, and why

    @property
    def comparisons(self) -> list[Comparison]:
        """The comparisons of all tables."""
        return [row for _, several in self.tables for row in several]


def findings(
    measured: Sequence[MeasuredPairs], failures: Mapping[str, str] | None = None
) -> HandoffFindings:
    """Compare ours with the baseline, over all measurements of the same prompt lengths.

    Args:
        failures: contenders whose measurement did not end, and why.

    Raises:
        ValueError: a baseline or ours is missing.
    """
    series = [each for pairs in measured for each in pairs.series]
    baselines = [each.runs for each in series if each.contender.is_baseline]
    ours = [each for each in series if not each.contender.is_baseline]
    if not baselines or not ours:
        raise ValueError("findings need measurements of a baseline and of ours")
    others = {each.contender.name: each.contender for each in series}
    tables = [(name, _compare_all(ours, name, series)) for name in others]
    first = next(each.contender for each in series if each.contender.is_baseline)
    repeated = [each.runs for each in series if each.contender == first]
    return HandoffFindings(
        [(name, comparisons) for name, comparisons in tables if comparisons],
        series,
        sum(pairs.restless for pairs in measured),
        max(pairs.others_cores for pairs in measured),
        _unlike([each.runs for each in series]),
        _drift(repeated[0], repeated[-1]) if len(repeated) > 1 else {},
        failures or {},
    )


def _compare_all(ours: Sequence[Series], other: str, series: Sequence[Series]) -> list[Comparison]:
    """Those of ours to compare with this contender, which may have been measured twice."""
    against = [each for each in series if each.contender.name == other]
    compared = [mine for mine in ours if other in mine.contender.against]
    rows = [
        _compare(what, tokens, mine, against, _bar(what, tokens, mine.contender, other, series))
        for tokens in against[0].runs
        for what in ("handoff", "prefill")
        for mine in compared
    ]
    return rows + [row for mine in compared for row in _compare_receiving(mine, against)]


def _bar(
    what: str, tokens: int, ours: Contender, other: str, series: Sequence[Series]
) -> float | None:
    """The bar of `ours` beside `other`; None if there is no bar."""
    if what != "handoff":
        return None
    if ours.slowest:
        measured = {each.contender.name for each in series} & set(ours.against)
        medians = {
            name: _sample(what, tokens, [f for f in series if f.contender.name == name]).median
            for name in measured
        }
        if other != max(medians, key=medians.__getitem__):
            return None
    return ours.bar(other, tokens)


def _sample(what: str, tokens: int, series: Sequence[Series]) -> Sample:
    """A figure of all runs of these series, in milliseconds."""
    runs = [run for each in series for run in each.runs[tokens]]
    return Sample(tuple(getattr(run, f"{what}_s") for run in runs)).scaled(1e3)


def _compare(
    what: str, tokens: int, ours: Series, against: Sequence[Series], bar: float | None
) -> Comparison:
    params: dict[str, Param] = {"prompt_tokens": tokens, **ours.contender.params}
    sides = _sample(what, tokens, [ours]), _sample(what, tokens, against)
    return Comparison(what, params, *sides, "ms", bar)


def _compare_receiving(ours: Series, against: Sequence[Series]) -> list[Comparison]:
    theirs = [other.receiving for other in against if other.receiving]
    if ours.receiving is None or not theirs:
        return []
    tokens = max(ours.runs)
    params: dict[str, Param] = {"prompt_tokens": tokens, **ours.contender.params}
    cpu = Sample(tuple(value for other in theirs for value in other.cpu_s_per_gb))
    rate = Sample(tuple(value for other in theirs for value in other.tokens_per_s))
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
        for runs in zip(*(by_tokens[tokens] for by_tokens in all_runs), strict=True)
    )


def _drift(first: Runs, last: Runs) -> dict[int, float]:
    def median(runs: Sequence[Run]) -> float:
        return Sample(tuple(run.handoff_s for run in runs)).median

    return {tokens: median(last[tokens]) / median(first[tokens]) for tokens in first}
