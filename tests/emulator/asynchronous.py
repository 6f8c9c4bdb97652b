# SPDX-License-Identifier: Apache-2.0
"""Copies that arrive later: `cp.async`, TMA and mbarriers; and fences.

A copy's bytes are written at once. Whether a thread may see them is a matter of clocks: it must have waited, or
have met a warp that has.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from accesses import shared_addresses
from arithmetic import Function, operation
from gangs import JUNK, Lanes
from machine import Launch
from memory import MBARRIERS, Array, FaultError
from operands import Operands, UnknownError


@operation("cp")
def _copy(o: Operands) -> Function:
    told = o.modifiers
    if "bulk" in told:
        return _tma(o)
    if "commit_group" in told:
        return lambda lanes: _commit(lanes.launch.copy_groups, lanes.distinct_warps)
    if "wait_group" in told:
        return _wait_for_copies(o, int(o.instruction.operands[0], 0))
    hinted = "L2_cache_hint" in told
    if told[2:4] != ("shared", "global") or len(o) - hinted not in (3, 4):
        raise UnknownError(f"not known: {o.instruction}")
    target, source, size = o.address(0), o.address(1), int(o.instruction.operands[2], 0)
    count = o.read(3, np.int32) if len(o) - hinted == 4 else lambda _: np.int32(size)
    where = o.instruction

    def copy(lanes: Lanes) -> None:
        launch, warps = lanes.launch, lanes.warps
        places = shared_addresses(lanes, target(lanes), size, where)
        wanted, given = lanes.active(source(lanes)), lanes.active(count(lanes))
        reads = given > 0
        if reads.any():
            launch.shadow.check(warps[reads], wanted[reads], size, where, write=False)
        shadow = launch.shared_shadow
        moments = launch.copy_groups[warps] + 1
        agents = launch.clocks.copies(warps)
        shadow.write(warps, shadow.pieces(places, size), where, None, agents, moments)
        for byte in range(0, size, 4):
            values = np.zeros(len(places), np.uint32)
            inside = given > byte
            values[inside] = launch.memory.load(wanted[inside] + byte, 4)
            launch.shared.store(places + byte, values, 4)

    return copy


def _commit(groups: Array, warps: Array) -> None:
    groups[warps] += 1


def _wait_for_copies(o: Operands, left: int) -> Function:
    def wait(lanes: Lanes) -> None:
        launch, warps = lanes.launch, lanes.distinct_warps
        known = launch.clocks.known
        agents = launch.clocks.copies(warps)
        done = launch.copy_groups[warps] - left
        known[0, warps, agents] = np.maximum(known[0, warps, agents], done)

    return wait


@operation("fence")
def _fence(o: Operands) -> Function:
    if o.modifiers[:2] != ("proxy", "async"):
        raise UnknownError(f"not known: {o.instruction}")
    return lambda lanes: lanes.launch.clocks.fence_proxies(lanes.distinct_warps)


@dataclass
class Mbarrier:
    """Attributes: warp `maker` made it at its moment `made`; `count` arrivals complete a phase; `missing` arrivals
    and `nbytes` are still to come; `told` is what they who arrive know, `learnt` what they knew in phases that are
    complete."""

    agent: int
    maker: int
    made: int
    count: int
    missing: int
    told: Array
    learnt: Array
    nbytes: int = 0
    phase: int = 0
    loads: int = 0
    """Loads that have been told to arrive here."""

    def change(self, arrivals: int, nbytes: int, told: Array | None, where: object) -> None:
        self.missing -= arrivals
        self.nbytes += nbytes
        if told is not None:
            self.told = np.maximum(self.told, told)
        if self.missing < 0:
            raise FaultError(f"more arrivals at an mbarrier than it has: {where}")
        if self.missing == 0 and self.nbytes == 0:
            self.phase ^= 1
            self.missing = self.count
            self.learnt, self.told = self.told, np.zeros_like(self.told)


def _mbarrier_of(
    launch: Launch, cta: int, address: int, warp: int, where: object, proxy: int = 0
) -> Mbarrier:
    """`proxy`: 1 for the TMA, which sees a new mbarrier behind a fence of proxies only."""
    found = launch.mbarriers.get((cta, address))
    if found is None:
        raise FaultError(f"no mbarrier was made at {address}: {where}")
    assert isinstance(found, Mbarrier)
    if launch.clocks.known[proxy, warp, found.maker] < found.made:
        between = (
            "fence.proxy.async"
            if launch.clocks.known[0, warp, found.maker] >= found.made
            else "barrier"
        )
        raise FaultError(f"race: no {between} since an mbarrier was made: {where}")
    return found


def _threads(lanes: Lanes, *values: Any) -> Any:
    """For each active thread: its CTA, its warp and these values."""
    columns = [lanes.of(lanes.launch.cta), lanes.warps, *(lanes.active(value) for value in values)]
    return zip(*(column.tolist() for column in columns), strict=True)


@operation("mbarrier")
def _mbarrier(o: Operands) -> Function:
    where, kind = o.instruction, o.modifiers[0]
    if kind == "try_wait":
        return _try_wait(o)
    place = next(n for n, text in enumerate(where.operands) if text.startswith("["))
    address, single = o.address(place), place + 1 == len(o)
    number = (lambda _: np.int64(1)) if single else o.read(place + 1, np.int64)
    if kind not in ("init", "arrive") or (kind == "init" and single):
        raise UnknownError(f"not known: {where}")

    def init(lanes: Lanes) -> None:
        launch = lanes.launch
        for cta, warp, at, count in _threads(lanes, address(lanes), number(lanes)):
            here = sum(each == cta for each, _ in launch.mbarriers)
            if (cta, at) in launch.mbarriers:
                raise FaultError(f"an mbarrier is made where there is one: {where}")
            if here >= MBARRIERS:
                raise UnknownError(f"more than {MBARRIERS} mbarriers: {where}")
            agent = launch.clocks.loads(cta, here)
            nothing = np.zeros_like(launch.clocks.known[:, 0])
            made = int(launch.clocks.known[0, warp, warp])
            launch.mbarriers[cta, at] = Mbarrier(agent, warp, made, count, count, nothing, nothing)

    def arrive(lanes: Lanes) -> None:
        clocks, expects = lanes.launch.clocks, "expect_tx" in o.modifiers
        told = {warp: clocks.known[:, warp].copy() for warp in lanes.distinct_warps.tolist()}
        clocks.tick(lanes.distinct_warps)
        for cta, warp, at, count in _threads(lanes, address(lanes), number(lanes)):
            barrier = _mbarrier_of(lanes.launch, cta, at, warp, where)
            arrivals, nbytes = (1, count) if expects else (count, 0)
            barrier.change(arrivals, nbytes, told[warp], where)

    return init if kind == "init" else arrive


def _try_wait(o: Operands) -> Function:
    write, address, parity = o.write(), o.address(1), o.read(2, np.int64)
    if "parity" not in o.modifiers:
        raise UnknownError(f"not known: {o.instruction}")

    def try_wait(lanes: Lanes) -> None:
        launch, found, known = lanes.launch, [], set()
        for cta, warp, at, phase in _threads(lanes, address(lanes), parity(lanes)):
            barrier = _mbarrier_of(launch, cta, at, warp, o.instruction)
            complete = barrier.phase != phase & 1
            found.append(complete)
            if complete and (warp, at) not in known:
                known.add((warp, at))
                launch.clocks.learn(np.array([warp]), barrier.learnt)
        write(lanes, lanes.spread(np.array(found)))
        lanes.impatient |= not all(found)

    return try_wait


MAP = ("base", "columns", "rows", "pitch", "element", "width", "height", "swizzle")
"""`struct tensor_map` of libcuda.c."""


def _tma(o: Operands) -> Function:
    where = o.instruction
    match = re.fullmatch(r"\[\s*(\S+),\s*\{(.*)\}\s*\]", where.operands[1])
    if match is None or o.modifiers[2:4] != ("tensor", "2d") or len(o) != 3:
        raise UnknownError(f"not known: {where}")
    target, barrier = o.address(0), o.address(2)
    source = o.reader(match[1], np.int64)
    column, row = (o.reader(text.strip(), np.int32) for text in match[2].split(","))

    def load(lanes: Lanes) -> None:
        launch = lanes.launch
        given = (each(lanes) for each in (target, barrier, source, column, row))
        for cta, warp, to, at, tensor, x, y in _threads(lanes, *given):
            words = launch.parameters.load(tensor + 8 * np.arange(len(MAP)), 8).tolist()
            box = dict(zip(MAP, words, strict=True))
            loads_to = _mbarrier_of(launch, cta, at, warp, where, 1)
            _begin(launch, box, cta, warp, to, loads_to, x, y, where)

    return load


def _begin(
    launch: Launch,
    box: Any,
    cta: int,
    warp: int,
    to: int,
    barrier: Mbarrier,
    x: int,
    y: int,
    where: object,
) -> None:
    """A box is on its way; it arrives when `Launch` says so."""
    width, height, size = (
        box["width"] * box["element"],
        box["height"],
        box["width"] * box["element"],
    )
    rows, columns = y + np.arange(height), x * box["element"] + np.arange(width)
    inside = (rows >= 0)[:, None] & (rows < box["rows"])[:, None] & (columns >= 0)
    inside &= columns < box["columns"] * box["element"]
    addresses = box["base"] + rows[:, None] * box["pitch"] + columns
    places = to + np.arange(height)[:, None] * width + np.arange(width)
    if to % (1024 if box["swizzle"] else 128) or to + height * size > launch.shared_bytes:
        raise FaultError(f"misaligned or out of bounds: a box at {to} of shared memory: {where}")
    if box["swizzle"]:
        places = places ^ (places >> 7 & 7) << 4
    places = (places + cta * launch.shared_bytes).ravel()
    warps = np.array([warp])
    if inside.any():
        read = addresses[inside]
        launch.shadow.check(np.full(len(read), warp), read, 1, where, write=False)
    values = np.zeros(addresses.shape, np.uint8)
    values[inside] = launch.memory.load(addresses[inside], 1)
    shadow, known = launch.shared_shadow, launch.clocks.known
    pieces = np.unique(places // shadow.piece)[None]
    barrier.loads += 1
    moment = barrier.loads
    agents, moments = np.array([barrier.agent]), np.array([moment])
    shadow.write(warps, pieces, where, None, agents, moments, fenced=True)
    launch.shared.store(places, np.uint8(JUNK), 1)

    def arrive() -> None:
        launch.shared.store(places, values.ravel(), 1)
        told = np.zeros_like(known[:, 0])
        told[:, barrier.agent] = moment
        barrier.change(0, -places.size, told, where)

    launch.loads.append(arrive)
