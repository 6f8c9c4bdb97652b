# SPDX-License-Identifier: Apache-2.0
"""Products of matrices, and how their operands come from shared memory."""

import functools
import re
from typing import Any

import numpy as np
from accesses import shared_addresses
from arithmetic import Function, operation
from gangs import Lanes
from machine import Launch
from memory import Array, FaultError
from numbers_of_gpu import float_of_bfloat16
from operands import Operands, UnknownError

F32 = np.dtype("f4")
LANE = np.arange(32)
ROW, PAIR = LANE // 4, LANE % 4 * 2
"""A thread's row and first column in a fragment of 8 x 8."""


def floats(bits: Array, kind: str) -> Array:
    """Numbers of 16 bits as float32."""
    return float_of_bfloat16(bits) if kind == "bf16" else bits.view(np.float16).astype(F32)


def whole_warps(lanes: Lanes, where: object) -> Array:
    """The first place, in the slice of active threads, of each warp; every thread of it must be active."""
    if lanes.mask is None:
        return np.arange(0, lanes.count, 32)
    places = np.flatnonzero(lanes.mask)
    if len(places) % 32 or (places[::32] + 31 != places[31::32]).any():
        raise FaultError(f"threads of a warp are missing: {where}")
    return places[::32]


def of_warps(reader: Any, lanes: Lanes, firsts: Array) -> Array:
    """[warps, 32] of an operand."""
    wide = np.broadcast_to(reader(lanes), (lanes.count,))
    found: Array = wide[firsts[:, None] + LANE]
    return found


def to_lanes(lanes: Lanes, firsts: Array, values: Array) -> Array:
    """[warps, 32] as a slice of active threads."""
    wide = np.zeros(lanes.count, values.dtype)
    wide[firsts[:, None] + LANE] = values
    return wide


def fragments(readers: Any, lanes: Lanes, firsts: Array, kind: str) -> Array:
    """[warps, 32, registers, 2] of pairs of numbers of 16 bits."""
    words = np.stack([of_warps(each, lanes, firsts) for each in readers], -1)
    pairs = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 2)
    return floats(pairs, kind)


@operation("ldmatrix", "stmatrix")
def _matrix(o: Operands) -> Function:
    loads = o.instruction.name == "ldmatrix"
    registers, address = (0, o.address(1)) if loads else (1, o.address(0))
    number, where, transposed = len(o.texts(registers)), o.instruction, "trans" in o.modifiers
    if "m8n8" not in o.modifiers or o.type != "b16":
        raise UnknownError(f"not known: {where}")
    moved: Any = o.writes(registers) if loads else o.reads(registers, np.uint32)

    def run(lanes: Lanes) -> None:
        launch, firsts = lanes.launch, whole_warps(lanes, where)
        own = Lanes(launch)
        own.first, own.last = lanes.first, lanes.last
        own.mask = (lanes.launch.thread[lanes.first : lanes.last] % 32 < 8 * number) & (
            True if lanes.mask is None else lanes.mask
        )
        places = shared_addresses(own, address(lanes), 16, where)
        shadow = launch.shared_shadow
        pieces, threads = shadow.pieces(places, 16), own.of(launch.lane)
        rows = places.reshape(len(firsts), number, 8)[..., None] + 2 * np.arange(8)
        if loads:
            shadow.read(own.warps, threads, pieces, where, alone=False)
            found = launch.shared.load(rows, 2)
            found = np.ascontiguousarray(found.swapaxes(2, 3) if transposed else found)
            for matrix, words in enumerate(
                found.view(np.uint32).reshape(-1, number, 32).swapaxes(0, 1)
            ):
                moved[matrix](lanes, to_lanes(lanes, firsts, words))
            return
        words = np.stack([of_warps(each, lanes, firsts) for each in moved], 1)
        values = np.ascontiguousarray(words).view(np.uint16).reshape(-1, number, 8, 8)
        values = values.swapaxes(2, 3) if transposed else values
        same = (launch.shared.load(rows, 2) == values).all(-1).ravel()
        shadow.write(own.warps, pieces, where, threads, same=same)
        launch.shared.store(rows, values, 2)
        if (launch.shared.load(rows, 2) != values).any():
            raise FaultError(f"race: threads write different values to one place: {where}")

    return run


