# SPDX-License-Identifier: Apache-2.0
"""A step, and which steps run at the same time."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from gpu_run.places import ROOT

KERNELS = ("torch", "triton")
"""Modules that the decode kernels need."""

JSON = "{json}"
"""Placeholder in a command for the file to which the step writes its figures."""

CALL_S = 9.3 * 60
"""Seconds of a call. Hosts that are lent may end a command after ten minutes."""

KERNEL_SOURCES = ("kernels/pd_kernels", "ci/bench/pd_bench/kernels")


@dataclass(frozen=True)
class Step:
    """One program.

    Args:
        name: its name for `--only`.
        why: its purpose, in a line.
        command: program and arguments, run at the repository's root.
        limit_s: seconds after which the step is ended.
        imports: modules that the step needs to begin.
        rehearsal: the command for a machine without a GPU. By default the command itself, which
            then has to end with the line that there is no GPU. A command of the tests' emulator
            would go here.
        program: a program on PATH that the step needs to begin.
        files: files of this tree that the step needs to begin.
        sources: folders whose change makes a failed step worth another try.
        beside: steps in a row with the same word here run side by side.
    """

    name: str
    why: str
    command: Sequence[str]
    limit_s: float
    imports: Sequence[str] = KERNELS
    rehearsal: Sequence[str] = ()
    program: str = ""
    files: Sequence[str] = ()
    sources: Sequence[str] = KERNEL_SOURCES
    beside: str = ""

    def digest(self) -> str:
        """A digest of the command and of its sources."""
        found = hashlib.sha256("\0".join(self.command).encode())
        for file in sorted(chain(*((ROOT / folder).rglob("*.py") for folder in self.sources))):
            found.update(file.read_bytes())
        return found.hexdigest()[:16]


def side_by_side(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Groups of steps that run at the same time, in their order."""
    group: list[Step] = []
    for step in steps:
        if group and not (step.beside and step.beside == group[-1].beside):
            yield group
            group = []
        group.append(step)
    if group:
        yield group
