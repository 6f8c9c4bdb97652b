# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for Hopper (sm_90a), or another GPU, as they are launched, and disassembled. Needs no GPU."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pd_kernels.attention.launch import known_constants

TARGET = GPUTarget("cuda", 90, 32)

Result = TypeVar("Result")


def compiled(call: Callable[[], Result], target: GPUTarget = TARGET) -> tuple[Any, Result]:
    """Compile the first kernel that `call` launches, as if it came first in its process.

    Nothing is launched, so that CPU tensors can be the arguments. Triton itself specialises them.

    Args:
        call: launches the kernel.
        target: the GPU for which it is compiled.

    Returns:
        kernel: Triton's compiled kernel.
        result: what `call` returns.
    """
    kernels: list[Any] = []
    run = JITFunction.run

    def warm(self: JITFunction, *args: Any, **kwargs: Any) -> None:
        if not kernels:
            kernels.append(run(self, *args, **(kwargs | {"warmup": True})))

    known_constants.clear()  # a caller can have changed configs
    JITFunction.run = warm
    try:
        with _target_only(target):
            result = call()
    finally:
        JITFunction.run = run
    return kernels[0], result


@contextmanager
def _target_only(target: GPUTarget) -> Iterator[None]:
    """Triton sees a driver that only names its target."""
    before = driver._active
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
            get_current_target=lambda: target,
        )
    )
    try:
        yield
    finally:
        driver.set_active(before)


@dataclass(frozen=True)
class Assembly:
    """What the assembler made of a kernel.

    Attributes:
        threads: threads of a program.
        registers: registers of a thread.
        stack: bytes of local memory of a thread; 0 if nothing was spilled.
        shared: bytes of shared memory of a program.
        sass: the disassembly.
    """

    threads: int
    registers: int
    stack: int
    shared: int
    sass: str

    @classmethod
    def of(cls, kernel: Any) -> "Assembly":
        """Disassemble a kernel of `compiled`."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernel.cubin")
            path.write_bytes(kernel.asm["cubin"])
            usage, sass = (
                subprocess.run(
                    [knobs.nvidia.cuobjdump.path, flag, path],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
                for flag in ("--dump-resource-usage", "-sass")
            )
        registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
        threads = int(re.findall(r"\.reqntid (\d+)", kernel.asm["ptx"])[0])
        return cls(threads, registers, stack, kernel.metadata.shared, sass)

    @property
    def programs(self) -> int:
        """Programs that a multiprocessor can hold. Registers are allocated by eights, and each
        program takes 1 KiB of shared memory more."""
        registers = -(-self.registers // 8) * 8 * self.threads
        return min(65_536 // registers, 228 * 1024 // (self.shared + 1024), 2_048 // self.threads)
