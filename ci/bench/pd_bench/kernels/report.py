# SPDX-License-Identifier: Apache-2.0
"""Rows of a report. The fields are the same as in pd_connector's benchmarks, so the same tools read
both."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

Param = str | int | float
FAILED = "failed"
"""Name of the param with the reason why a row has no figures."""


@dataclass(frozen=True)
class Comparison:
    """One of our figures beside a baseline's figure.

    Attributes:
        name: what was measured.
        params: the conditions of the measurement.
        ours, baseline: the figures, in `unit`. NaN if the case failed; the param `failed` says why.
        ratio: ours / baseline.
        bar: the least ratio for a throughput, the greatest for a time; None if there is no bar.
        ok: False if the bar was missed or the case failed.
    """

    name: str
    params: Mapping[str, Param]
    ours: float
    baseline: float
    unit: str
    ratio: float
    bar: float | None
    ok: bool


def throughput(
    name: str, params: Mapping[str, Param], ours: float, baseline: float, bar: float | None
) -> Comparison:
    """A row in GB/s, read and written, compared with a plain copy."""
    ratio = ours / baseline
    return Comparison(name, params, ours, baseline, "GB/s", ratio, bar, bar is None or ratio >= bar)


def duration(
    name: str, params: Mapping[str, Param], ours_s: float, baseline_s: float, bar: float | None
) -> Comparison:
    """A row in microseconds, compared with another implementation."""
    ratio = ours_s / baseline_s
    passed = bar is None or ratio <= bar
    return Comparison(name, params, ours_s * 1e6, baseline_s * 1e6, "us", ratio, bar, passed)


def rows_or_failure(
    name: str, params: Mapping[str, Param], rows: Iterator[Comparison], wrong: bool = False
) -> Iterator[Comparison]:
    """Yield the rows of a case. If the case raises, yield one more row, which is not ok and has the
    reason. If its kernel is `wrong`, yield only such a row, and measure nothing."""
    try:
        if wrong:
            raise ValueError("not measured, its check failed")
        yield from rows
    except Exception as error:  # a case that fails must not stop the rest
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        none = math.nan
        yield Comparison(name, {**params, FAILED: cause}, none, none, "", none, None, False)


def line(row: Comparison) -> str:
    """A row as one line of text."""
    shown = " ".join(f"{key}={value}" for key, value in row.params.items() if key != FAILED)
    if FAILED in row.params:
        return f"{row.name}: {shown}: FAILED: {row.params[FAILED]}"
    bar = "" if row.bar is None else f", bar {row.bar:.2f}{'' if row.ok else ' MISSED'}"
    figures = f"{row.ours:,.1f} beside {row.baseline:,.1f} {row.unit}"
    return f"{row.name}: {shown}: {figures}, ratio {row.ratio:.3f}{bar}"


def write_json(path: Path, rows: Sequence[Comparison]) -> None:
    """Write all rows as a JSON list. Missing figures are null."""
    rows_json = [
        {key: None if value != value else value for key, value in asdict(row).items()}
        for row in rows
    ]
    path.write_text(json.dumps(rows_json, indent=1) + "\n")


def print_rows(rows: Sequence[Comparison]) -> None:
    """Print a table. Missed bars and failed cases are marked."""
    columns = list(dict.fromkeys(key for row in rows for key in row.params if key != FAILED))
    header = ["", *columns, "ours", "baseline", "unit", "ratio", "bar", ""]
    lines = [
        [
            row.name,
            *(str(row.params.get(column, "")) for column in columns),
            *("" if math.isnan(n) else f"{n:,.1f}" for n in (row.ours, row.baseline)),
            row.unit,
            "" if math.isnan(row.ratio) else f"{row.ratio:.3f}",
            "" if row.bar is None else f"{row.bar:.2f}",
            "" if row.ok else "FAILED" if FAILED in row.params else "MISSED",
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    for line in (header, *lines):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
