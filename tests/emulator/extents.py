# SPDX-License-Identifier: Apache-2.0
"""Which tensors each instruction of a launch may touch: only those of the arguments that its address comes from.

Memory of all tensors lies side by side, so an access that leaves its tensor often falls into another one. The
bytes of a view are those of its elements: V beside K, or another head, does not belong to it.
"""

import ctypes
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from memory import Array, FaultError, GlobalShadow
from ptx import Instruction, Program
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

WORD = re.compile(r"%?[\w$#]+")
NOTHING = ("atom", "setp", "ldmatrix", "wgmma", "mma", "mbarrier")
"""These give no addresses."""
ADDRESS = {"ld": 1, "st": 0, "atom": 1, "red": 0, "cp": 1}
"""Place of the operand with the address in global memory."""


class View(NamedTuple):
    """The memory of a tensor's elements; strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "View":
        size = tensor.element_size()
        steps = [step * size for step in tensor.stride()]
        return cls(tensor.data_ptr(), (*tensor.shape, size), (*steps, 1))

    def mark(self, memory: Array, start: int) -> None:
        """Set the view's bytes in `memory`, which begins at the address `start`."""
        own = memory[self.address - start :]
        np.lib.stride_tricks.as_strided(own, self.shape, self.strides)[...] = True


class Extents:
    """What the instructions of a launch may touch, by the origins of their addresses."""

    def __init__(self, given: Iterable[Any], parameters: Sequence[int]) -> None:
        """`given`: the launch's arguments; `parameters`: the address in each parameter, or another number."""
        self.views: dict[int, list[View]] = {}
        """By the origin, as `find_origins` counts them."""
        self.words: dict[int, tuple[int, int]] = {}
        """Address and number of 8-byte words, by the origin, of tensors that may name any memory."""
        arguments: dict[int, list[torch.Tensor]] = {}
        for each in tree_leaves(list(given)):
            tensor = getattr(each, "base", each)  # of a descriptor for the TMA
            if isinstance(tensor, torch.Tensor):
                arguments.setdefault(tensor.data_ptr(), []).append(tensor)
        for number, address in enumerate(parameters):
            for tensor in arguments.get(address, []):
                own, named = 1 << 2 * number, 2 << 2 * number
                self.views.setdefault(own, []).extend(_PARTS.get(tensor) or [View.of(tensor)])
                if tensor in _NAMED:
                    self.views[named] = _NAMED[tensor]
                elif tensor.dtype == torch.int64 and tensor.is_contiguous():
                    self.words[named] = address, tensor.numel()

    def of(self, origins: int) -> list[View]:
        return [view for origin, own in self.views.items() if origin & origins for view in own]


class Reach:
    """The pieces of global memory that instructions of a launch may touch, as `GlobalShadow` counts them."""

    def __init__(self, extents: Extents, shadow: GlobalShadow) -> None:
        self.extents, self.shadow = extents, shadow
        self.known: dict[int, Array | None] = {}

    def __call__(self, instruction: Instruction, pieces: Array) -> None:
        """Raise FaultError if an instruction must not touch these pieces."""
        origins = instruction.origins
        if origins not in self.known:
            views = self.extents.of(origins)
            self.known[origins] = None if self._free(origins) else self._pieces_of(views)
        inside = self.known[origins]
        if inside is not None and not inside[pieces].all():
            raise FaultError(f"out of bounds: in no tensor that its address is of: {instruction}")

    def _free(self, origins: int) -> bool:
        """Whether addresses come from a table of which nothing is known."""
        for origin, (address, count) in self.extents.words.items():
            if origin & origins:
                words = np.array((ctypes.c_int64 * count).from_address(address))
                place = np.searchsorted(self.shadow.starts, words, side="right") - 1
                if ((place >= 0) & (words < self.shadow.ends[place])).any():
                    return True
        return False

    def _pieces_of(self, views: list[View]) -> Array:
        shadow, found = self.shadow, np.zeros(self.shadow.first[-1], bool)
        starts, ends, piece = shadow.starts, shadow.ends, shadow.piece
        memory: dict[int, Array] = {}
        for view in views:
            place = int(np.searchsorted(starts, view.address, side="right")) - 1
            if place < 0 or view.address >= ends[place]:
                continue  # a graph's argument that is not alive at its replay
            if place not in memory:
                memory[place] = np.zeros(-(-(ends[place] - starts[place]) // piece) * piece, bool)
            view.mark(memory[place], int(starts[place]))
        for place, own in memory.items():
            pieces = own.reshape(-1, piece).any(1)
            found[shadow.first[place] :][: len(pieces)] = pieces
        return found


_PARTS: Any = WeakIdKeyDictionary()
_NAMED: Any = WeakIdKeyDictionary()


def only(argument: torch.Tensor, views: Iterable[torch.Tensor]) -> None:
    """Tell that kernels may touch only these parts of an argument."""
    _PARTS[argument] = [View.of(view) for view in views]


def names(table: torch.Tensor, views: Iterable[torch.Tensor]) -> None:
    """Tell that kernels may touch only these views by the addresses in a tensor."""
    _NAMED[table] = [View.of(view) for view in views]


def find_origins(program: Program) -> None:
    """Find the parameters from which each instruction's address was computed.

    Bit `2 n`: from parameter `n`. Bit `2 n + 1`: from 8 bytes that were loaded through parameter `n`, as addresses in
    a table are. The order of instructions does not matter, because registers are rarely used for two things.
    """
    steps = [_Step(each, program) for each in program.code]
    flows = [step for step in steps if step.targets]
    known: dict[str, int] = {name: 1 << 2 * n for n, name in enumerate(program.parameters)}
    changed = True
    while changed:
        changed = False
        for step in flows:
            found = step.result(known)
            for target in step.targets:
                if found & ~known.get(target, 0):
                    known[target] = known.get(target, 0) | found
                    changed = True
    for instruction, step in zip(program.code, steps, strict=True):
        instruction.origins = _joined(known, step.address)


def _joined(known: dict[str, int], names: Iterable[str]) -> int:
    found = 0
    for name in names:
        found |= known.get(name, 0)
    return found


SHARED = "shared memory"
"""All of it, as if it were one register: warps hand addresses to one another there."""


class _Step:
    """What an instruction does to addresses: registers that it writes, and those that it computes them from."""

    def __init__(self, instruction: Instruction, program: Program) -> None:
        def registers(operands: Sequence[str]) -> list[str]:
            words = [word for text in operands for word in WORD.findall(text)]
            return [
                word
                for word in words
                if word in program.parameters or program.registers.get(word, (0, 1))[1] > 1
            ]

        name, operands = instruction.name, instruction.operands
        spaces = {each.removesuffix("_cta") for each in instruction.modifiers}
        shared = "shared" in spaces
        place = ADDRESS.get(name)
        self.address = [] if place is None else registers(operands[place : place + 1])
        self.loads = name == "ld" and "global" in spaces
        self.targets = [] if name in NOTHING else registers(operands[:1])
        self.sources = registers(operands[1:])
        if name == "st":
            self.targets = [SHARED] if shared else []
        elif name in ("cp", "red"):
            self.targets = []
        elif name == "ld" and shared:
            self.sources = [SHARED]
        elif self.loads and instruction.modifiers[-1][1:] != "64":
            self.targets = []

    def result(self, known: dict[str, int]) -> int:
        found = _joined(known, self.sources)
        if self.loads:
            return (found & _OWN) << 1
        return found


_OWN = sum(1 << 2 * n for n in range(64))
