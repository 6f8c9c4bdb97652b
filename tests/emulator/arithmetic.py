# SPDX-License-Identifier: Apache-2.0
"""Instructions that compute: integers, floats, conversions, and exchange between the threads of a warp."""

from collections.abc import Callable
from typing import Any

import numpy as np
from gangs import Lanes
from numbers_of_gpu import (
    bfloat16_of,
    float_of_bfloat16,
    flushed,
    joined,
)
from operands import UNSIGNED, Operands, UnknownError

Function = Callable[[Lanes], None]
Factory = Callable[[Operands], Function]
OPERATIONS: dict[str, Factory] = {}
F32 = np.dtype("f4")


def operation(*names: str) -> Callable[[Factory], Factory]:
    """Registers what makes the function of an opcode."""

    def register(factory: Factory) -> Factory:
        OPERATIONS.update(dict.fromkeys(names, factory))
        return factory

    return register


def _elementwise(o: Operands, function: Callable[..., Any], count: int) -> Function:
    """A function of `count` operands of the instruction's type, packed ones in two halves."""
    write = o.write()
    if o.type in ("s16x2", "u16x2", "bf16x2"):
        reads = [o.read(1 + n, np.uint32) for n in range(count)]
        lane = np.dtype("i2") if o.type == "s16x2" else np.dtype("u2")
        inner = _in_bfloat16(function) if o.type == "bf16x2" else function
        return lambda lanes: write(lanes, joined(inner, lane, [read(lanes) for read in reads]))
    reads = [o.read(1 + n) for n in range(count)]
    if o.type == "bf16":
        inner = _in_bfloat16(function)
        return lambda lanes: write(lanes, inner(*(read(lanes) for read in reads)))
    if "ftz" in o.modifiers:
        return lambda lanes: write(lanes, flushed(function(*(flushed(r(lanes)) for r in reads))))
    return lambda lanes: write(lanes, function(*(read(lanes) for read in reads)))


def _in_bfloat16(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: bfloat16_of(function(*map(float_of_bfloat16, values)))


def _simple(name: str, function: Callable[..., Any], count: int = 2) -> None:
    operation(name)(lambda o: _elementwise(o, function, count))


def _divide(a: Any, b: Any) -> Any:
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, 1, b)
    whole = a // safe
    if a.dtype.kind == "u":
        return whole
    return whole + ((whole * safe != a) & ((a < 0) != (safe < 0)))


_simple("add", lambda a, b: a + b)
_simple("sub", lambda a, b: a - b)
_simple("and", lambda a, b: a & b)
_simple("or", lambda a, b: a | b)
_simple("xor", lambda a, b: a ^ b)
_simple("not", lambda a: ~a, 1)
_simple("neg", lambda a: -a, 1)
_simple("rem", lambda a, b: np.fmod(a, np.where(b == 0, 1, b)))
_simple("div", _divide)
_simple("ex2", np.exp2, 1)
_simple("lg2", np.log2, 1)
_simple("sqrt", np.sqrt, 1)
_simple("rcp", lambda a: F32.type(1) / a, 1)


@operation("abs")
def _abs(o: Operands) -> Function:
    if o.type == "bf16x2":
        write, read = o.write(), o.read(1)
        return lambda lanes: write(lanes, read(lanes) & np.uint32(0x7FFF7FFF))
    return _elementwise(o, np.abs, 1)


@operation("max", "min")
def _extreme(o: Operands) -> Function:
    largest = o.instruction.name == "max"
    function: Callable[..., Any] = np.maximum if largest else np.minimum
    if o.dtype.kind == "f" and "NaN" not in o.modifiers:
        function = np.fmax if largest else np.fmin
    if "relu" in o.modifiers:
        return _elementwise(o, lambda a, b: np.maximum(function(a, b), a.dtype.type(0)), 2)
    if len(o) == 4:
        return _elementwise(o, lambda a, b, c: function(function(a, b), c), 3)
    return _elementwise(o, function, 2)


def _wide(dtype: Any) -> Any:
    return np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")


@operation("mul", "mad")
def _multiply(o: Operands) -> Function:
    write, dtype = o.write(), o.dtype
    added = o.instruction.name == "mad"
    if "wide" not in o.modifiers and "hi" not in o.modifiers:
        if added:
            return _elementwise(o, lambda a, b, c: a * b + c, 3)
        return _elementwise(o, lambda a, b: a * b, 2)
    wide = _wide(dtype)
    first, second = o.read(1), o.read(2)
    third = o.read(3, wide) if added else None
    shift = wide.type(8 * dtype.itemsize)

    def multiply(lanes: Lanes) -> None:
        product = np.asarray(first(lanes)).astype(wide) * np.asarray(second(lanes)).astype(wide)
        if "hi" in o.modifiers:
            product = (product >> shift).astype(dtype)
        write(lanes, product if third is None else product + third(lanes))

    if added and "hi" in o.modifiers:
        raise UnknownError(f"not known: {o.instruction}")
    return multiply


