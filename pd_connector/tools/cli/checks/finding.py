# SPDX-License-Identifier: Apache-2.0
"""One row of a report of `doctor` or `check`, and the report."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.markup import escape
from rich.table import Table


class Status(StrEnum):
    """Severity. `warn` works but may not be what was meant; `fail` does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """The result of one check, with advice."""

    area: str
    """Heading above the row: software, additions, transports, network, limits, or a peer's URL."""
    name: str
    status: Status
    found: str
    advice: str = ""
    """Advice; empty if there is nothing to do."""


STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def show(findings: Iterable[Finding], console: Console) -> None:
    """Print a table per area, then one line of summary."""
    findings = list(findings)
    for area in dict.fromkeys(finding.area for finding in findings):
        console.print(escape(area), style="bold", highlight=False)
        table = Table(box=None, expand=True, show_header=False, padding=(0, 2, 0, 0))
        table.add_column("status", width=4)
        table.add_column("name", width=17, overflow="fold")
        table.add_column("found, and what to do", ratio=1, overflow="fold")
        for finding in findings:
            if finding.area == area:
                style = STYLES[finding.status]
                said = escape(finding.found)
                if finding.advice:
                    said += f"\n[dim]→[/] {escape(finding.advice)}"
                table.add_row(f"[{style}]{finding.status}[/]", escape(finding.name), said)
        console.print(table)
        console.print()
    count = {status: sum(f.status is status for f in findings) for status in Status}
    console.print(", ".join(f"{number} {status}" for status, number in count.items()))
