# SPDX-License-Identifier: Apache-2.0
"""How fast each kernel can be at most, from its compiled code: a roofline without a GPU.

For each kernel: the cycles that its busiest pipe needs for a tile, beside the cycles in which the
memory moves that tile. It leaves out latencies, waits between warps and the L2, so that a GPU can
only be slower.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from triton import knobs

from pd_bench.kernels.compiled import Assembly, compiled
from pd_bench.kernels.roof_cases import DECODES, TRANSFERS, RoofCase
from pd_bench.kernels.sass import Cost, full_path, instructions, product_loops

COPY_BYTES_PER_S = {"H100": 3.0e12, "H200": 4.3e12}
"""Rates of a plain copy, bytes read and written: 90 % of the memory's own."""

MULTIPROCESSORS = 132
CYCLES_PER_S = 1.755e9

HEADER = (
    "kernel", "threads x programs", "registers", "shared KiB", "stack", "KiB a tile", "loads",
    "stores", "instructions", "cycles of the busiest pipe", "H100", "H200",
)  # fmt: skip
BEGIN = "<!-- made by `python -m pd_bench.kernels roof --docs docs/kernels.md` -->"
END = "<!-- end of the table -->"


@dataclass(frozen=True)
class Roof:
    """What the compiled code of a kernel says.

    Attributes:
        case: the kernel.
        assembly: what the assembler made of it.
        cost: of one full program or one turn of its loops.
    """

    case: RoofCase
    assembly: Assembly
    cost: Cost

    @classmethod
    def of(cls, case: RoofCase) -> "Roof":
        """Compile and count a kernel."""
        assembly = Assembly.of(compiled(case.launch)[0])
        code = instructions(assembly.sass)
        paths = product_loops(code) if case.loop else [full_path(code)]
        warps = case.warps or assembly.threads // 32
        costs = [Cost.of(path, warps) for path in paths]
        return cls(case, assembly, sum(costs[1:], costs[0]))

    @property
    def cycles(self) -> float:
        """Cycles of the busiest pipe of a multiprocessor."""
        return self.cost.cycles[self.cost.busiest]

    def share(self, gpu: str) -> float:
        """The rate as a part of a copy's, at most 1."""
        copy_s = self.case.nbytes / (COPY_BYTES_PER_S[gpu] / MULTIPROCESSORS)
        return min(1.0, copy_s * CYCLES_PER_S / self.cycles)

    @property
    def row(self) -> tuple[str, ...]:
        """The row of the table, see HEADER."""
        return (
            self.case.name,
            f"{self.assembly.threads} x {self.assembly.programs}",
            str(self.assembly.registers),
            f"{self.assembly.shared / 1024:.1f}",
            str(self.assembly.stack),
            f"{self.case.nbytes / 1024:.0f}",
            "TMA" if "UTMALDG" in self.assembly.sass else self._accesses("LDG", "LDGSTS"),
            self._accesses("STG"),
            str(self.cost.instructions),
            f"{self.cycles:.0f} {self.cost.busiest}",
            *(f"{self.share(gpu):.2f}" for gpu in COPY_BYTES_PER_S),
        )

    def _accesses(self, *kinds: str) -> str:
        counts = self.cost.counts
        widths = {
            width: sum(counts.get(f"{kind} {width}", 0) for kind in kinds)
            for width in (16, 8, 4, 2, 1)
        }
        return " ".join(f"{number}x{width}" for width, number in widths.items() if number) or "-"


def show_roofs(only: Sequence[str], page: Path | None) -> None:
    """Print the table of the kernels with one of the texts `only` in their name, all without; and
    write it to a page of the documentation."""
    if knobs.runtime.interpret:
        raise SystemExit("TRITON_INTERPRET is set: kernels are not compiled, unset it")
    cases = [
        case
        for case in (*TRANSFERS, *DECODES)
        if not only or any(text in case.name for text in only)
    ]
    text = table(Roof.of(case).row for case in cases)
    print(text)
    if page is not None:
        write_table(page, text)


def table(rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table of rows."""
    lines = [HEADER, ("---",) * len(HEADER), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_table(page: Path, text: str) -> None:
    """Replace the table of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page}: must have the lines {BEGIN!r} and {END!r}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
