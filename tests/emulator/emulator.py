# SPDX-License-Identifier: Apache-2.0
"""Executes what Triton launches, as it was compiled for sm_90a, and raises FaultError for what a GPU would not
forgive."""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import accesses  # noqa: F401 - these register their instructions
import asynchronous  # noqa: F401
import conversions  # noqa: F401
import matrices  # noqa: F401
import numpy as np
from arithmetic import OPERATIONS
from device_memory import MEMORY
from driver import Driver, Launched, live_memory
from extents import Extents, Reach, find_origins
from gangs import PARAMETERS, Code
from machine import Launch
from memory import Memory
from operands import Operands, UnknownError
from products import check_products
from ptx import Instruction, Program
from streams import STREAMS

from pd_kernels.tuning import tuning

CONTROL = ("bra", "brx", "ret", "exit", "bar", "barrier")


class Damage(NamedTuple):
    """Instructions of a kernel, by their places, and what stands there instead."""

    ptx: Path
    changes: dict[int, Instruction]

    @property
    def told(self) -> str:
        return f"{self.ptx.stem} {next(iter(self.changes.values()))}"

    def of(self, code: Code) -> Code:
        program = replace(code.program, code=[*code.program.code])
        functions, guards = [*code.functions], [*code.guards]
        for place, instruction in self.changes.items():
            changed = code_of(replace(program, code=[instruction]))
            program.code[place] = instruction
            functions[place], guards[place] = changed.functions[0], changed.guards[0]
        check_products(program)
        return Code(program, functions, guards)


def code_of(program: Program) -> Code:
    """Look all instructions up. Raises UnknownError for one that is not known, reached or not."""
    functions, guards = [], []
    for each in program.code:
        if each.name not in OPERATIONS and each.name not in CONTROL:
            raise UnknownError(f"{each.name!r} is not known: {each}")
        make = OPERATIONS.get(each.name)
        functions.append(None if make is None else make(Operands(each, program)))
        guards.append(program.registers[each.predicate][0] if each.predicate else -1)
    return Code(program, functions, guards)


@functools.cache
def code_at(path: Path) -> Code:
    program = Program.parse(path.read_text())
    check_products(program)
    find_origins(program)
    return code_of(program)


class Emulator:
    """A GPU for this process.

    Attributes:
        launched: the names of the kernels that have run, and their steps.
        settings: fields of `Tuning`, and their values when a kernel was launched, with its name.
        reached: for each kernel, 1 for each instruction that has been executed.
    """

    def __init__(self) -> None:
        self.seed = 0
        self.damage: Damage | None = None
        self.launched: list[tuple[str, int]] = []
        self.settings: set[tuple[str, bool, str]] = set()
        self.reached: dict[Path, bytearray] = {}
        self.driver = Driver(self._execute)

    def _execute(self, launched: Launched) -> None:
        code = code_at(launched.ptx)
        now = asdict(tuning()).items()
        self.settings |= {(setting, value, launched.ptx.stem) for setting, value in now}
        if self.damage is not None and self.damage.ptx == launched.ptx:
            code = self.damage.of(code)
        sizes = code.program.parameters.values()
        given = [ctypes.string_at(launched.parameters[n], size) for n, size in enumerate(sizes)]
        raw = b"".join(each.ljust(256, b"\0") for each in given)
        parameters = Memory(np.frombuffer(raw, np.uint8), PARAMETERS)
        bounds = MEMORY.bounds() if STREAMS.used else live_memory()
        told = (lambda: bounds) if not STREAMS.captured else MEMORY.bounds  # a replay's own
        addresses = [int.from_bytes(each[:8], "little") for each in given]
        extents = Extents(launched.arguments, addresses)
        launched = launched._replace(arguments=())  # queued work does not keep tensors
        work = functools.partial(self._run, launched, code, parameters, told, extents)
        if STREAMS.used:
            STREAMS.queue(work, STREAMS.of(launched.stream))
        else:
            work()

    def _run(
        self, launched: Launched, code: Code, parameters: Memory, bounds: Any, extents: Extents
    ) -> None:
        launch = Launch(
            *(code, parameters, launched.grid, launched.threads, launched.shared, bounds()),
            seed=self.seed,
        )
        launch.shadow.reach = Reach(extents, launch.shadow)
        reached = self.reached.setdefault(launched.ptx, bytearray(len(code.functions)))
        with np.errstate(all="ignore"):
            launch.run(reached)
        self.launched.append((launched.ptx.stem, launch.steps))

    @contextmanager
    def running(
        self, seed: int = 0, damage: Damage | None = None, ignored: str | None = None
    ) -> Iterator[None]:
        """Launches take their turns by `seed`, of programs that `damage` has changed; a launch's FaultError is raised.
        Waits at the site `ignored` do nothing (`streams.py`)."""
        self.seed, self.damage = seed, damage
        STREAMS.seed, STREAMS.ignored = seed, ignored
        try:
            yield
        except RuntimeError:
            self.driver.raise_fault()
            raise
        finally:
            self.seed, self.damage = 0, None
            STREAMS.seed, STREAMS.ignored = 0, None
        self.driver.raise_fault()
