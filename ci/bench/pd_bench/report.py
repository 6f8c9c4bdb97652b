# SPDX-License-Identifier: Apache-2.0
"""A benchmark's results: a table for people, rows for programs, and whether the bars were reached.

Every benchmark reports in this form: ours beside a baseline, measured in one run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from pd_bench.sample import Sample
from pd_connector.errors import PDConnectorError

Param = str | int | float
Say = Callable[[str], None]
"""Takes a line about the progress."""


class BenchError(PDConnectorError):
    """The measurement did not measure what it should."""


@dataclass(frozen=True)
class Figure:
    """One figure of a comparison. Its fields are the keys of a row of the JSON file."""

    name: str
    params: Mapping[str, Param]  # with `name` they identify the figure
    ours: float
    baseline: float
    unit: str
    ratio: float  # ours / baseline
    bar: float | None  # limit of the ratio; None if there is no bar
    ok: bool  # False only if a bar was missed


@dataclass(frozen=True)
class Comparison:
    """Ours and the baseline, measured in the same way.

    Args:
        name: what was measured.
        params: how it was measured; the keys are the table's columns.
        ours: our values.
        baseline: the baseline's values, in the same unit.
        unit: of both.
        bar: limit of the ratio of the medians; None if there is no bar.
        more_is_better: whether the bar is the least allowed ratio (for a throughput), not the largest (for a
            time or a cost).
    """

    name: str
    params: Mapping[str, Param]
    ours: Sample
    baseline: Sample
    unit: str
    bar: float | None = None
    more_is_better: bool = False

    @property
    def ratio(self) -> float:
        """Our median over the baseline's."""
        return self.ours.median / self.baseline.median

    @property
    def ok(self) -> bool:
        """Whether the bar was reached, or there is no bar."""
        if self.bar is None:
            return True
        return self.ratio >= self.bar if self.more_is_better else self.ratio <= self.bar

    def rows(self) -> list[Figure]:
        """The median, to which the bar applies, then the 10th and 90th percentiles."""
        rows = []
        for statistic in ("median", "p10", "p90"):
            ours: float = getattr(self.ours, statistic)
            baseline: float = getattr(self.baseline, statistic)
            judged = statistic == "median"
            rows.append(
                Figure(
                    self.name,
                    {**self.params, "statistic": statistic, "runs": len(self.ours.values)},
                    ours,
                    baseline,
                    self.unit,
                    ours / baseline,
                    self.bar if judged else None,
                    self.ok if judged else True,
                )
            )
        return rows


Compared = tuple[str, list[Comparison]]
"""A table of a report: the name of its baseline, and its rows."""


def write_json(path: Path, comparisons: Iterable[Comparison]) -> None:
    """Write all rows as a JSON array."""
    rows = [asdict(row) for comparison in comparisons for row in comparison.rows()]
    path.write_text(json.dumps(rows, indent=1) + "\n")


def table(comparisons: Sequence[Comparison], baseline: str) -> Table:
    """The comparisons as a table; `baseline` names the other side.

    Each value is a median with its 10th and 90th percentiles below it, so that both sides fit a terminal of 80
    columns.
    """
    columns = list(dict.fromkeys(key for c in comparisons for key in c.params))
    drawn = Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
        caption="median, 10th - 90th percentile; ratio of the medians: ours / baseline",
        caption_justify="left",
    )
    drawn.add_column("", no_wrap=True)
    for column in columns:
        drawn.add_column(column.replace("_", "\n"), justify="right", no_wrap=True)
    for heading in ("ours", baseline, "ratio", "bar", "ok"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for comparison in comparisons:
        drawn.add_row(
            comparison.name,
            *(_plain(comparison.params.get(column, "")) for column in columns),
            _spread(comparison.ours, comparison.unit),
            _spread(comparison.baseline, comparison.unit),
            f"{comparison.ratio:.2f}",
            _bar(comparison),
            _verdict(comparison),
        )
    return drawn


def missed(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """The comparisons whose bar was missed."""
    return [comparison for comparison in comparisons if not comparison.ok]


def _spread(sample: Sample, unit: str) -> str:
    low, high = _figures(sample.p10), _figures(sample.p90)
    return f"{_figures(sample.median)} {unit}\n[dim]{low} - {high}[/]"


def _bar(comparison: Comparison) -> str:
    if comparison.bar is None:
        return ""
    return f"{'≥' if comparison.more_is_better else '≤'} {comparison.bar:.2f}"


def _figures(value: float) -> str:
    """Three significant digits without an exponent; whole numbers from 100 on."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def _plain(value: Param) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _verdict(comparison: Comparison) -> str:
    if comparison.bar is None:
        return ""
    return "[green]yes[/]" if comparison.ok else "[red]no[/]"
