# SPDX-License-Identifier: Apache-2.0
"""Gangs: threads that are at the same instruction and execute it together."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from memory import Array
from ptx import Program

if TYPE_CHECKING:
    from machine import Launch

JUNK = 0xCD
"""What registers and shared memory hold before they are written."""
PARAMETERS = 0x1000_0000
"""Address of a kernel's parameters, each 256 bytes from the one before."""


@dataclass(eq=False)
class Gang:
    """Threads that execute together: those of `first` to `last` in `mask`; all, if it is None.

    Attributes:
        state: "ready"; "apart": the rest of a warp or warpgroup must come to the same instruction; or "barrier".
        tired: others go first, because this one may wait for what they do.
        warpset: gangs come together only within a set of warps, so that sets run at their own pace.
    """

    at: int
    first: int
    last: int
    mask: Array | None
    warpset: int
    state: str = "ready"
    barrier: int = 0
    tired: bool = False

    def full_mask(self, threads: int) -> Array:
        found = np.zeros(threads, bool)
        found[self.first : self.last] = True if self.mask is None else self.mask
        return found


class Lanes:
    """The threads that execute one instruction, as its function sees them: slices of the launch's registers."""

    __slots__ = ("first", "impatient", "last", "launch", "mask", "registers")

    def __init__(self, launch: "Launch") -> None:
        self.launch, self.registers = launch, launch.registers
        self.first = self.last = 0
        self.mask: Array | None = None
        self.impatient = False
        """Set by an instruction that may be polling."""

    @property
    def count(self) -> int:
        return self.last - self.first

    def of(self, array: Array) -> Array:
        """The part of an array of all threads that belongs to active threads."""
        own = array[self.first : self.last]
        return own if self.mask is None else own[self.mask]

    def active(self, value: Any) -> Array:
        """The active threads' values of an operand."""
        wide: Array = np.asarray(value)
        if wide.shape != (self.count,):
            wide = np.broadcast_to(wide, (self.count,))
        return wide if self.mask is None else wide[self.mask]

    def spread(self, values: Array) -> Array:
        """Values of active threads in the places of these threads."""
        if self.mask is None:
            return values
        wide = np.zeros(self.count, values.dtype)
        wide[self.mask] = values
        return wide

    @property
    def warps(self) -> Array:
        """The warp of each active thread, counted through all CTAs."""
        return self.of(self.launch.warp)

    @property
    def distinct_warps(self) -> Array:
        """Each of them once: warps follow one another, as threads do."""
        if self.mask is None:
            return np.arange(self.first // 32, (self.last - 1) // 32 + 1)
        warps = self.warps
        return warps[np.diff(warps, prepend=-1) > 0]


@dataclass
class Code:
    """A program, with a function for each instruction; None for those that `Launch` executes itself."""

    program: Program
    functions: list[Any]
    guards: list[int]
    """Place of each instruction's predicate, or -1."""


def gang_of(at: int, mask: Array, warpset: int) -> Gang:
    gang = Gang(at, 0, len(mask), mask, warpset)
    replace_threads(gang, mask)
    return gang


def replace_threads(gang: Gang, mask: Array) -> None:
    """Give a gang other threads: the fewest neighbours that contain them."""
    places = np.flatnonzero(mask)
    if not len(places):
        gang.first = gang.last = 0
        return
    gang.first, gang.last = int(places[0]), int(places[-1]) + 1
    own = mask[gang.first : gang.last]
    gang.mask = None if len(places) == len(own) else own.copy()


def smallest(program: Program, space: str) -> int:
    """The smallest element that a kernel reads or writes there, up to 4 bytes."""
    sizes = (
        int(each.modifiers[-1][1:]) // 8
        for each in program.code
        if each.name in ("ld", "st", "atom", "red") and space in ".".join(each.modifiers)
    )
    return min([4, *sizes])


def special_registers(grid: tuple[int, int, int], threads: int) -> dict[str, Array]:
    """What each thread of a launch reads from the registers that tell its place."""
    lane = np.arange(grid[0] * grid[1] * grid[2] * threads)
    cta, thread = lane // threads, lane % threads
    place = cta, cta // grid[0], cta // (grid[0] * grid[1])
    every = {"%laneid": thread % 32, "%warpid": thread // 32}
    every["%smid"] = cta * 3 // 4 % 132  # not evenly, as on a GPU
    for axis, letter in enumerate("xyz"):
        every[f"%ctaid.{letter}"] = place[axis] % grid[axis]
        every[f"%nctaid.{letter}"] = np.full(len(lane), grid[axis])
        every[f"%tid.{letter}"] = thread if axis == 0 else np.zeros_like(thread)
        every[f"%ntid.{letter}"] = np.full(len(lane), threads if axis == 0 else 1)
    return every
