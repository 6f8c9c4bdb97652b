# SPDX-License-Identifier: Apache-2.0
"""Rows of a report: the fields are those that pd_connector's benchmarks write."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

Param = str | int | float


@dataclass(frozen=True)
class Row:
    """One figure of a comparison.

    Attributes:
        params: with `name` they say which figure it is.
        ratio: ours / baseline.
        bar: what the ratio is held to: the least for a throughput, the most for a time; None where
            nothing is asked.
        ok: False only where a bar was missed.
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
) -> Row:
    """GB/s of bytes read and written, beside those of a plain copy."""
    ratio = ours / baseline
    return Row(name, params, ours, baseline, "GB/s", ratio, bar, bar is None or ratio >= bar)


def duration(
    name: str, params: Mapping[str, Param], ours_s: float, baseline_s: float, bar: float | None
) -> Row:
    """Microseconds, beside those of another way."""
    ratio = ours_s / baseline_s
    passed = bar is None or ratio <= bar
    return Row(name, params, ours_s * 1e6, baseline_s * 1e6, "us", ratio, bar, passed)


def write_json(path: Path, rows: Sequence[Row]) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def print_rows(rows: Sequence[Row]) -> None:
    """A plain table; missed bars are marked."""
    columns = list(dict.fromkeys(key for row in rows for key in row.params))
    header = ["", *columns, "ours", "baseline", "unit", "ratio", "bar", ""]
    lines = [
        [
            row.name,
            *(str(row.params.get(column, "")) for column in columns),
            f"{row.ours:,.1f}",
            f"{row.baseline:,.1f}",
            row.unit,
            f"{row.ratio:.3f}",
            "" if row.bar is None else f"{row.bar:.2f}",
            "" if row.ok else "MISSED",
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    for line in (header, *lines):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
