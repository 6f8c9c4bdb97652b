# SPDX-License-Identifier: Apache-2.0
"""The table of `bench chaos`: for people, for a document, and as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from pd_connector.tools.bench.chaos.faults import RECOVERY_S
from pd_connector.tools.bench.chaos.ledger import Ledger

COLUMNS = (
    "fault",
    "transport",
    "injected",
    "arrived",
    "recomputed, by cause",
    "wrong",
    "lost",
    "held",
    f"recovery (of {RECOVERY_S:g} s)",
    "files",
    "threads",
    "MiB",
)


def table(ledgers: Sequence[Ledger]) -> Table:
    """A row for each fault and transport."""
    drawn = Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
        caption="recovery: slowest; files, threads, MiB: growth of one process",
        caption_justify="left",
    )
    for column in COLUMNS:
        drawn.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for ledger in ledgers:
        drawn.add_row(*cells(ledger), style="" if ledger.good else "red")
    return drawn


def markdown(ledgers: Sequence[Ledger]) -> str:
    """The same for a document."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(cells(ledger))} |" for ledger in ledgers]
    return "\n".join(lines) + "\n"


def cells(ledger: Ledger) -> list[str]:
    """One row, in the order of `COLUMNS`."""
    causes = ", ".join(f"{cause} {count:,}" for cause, count in ledger.recomputed.most_common())
    files, threads, kib = ledger.growth
    return [
        ledger.fault,
        ledger.transport,
        f"{ledger.injected:,}",
        f"{ledger.ok:,}",
        causes or "none",
        *(f"{count:,}" for count in (ledger.wrong, ledger.lost, ledger.held)),
        f"{ledger.slowest_s:.2f} s",
        f"{files:+}",
        f"{threads:+}",
        f"{kib / 1024:+.0f}",
    ]


def write_json(path: Path, ledgers: Sequence[Ledger]) -> None:
    """Write all ledgers as a JSON array."""
    path.write_text(json.dumps([vars(ledger) for ledger in ledgers], indent=1) + "\n")
