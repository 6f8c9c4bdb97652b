# SPDX-License-Identifier: Apache-2.0
"""The outcomes of the faults of one kind over one transport."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """One cell of the table.

    Attributes:
        injected: number of injected faults.
        ok: transfers that arrived, every byte of them right.
        recomputed: transfers that failed, by cause. An engine computes these prompts itself.
        wrong: transfers that were reported as arrived with a wrong byte, or whose pages were written after they were
            taken back.
        lost: loads without any outcome within their deadline, and agents that never served again.
        held: slots, pages and transfers that were not free at the end.
        slowest_s: longest time from the end of a fault to the next transfer that arrived.
        growth: of descriptors, threads and memory (KiB) over the cell, the largest of its processes.
        paths: chunks by the way that they took (`TamperingTransport`).
        note: the reason why the cell ended early or was not run.
    """

    fault: str
    transport: str
    injected: int = 0
    ok: int = 0
    recomputed: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    lost: int = 0
    held: int = 0
    slowest_s: float = 0.0
    growth: tuple[int, int, int] = (0, 0, 0)
    paths: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    note: str = ""

    def count(self, cause: str, right: bool) -> None:
        """Count a load that has ended."""
        if cause:
            self.recomputed[cause] += 1
        elif right:
            self.ok += 1
        else:
            self.wrong += 1

    @property
    def good(self) -> bool:
        """Whether all promises were kept."""
        return not (self.wrong or self.lost or self.held)


def merged(parts: Sequence[Ledger]) -> Ledger:
    """Sum up the cells of pairs that ran at the same time. Time and growth are the maximum."""
    first = parts[0]
    return Ledger(
        first.fault,
        first.transport,
        injected=sum(one.injected for one in parts),
        ok=sum(one.ok for one in parts),
        recomputed=sum((one.recomputed for one in parts), Counter()),
        wrong=sum(one.wrong for one in parts),
        lost=sum(one.lost for one in parts),
        held=sum(one.held for one in parts),
        slowest_s=max(one.slowest_s for one in parts),
        growth=tuple(max(column) for column in zip(*(one.growth for one in parts), strict=True)),
        paths=sum((one.paths for one in parts), Counter()),
        seconds=max(one.seconds for one in parts),
        note="; ".join(dict.fromkeys(one.note for one in parts if one.note)),
    )
