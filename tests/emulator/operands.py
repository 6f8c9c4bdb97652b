# SPDX-License-Identifier: Apache-2.0
"""Operands of an instruction, as functions that read and write the registers of active threads."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from gangs import JUNK, PARAMETERS, Lanes
from memory import Array, FaultError
from ptx import Instruction, Program, split_operands

Reader = Callable[[Lanes], Any]
Writer = Callable[[Lanes, Any], None]

DTYPES: dict[str, Any] = {
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    "f16": np.dtype("f2"),
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "bf16": np.dtype("u2"),
    "bf16x2": np.dtype("u4"),
    "f16x2": np.dtype("u4"),
    "e4m3x2": np.dtype("u2"),
    "pred": np.dtype(bool),
    "u16x2": np.dtype("u4"),
    "s16x2": np.dtype("u4"),
}
UNSIGNED = {1: bool, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def junk_of(width: int, count: int) -> Array:
    """What a register holds in threads that have not written it."""
    return np.full(count * max(1, width // 8), JUNK, np.uint8).view(UNSIGNED[width])


class UnknownError(FaultError):
    """An instruction that the emulator does not know."""


class Operands:
    """The operands of one instruction."""

    def __init__(self, instruction: Instruction, program: Program) -> None:
        self.instruction, self.program = instruction, program
        self.modifiers = instruction.modifiers

    def __len__(self) -> int:
        return len(self.instruction.operands)

    @property
    def type(self) -> str:
        return self.modifiers[-1]

    @property
    def dtype(self) -> Any:
        return self.known(DTYPES, self.type)

    def known(self, table: dict[str, Any], name: str) -> Any:
        if name not in table:
            raise UnknownError(f"{name!r} is not known: {self.instruction}")
        return table[name]

    def texts(self, place: int) -> list[str]:
        """The parts of an operand, one if it is not a list."""
        text = self.instruction.operands[place]
        return split_operands(text[1:-1]) if text.startswith("{") else [text]

    def read(self, place: int, dtype: Any = None) -> Reader:
        return self.reader(self.instruction.operands[place], dtype or self.dtype)

    def reads(self, place: int, dtype: Any) -> list[Reader]:
        return [self.reader(text, dtype) for text in self.texts(place)]

    def write(self, place: int = 0) -> Writer:
        return self.writer(self.instruction.operands[place])

    def writes(self, place: int = 0) -> list[Writer]:
        return [self.writer(text) for text in self.texts(place)]

    def reader(self, text: str, dtype: Any) -> Reader:
        """Reads an operand as `dtype`: the active threads' slice of a register, or one number."""
        dtype = np.dtype(dtype)
        if text in self.program.registers:
            return self._register(text, dtype)
        if text.startswith("!") and dtype.kind == "b":
            inner = self.reader(text[1:], dtype)
            return lambda lanes: ~inner(lanes)
        if text.startswith("%"):
            return lambda lanes: lanes.launch.special[text][lanes.first : lanes.last].astype(dtype)
        return self._constant(text, dtype)

    def _constant(self, text: str, dtype: Any) -> Reader:
        if text in self.program.shared:
            number: Any = 0
        elif text in self.program.parameters:
            number = PARAMETERS + 256 * list(self.program.parameters).index(text)
        elif match := re.fullmatch(r"0([fFdD])([0-9a-fA-F]+)", text):
            number = np.array(int(match[2], 16), "u4" if match[1] in "fF" else "u8").view(dtype)[()]
            return lambda _: number
        else:
            try:
                number = int(text.rstrip("U"), 0)
            except ValueError:
                raise UnknownError(f"{text!r} is not known: {self.instruction}") from None
        if dtype.kind == "b":
            value = np.bool_(number)
        else:
            bits = 8 * dtype.itemsize
            value = np.array(number & (1 << bits) - 1, UNSIGNED[bits]).view(dtype)[()]
        return lambda _: value

    def _register(self, text: str, dtype: Any) -> Reader:
        place, width = self.program.registers[text]
        # Half of a pair, or bytes of a word, may be undefined, and dropped later.
        moves = self.instruction.name in ("mov", "prmt")
        wanted = 1 if dtype.kind == "b" else 8 * dtype.itemsize
        instruction = self.instruction

        def read(lanes: Lanes) -> Array:
            register = lanes.registers[place]
            if register is None and moves:
                return junk_of(width, lanes.count)
            if register is None:
                raise FaultError(
                    f"uninitialised: {text} is read before it is written: {instruction}"
                )
            return register[lanes.first : lanes.last]

        if width == wanted:
            return read if width == 1 else lambda lanes: read(lanes).view(dtype)
        if width > wanted:
            narrow = UNSIGNED[wanted]
            return lambda lanes: read(lanes).astype(narrow).view(dtype)
        if dtype.kind == "i":
            signed = np.dtype(f"i{width // 8}")
            return lambda lanes: read(lanes).view(signed).astype(dtype)
        return lambda lanes: read(lanes).astype(dtype)

    def writer(self, text: str) -> Writer:
        if text == "_":
            return lambda lanes, value: None
        if text not in self.program.registers:
            raise UnknownError(f"no register {text!r}: {self.instruction}")
        place, width = self.program.registers[text]
        dtype = np.dtype(UNSIGNED[width])

        def write(lanes: Lanes, value: Any) -> None:
            register = lanes.registers[place]
            value = np.asarray(value)
            fresh = value.base is None
            if value.dtype != dtype:
                if value.dtype.itemsize < dtype.itemsize and value.dtype.kind == "i":
                    value = value.astype(f"i{dtype.itemsize}")
                value = (
                    value.view(dtype)
                    if value.dtype.itemsize == dtype.itemsize
                    else value.astype(dtype)
                )
            if fresh and lanes.mask is None and value.shape == (lanes.launch.total,):
                lanes.registers[place] = value  # of all threads, and nothing else has this array
                return
            if register is None:
                register = lanes.registers[place] = junk_of(width, lanes.launch.total)
            if lanes.mask is None:
                register[lanes.first : lanes.last] = value
            else:
                np.copyto(register[lanes.first : lanes.last], value, where=lanes.mask)

        return write

    def address(self, place: int) -> Reader:
        """The address of `[register + offset]`, as int64."""
        match = re.fullmatch(
            r"\[\s*(.+?)\s*(?:\+\s*(-?\d+))?\s*\]", self.instruction.operands[place]
        )
        if match is None:
            raise UnknownError(f"address is not known: {self.instruction}")
        wide = self.program.registers.get(match[1], (0, 64))[1] == 64
        base, offset = self.reader(match[1], np.uint64 if wide else np.uint32), int(match[2] or 0)
        return lambda lanes: np.asarray(base(lanes)).astype(np.int64) + offset
