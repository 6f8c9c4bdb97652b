# SPDX-License-Identifier: Apache-2.0
"""The tables: as text, for a document, and as JSON."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from chaos.faults import RECOVERY_S
from chaos.ledger import Ledger

COLUMNS = (
    "fault",
    "transport",
    "injected",
    "chunks by path",
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
    """The same table for a document."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(cells(ledger))} |" for ledger in ledgers]
    return "\n".join(lines) + "\n"


def cells(ledger: Ledger) -> list[str]:
    """One row, in the order of `COLUMNS`."""
    causes = ", ".join(f"{cause} {count:,}" for cause, count in ledger.recomputed.most_common())
    paths = ", ".join(f"{path} {count:,}" for path, count in ledger.paths.most_common())
    files, threads, kib = ledger.growth
    return [
        ledger.fault,
        ledger.transport,
        f"{ledger.injected:,}",
        paths or "none",
        f"{ledger.ok:,}",
        causes or "none",
        *(f"{count:,}" for count in (ledger.wrong, ledger.lost, ledger.held)),
        f"{ledger.slowest_s:.2f} s",
        f"{files:+}",
        f"{threads:+}",
        f"{kib / 1024:+.0f}",
    ]


def coverage(ledgers: Sequence[Ledger]) -> str:
    """Faults by kind and transport, for a document. The last row has the paths of each transport's chunks."""
    faults = list(dict.fromkeys(ledger.fault for ledger in ledgers))
    names = list(dict.fromkeys(ledger.transport for ledger in ledgers))
    counts: Counter[tuple[str, str]] = Counter()
    paths: dict[str, Counter[str]] = {name: Counter() for name in names}
    for ledger in ledgers:
        counts[ledger.fault, ledger.transport] += ledger.injected
        paths[ledger.transport] += ledger.paths
    lines = [f"| fault | {' | '.join(names)} |", f"|{'---|' * (len(names) + 1)}"]
    lines += [f"| chunks | {' | '.join(_parts(paths[name]) for name in names)} |"]
    for fault in faults:
        cells = [f"{counts[fault, name]:,}" if counts[fault, name] else "" for name in names]
        lines.append(f"| {fault} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _parts(paths: Mapping[str, int]) -> str:
    """`sealed 95 %, written 5 %; opened 93 %, landed 7 %`: how chunks left, and how they arrived."""
    told = []
    for ways in (("sealed", "written"), ("opened", "landed", "pulled")):
        total = sum(paths[way] for way in ways)
        shown = [f"{way} {paths[way] / total:.0%}" for way in ways if paths[way]]
        told.append(", ".join(shown))
    return "; ".join(filter(None, told))


def write_json(path: Path, ledgers: Sequence[Ledger]) -> None:
    """Write all ledgers as a JSON array."""
    path.write_text(json.dumps([vars(ledger) for ledger in ledgers], indent=1) + "\n")