@operation("fma")
def _fma(o: Operands) -> Function:
    if o.type != "f32":
        raise UnknownError(f"type is not known: {o.instruction}")

    def fma(a: Any, b: Any, c: Any) -> Any:
        """Products of two floats are exact in float64."""
        wide = np.asarray(a).astype("f8") * np.asarray(b).astype("f8") + np.asarray(c).astype("f8")
        return wide.astype(F32)

    return _elementwise(o, fma, 3)


@operation("shl", "shr")
def _shift(o: Operands) -> Function:
    write, value, places = o.write(), o.read(1), o.read(2, np.uint32)
    bits, dtype, left = 8 * o.dtype.itemsize, o.dtype, o.instruction.name == "shl"

    def shift(lanes: Lanes) -> None:
        number, by = value(lanes), places(lanes)
        least = np.minimum(by, bits - 1).astype(dtype)
        moved = number << least if left else number >> least
        cleared = left or dtype.kind == "u"
        write(lanes, np.where(by >= bits, dtype.type(0), moved) if cleared else moved)

    return shift


@operation("bfe")
def _extract(o: Operands) -> Function:
    write, value, dtype = o.write(), o.read(1, UNSIGNED[8 * o.dtype.itemsize]), o.dtype
    place, length = o.read(2, np.uint32), o.read(3, np.uint32)
    bits = 8 * dtype.itemsize

    def extract(lanes: Lanes) -> None:
        start, count = (np.asarray(r(lanes)).astype(np.int64) & 0xFF for r in (place, length))
        count = np.minimum(count, bits - np.minimum(start, bits))
        up = np.minimum(bits - start - count, bits - 1).astype(dtype)
        down = np.minimum(bits - count, bits - 1).astype(dtype)
        moved = (np.asarray(value(lanes)).view(dtype) << up) >> down
        write(lanes, np.where(count == 0, dtype.type(0), moved))

    return extract


@operation("prmt")
def _permute(o: Operands) -> Function:
    if o.type != "b32" or len(o.modifiers) > 1:
        raise UnknownError(f"mode is not known: {o.instruction}")
    write, low, high, select = o.write(), o.read(1), o.read(2), o.read(3)

    def permute(lanes: Lanes) -> None:
        both = np.asarray(high(lanes)).astype(np.uint64) << np.uint64(32) | low(lanes)
        chosen = np.asarray(select(lanes)).astype(np.uint64)
        found = np.uint64(0)
        for byte in range(4):
            told = chosen >> np.uint64(4 * byte) & np.uint64(15)
            value = both >> (told & np.uint64(7)) * np.uint64(8) & np.uint64(255)
            sign = np.where(value >> np.uint64(7), np.uint64(255), np.uint64(0))
            found = found | np.where(told & np.uint64(8), sign, value) << np.uint64(8 * byte)
        write(lanes, np.asarray(found).astype(np.uint32))

    return permute


@operation("selp")
def _select(o: Operands) -> Function:
    write, first, second, which = o.write(), o.read(1), o.read(2), o.read(3, bool)
    return lambda lanes: write(lanes, np.where(which(lanes), first(lanes), second(lanes)))


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


@operation("setp")
def _compare(o: Operands) -> Function:
    name, write, first, second = o.modifiers[0], o.write(), o.read(1), o.read(2)
    unordered = name in ("equ", "neu", "ltu", "leu", "gtu", "geu")
    compare = o.known(COMPARISONS, name[:2] if unordered else name)
    third = o.read(3, bool) if len(o) > 3 else None
    both = np.logical_and if "and" in o.modifiers else np.logical_or
    if third is not None and not {"and", "or"} & set(o.modifiers):
        raise UnknownError(f"not known: {o.instruction}")
    float_ne = name == "ne" and o.dtype.kind == "f"

    def run(lanes: Lanes) -> None:
        a, b = first(lanes), second(lanes)
        found = compare(a, b)
        if unordered or float_ne:
            neither = np.isnan(a) | np.isnan(b)
            found = found | neither if unordered else found & ~neither
        write(lanes, found if third is None else both(found, third(lanes)))

    return run


@operation("mov")
def _move(o: Operands) -> Function:
    targets, sources = o.writes(0), o.texts(1)
    if len(targets) == len(sources) == 1:
        write, read = targets[0], o.read(1)
        return lambda lanes: write(lanes, read(lanes))
    whole = o.dtype
    part = np.dtype(f"u{whole.itemsize // max(len(targets), len(sources))}")
    shifts = [whole.type(8 * part.itemsize * n) for n in range(whole.itemsize // part.itemsize)]
    if len(sources) == 1:
        read = o.read(1)

        def unpack(lanes: Lanes) -> None:
            value = read(lanes)
            for target, shift in zip(targets, shifts, strict=True):
                target(lanes, np.asarray(value >> shift).astype(part))

        return unpack
    reads = o.reads(1, part)

    def pack(lanes: Lanes) -> None:
        value = whole.type(0)
        for read, shift in zip(reads, shifts, strict=True):
            value = value | np.asarray(read(lanes)).astype(whole) << shift
        targets[0](lanes, value)

    return pack


@operation("cvta")
def _to_space(o: Operands) -> Function:
    write, read = o.write(), o.read(1, np.uint64)
    return lambda lanes: write(lanes, read(lanes))
