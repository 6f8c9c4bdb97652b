# SPDX-License-Identifier: Apache-2.0
"""Pieces of memory summed, and copied and summed in one pass, in loops that numba compiles.

Memory is taken as rows of `LANES` words of 64 bits. Of each lane there are two sums, of its words and of
its running sums, so that a word that changes changes both, and rows that change places the second.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.extending import intrinsic

from pd_connector.codec.jit import compiled

LANES = 64
ROW_BYTES = 8 * LANES
"""Pieces have a multiple of so many bytes."""
VECTOR_BYTES = 64
"""What `copy_pieces` writes to lies at a multiple of it."""

_Addresses = npt.NDArray[np.uint64]
_U64 = numba.types.uint64
_WORD = ir.IntType(64)
_VECTOR = ir.VectorType(_WORD, VECTOR_BYTES // 8)
_VECTORS = ROW_BYTES // VECTOR_BYTES
_ANY = 8
"""Bytes that loads, and the stores of sums, are aligned to."""


def _pass(copies: bool) -> Callable[..., None]:
    """One pass over a piece.

    As vectors by hand: what is copied must be written past the cache (`nontemporal`), as it will not be
    read soon, and fetching the lines to be overwritten is a third of the traffic.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def made(_typing: Any, here: Any, there: Any, nbytes: Any, sums: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            _Row(builder, *arguments).write(copies)
            return context.get_dummy_value()

        return numba.void(_U64, _U64, _U64, _U64), generate

    function: Callable[..., None] = made
    return function


class _Row:
    """Writes the code of a loop over the rows of a piece; its sums stay in registers.

    Args:
        here: address to copy to.
        there: address to read.
        nbytes: how many.
        sums: address of the lanes' sums, and then of their running sums' sums.
    """

    def __init__(self, builder: Any, here: Any, there: Any, nbytes: Any, sums: Any) -> None:
        self._builder = builder
        self._here = here
        self._there = there
        self._nbytes = nbytes
        self._sums = sums

    def write(self, copies: bool) -> None:
        builder = self._builder
        before = builder.block
        known = [
            builder.load(self._at(self._sums, self._number(VECTOR_BYTES * i)), align=_ANY)
            for i in range(2 * _VECTORS)
        ]
        loop, end = (builder.append_basic_block(name) for name in ("rows", "summed"))
        builder.branch(loop)
        builder.position_at_end(loop)
        offset = builder.phi(_WORD)
        offset.add_incoming(self._number(0), before)
        sums = [builder.phi(_VECTOR) for _ in known]
        for each, value in zip(sums, known, strict=True):
            each.add_incoming(value, before)
        new = self._add_row(offset, sums, copies)
        following = builder.add(offset, self._number(ROW_BYTES))
        offset.add_incoming(following, loop)
        for each, value in zip(sums, new, strict=True):
            each.add_incoming(value, loop)
        builder.cbranch(builder.icmp_unsigned("<", following, self._nbytes), loop, end)
        builder.position_at_end(end)
        for i, value in enumerate(new):
            place = self._at(self._sums, self._number(VECTOR_BYTES * i))
            builder.store(value, place, align=_ANY)

    def _add_row(self, offset: Any, sums: list[Any], copies: bool) -> list[Any]:
        builder = self._builder
        past_the_cache = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        words, running = sums[:_VECTORS], sums[_VECTORS:]
        for i in range(_VECTORS):
            place = builder.add(offset, self._number(VECTOR_BYTES * i))
            value = builder.load(self._at(self._there, place), align=_ANY)
            if copies:
                stored = builder.store(value, self._at(self._here, place), align=VECTOR_BYTES)
                stored.set_metadata("nontemporal", past_the_cache)
            words[i] = builder.add(words[i], value)
            running[i] = builder.add(running[i], words[i])
        return words + running

    def _at(self, base: Any, offset: Any) -> Any:
        address = self._builder.add(base, offset)
        return self._builder.inttoptr(address, _VECTOR.as_pointer())

    @staticmethod
    def _number(value: int) -> Any:
        return ir.Constant(_WORD, value)


@intrinsic  # type: ignore[untyped-decorator]
def _settle(_typing: Any) -> Any:
    """What was written past the cache is there for every thread that hears of it."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return numba.void(), generate


_sum = _pass(copies=False)
_copy_and_sum = _pass(copies=True)
_LIST = _U64[::1]


@compiled(_LIST, _U64, _LIST)
def sum_pieces(there: _Addresses, piece_bytes: np.uint64, sums: _Addresses) -> None:
    """Add pieces to the sums, uint64 `[2 * LANES]`: the lanes', then the running ones'."""
    to = np.uint64(sums.ctypes.data)
    for i in range(len(there)):
        _sum(np.uint64(0), there[i], piece_bytes, to)


@compiled(_LIST, _LIST, _U64, _LIST)
def copy_pieces(
    there: _Addresses, here: _Addresses, piece_bytes: np.uint64, sums: _Addresses
) -> None:
    """Copy pieces, and add what is written to the sums."""
    to = np.uint64(sums.ctypes.data)
    for i in range(len(there)):
        _copy_and_sum(here[i], there[i], piece_bytes, to)
    _settle()