@operation("mma")
def _product(o: Operands) -> Function:
    kinds = o.modifiers[-4:]
    if "m16n8k16" not in o.modifiers or kinds[0] != "f32" or kinds[3] != "f32":
        raise UnknownError(f"not known: {o.instruction}")
    writes, sums = o.writes(0), o.reads(3, F32)
    left, right = o.reads(1, np.uint32), o.reads(2, np.uint32)

    def product(lanes: Lanes) -> None:
        firsts = whole_warps(lanes, o.instruction)
        a = _left(fragments(left, lanes, firsts, kinds[1]))
        pairs = fragments(right, lanes, firsts, kinds[1])
        b = np.empty((len(firsts), 16, 8), F32)
        for register in range(2):
            for element in range(2):
                b[:, PAIR + 8 * register + element, ROW] = pairs[:, :, register, element]
        found = a @ b
        for place, (write, reader) in enumerate(zip(writes, sums, strict=True)):
            values = found[:, ROW + 8 * (place // 2), PAIR + place % 2]
            total = values + of_warps(reader, lanes, firsts)
            write(lanes, to_lanes(lanes, firsts, total))

    return product


def _left(pairs: Array) -> Array:
    """[warps, 16, 16] of the fragments of a left operand."""
    found = np.empty((len(pairs), 16, 16), F32)
    for register in range(4):
        for element in range(2):
            row, column = ROW + 8 * (register % 2), PAIR + 8 * (register // 2) + element
            found[:, row, column] = pairs[:, :, register, element]
    return found


SWIZZLES = {0: (16, 0), 1: (128, 7), 2: (64, 3), 3: (32, 1)}
"""Bytes of a row, and the bits of its number by which it is permuted."""


def operand_places(descriptor: int, rows: int, transposed: bool, where: object) -> Array:
    """Addresses `[rows, 16]` of a product's operand of 16 bits, in a CTA's shared memory."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    width, bits = SWIZZLES[descriptor >> 62]
    row, column = np.arange(rows)[:, None], np.arange(16)
    if not bits:  # blocks of 8 x 8, each of 128 bytes without a gap; `leading` is along the depth
        within = row % 8 * 2 + column % 8 * 16 if transposed else row % 8 * 16 + column % 8 * 2
        inside = row // 8 * stride + column // 8 * leading + within
    elif transposed:
        atom = width // 2
        inside = row // atom * leading + row % atom * 2 + column // 8 * stride + column % 8 * width
    else:
        inside = row // 8 * stride + row % 8 * width + column * 2
    places = start + inside
    swizzled: Array = places ^ (places >> 7 & bits) << 4
    return swizzled


@operation("wgmma")
def _warpgroup(o: Operands) -> Function:
    kind = o.modifiers[0]
    if kind == "fence":
        return lambda lanes: None
    if kind == "commit_group":
        return _commit
    if kind == "wait_group":
        left = int(o.instruction.operands[0], 0)
        return lambda lanes: _wait(lanes, left)
    return _asynchronous_product(o)


def _commit(lanes: Lanes) -> None:
    lanes.launch.product_groups[lanes.distinct_warps] += 1


def _wait(lanes: Lanes, left: int) -> None:
    """Products of earlier groups are in their registers now, and their operands may be written again."""
    launch, warps = lanes.launch, lanes.distinct_warps
    done = launch.product_groups[warps] - left
    known, agents = launch.clocks.known, launch.clocks.products(warps)
    known[0, warps, agents] = np.maximum(known[0, warps, agents], done)
    for warp, last in zip(warps[::4].tolist(), done[::4].tolist(), strict=True):
        waiting = launch.queue.get(warp, [])
        for moment, finish in waiting:
            if moment <= last:
                finish()
        launch.queue[warp] = [each for each in waiting if each[0] > last]


def _asynchronous_product(o: Operands) -> Function:
    where = o.instruction
    shape = re.fullmatch(r"m64n(\d+)k16", o.modifiers[3])
    if o.modifiers[0] != "mma_async" or shape is None or o.modifiers[4] != "f32":
        raise UnknownError(f"not known: {where}")
    columns, kind = int(shape[1]), o.modifiers[5]
    in_registers = where.operands[1].startswith("{")
    left = o.reads(1, np.uint32) if in_registers else [o.read(1, np.uint64)]
    right = o.read(2, np.uint64)
    adds = o.read(3, bool)
    signs, transposed = where.operands[4:6], [int(each) for each in where.operands[6:]]
    if signs != ["1", "1"]:
        raise UnknownError(f"not known: {where}")
    left_across, right_across = (0, *transposed)[-2:]
    writes, reads = o.writes(0), o.reads(0, F32)

    def words(group: Lanes) -> list[Any]:
        """The registers of the left operand."""
        return [each(group).copy() for each in left] if in_registers else []

    def begin(lanes: Lanes) -> None:
        launch, firsts = lanes.launch, whole_warps(lanes, where)
        add = np.broadcast_to(adds(lanes), (lanes.count,))
        for first in firsts[::4].tolist():
            group = Lanes(launch)
            group.first = lanes.first + first
            group.last, group.mask = group.first + 128, None
            moment = int(launch.product_groups[group.first // 32]) + 1
            if in_registers:
                a = _left(fragments(left, group, np.arange(0, 128, 32), kind)).reshape(64, 16)
            else:
                a = _shared_operand(group, _one(left[0], group), 64, left_across, kind, moment)
            b = _shared_operand(group, _one(right, group), columns, right_across, kind, moment)
            accumulates = bool(add[first])

            finish = functools.partial(_finish, group, a @ b.T, accumulates, words(group))
            launch.queue.setdefault(group.first // 32, []).append((moment, finish))

    def _finish(group: Lanes, found: Array, again: bool, given: list[Any]) -> None:
        if any((own != old).any() for own, old in zip(words(group), given, strict=True)):
            raise FaultError(f"registers of a product under way were written: {where}")
        warp = np.arange(4)[:, None]
        for place, (write, read) in enumerate(zip(writes, reads, strict=True)):
            row = 16 * warp + ROW + 8 * (place % 4 // 2)
            values = found[row, place // 4 * 8 + PAIR + place % 2].reshape(128)
            write(group, values + read(group) if again else values)

    def _shared_operand(
        group: Lanes, descriptor: int, rows: int, across: int, kind: str, moment: int
    ) -> Array:
        return shared_operand(
            group, operand_places(descriptor, rows, bool(across), where), kind, moment, where
        )

    return begin


def _one(reader: Any, group: Lanes) -> int:
    """What all threads of a warpgroup must agree on."""
    return int(np.broadcast_to(reader(group), (group.count,))[0])


def shared_operand(group: Lanes, places: Array, kind: str, moment: int, where: object) -> Array:
    launch: Launch = group.launch
    if places.max() + 2 > launch.shared_bytes:
        raise FaultError(f"out of bounds: a product's operand in shared memory: {where}")
    places = places + launch.cta[group.first] * launch.shared_bytes
    shadow = launch.shared_shadow
    pieces = np.unique(places // shadow.piece)
    shadow.read_by_products(group.distinct_warps, pieces, moment, where)
    return floats(launch.shared.load(places, 2), kind)
