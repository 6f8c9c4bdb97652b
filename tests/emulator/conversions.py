# SPDX-License-Identifier: Apache-2.0
"""Conversions, and exchange between the threads of a warp."""

from collections.abc import Callable
from typing import Any

import numpy as np
from arithmetic import F32, Function, operation
from gangs import Lanes
from memory import Array, FaultError
from numbers_of_gpu import bfloat16_of, float_of_bfloat16, halves_of_e4m3, saturated_e4m3, two
from operands import DTYPES, Operands, UnknownError

ROUNDINGS = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


@operation("cvt")
def _convert(o: Operands) -> Function:
    write = o.write()
    target, source = o.modifiers[-2:]
    dtype, own = o.known(DTYPES, target), o.known(DTYPES, source)
    first = o.read(1, own)
    pairs: dict[tuple[str, str], Callable[[Any], Array]] = {
        ("bf16x2", "f32"): bfloat16_of,
        ("f16x2", "f32"): lambda x: x.astype("f2").view("u2"),
        ("e4m3x2", "f32"): saturated_e4m3,
    }
    if code := pairs.get((target, source)):
        second = o.read(2, own)
        return lambda lanes: write(lanes, two(code(first(lanes)), code(second(lanes)), dtype))
    if (target, source) == ("f16x2", "e4m3x2"):
        return lambda lanes: write(lanes, halves_of_e4m3(first(lanes)))
    if target == "bf16":
        if source not in ("f32", "f16", "s16", "s8", "u8", "s32"):
            raise UnknownError(f"not known: {o.instruction}")
        return lambda lanes: write(lanes, bfloat16_of(np.asarray(first(lanes)).astype(F32)))
    if source == "bf16":
        if target != "f32":
            raise UnknownError(f"not known: {o.instruction}")
        return lambda lanes: write(lanes, float_of_bfloat16(first(lanes)))
    if "sat" in o.modifiers or {target, source} & {"bf16x2", "f16x2", "e4m3x2"}:
        raise UnknownError(f"not known: {o.instruction}")
    if own.kind == "f" and dtype.kind in "iu":
        rounded, limits = o.known(ROUNDINGS, o.modifiers[0]), np.iinfo(dtype)

        def to_integer(lanes: Lanes) -> None:
            value = rounded(np.asarray(first(lanes)).astype("f8"))
            largest = np.nextafter(2.0**63, 0) if limits.bits == 64 else limits.max
            value = np.clip(np.nan_to_num(value, nan=0, posinf=largest), limits.min, largest)
            write(lanes, value.astype(dtype))

        return to_integer
    return lambda lanes: write(lanes, np.asarray(first(lanes)).astype(dtype))


@operation("shfl")
def _shuffle(o: Operands) -> Function:
    write, value, mode = o.writes()[0], o.read(1, np.uint32), o.modifiers[1]
    if "|" in o.instruction.operands[0] or mode not in ("bfly", "idx", "up", "down"):
        raise UnknownError(f"not known: {o.instruction}")
    by, control = o.read(2, np.int64), o.read(3, np.int64)

    def shuffle(lanes: Lanes) -> None:
        lane = lanes.launch.thread[lanes.first : lanes.last] % 32
        clamp, segment = control(lanes) & 31, control(lanes) >> 8 & 31
        least, most = lane & segment, lane & segment | clamp & ~segment
        if mode == "up":
            source = lane - by(lanes)
            inside = source >= least
        else:
            step = by(lanes)
            source = {"bfly": lane ^ step, "down": lane + step, "idx": least | step & ~segment}[
                mode
            ]
            inside = source <= most
        own = np.arange(lanes.count)
        place = own + np.where(inside, source - lane, 0)
        taking = np.ones(lanes.count, bool) if lanes.mask is None else lanes.mask
        place = np.where(taking, place, own)
        here = np.clip(place, 0, lanes.count - 1)
        if (here != place).any() or not taking[here[taking]].all():
            raise FaultError(f"a thread asks another that does not take part: {o.instruction}")
        write(lanes, value(lanes)[place])

    return shuffle


@operation("redux")
def _reduce(o: Operands) -> Function:
    write, value = o.write(), o.read(1)
    reduce = o.known({"max": np.max, "min": np.min, "add": np.sum}, o.modifiers[1])
    dtype = o.dtype

    def run(lanes: Lanes) -> None:
        if (
            lanes.mask is not None
            and lanes.mask.reshape(-1, 32).any(1).sum() * 32 != lanes.mask.sum()
        ):
            raise FaultError(f"threads of a warp are missing: {o.instruction}")
        rows = np.broadcast_to(value(lanes), (lanes.count,)).reshape(-1, 32)
        write(lanes, np.repeat(reduce(rows, axis=1).astype(dtype), 32))

    return run


@operation("elect")
def _elect(o: Operands) -> Function:
    target = o.writer(o.instruction.operands[0].split("|")[1])

    def elect(lanes: Lanes) -> None:
        warps = lanes.launch.warp[lanes.first : lanes.last]
        found = np.zeros(lanes.count, bool)
        places = np.arange(lanes.count) if lanes.mask is None else np.flatnonzero(lanes.mask)
        found[places[np.unique(warps[places], return_index=True)[1]]] = True
        target(lanes, found)

    return elect


@operation("createpolicy")
def _policy(o: Operands) -> Function:
    """How long a cache should keep something; what it holds is the same."""
    write = o.write()
    return lambda lanes: write(lanes, np.uint64(0))


@operation("setmaxnreg", "griddepcontrol", "nothing")
def _nothing(o: Operands) -> Function:
    """Has no effect on results."""
    return lambda lanes: None
