# SPDX-License-Identifier: Apache-2.0
"""Another process' memory is copied exactly, and what cannot be copied is said."""

import ctypes
import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.memory.pieces import LOOPS, Pieces, copy_memory, read_memory

_CHILD = """
import sys, numpy as np
data = np.random.default_rng(7).integers(0, 256, 1 << 20, np.uint8)
print(data.ctypes.data, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def far() -> Iterator[tuple[int, int]]:
    """A process, and where 1 MiB of known bytes lies in it."""
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        yield child.pid, int(child.stdout.readline())


KNOWN = np.random.default_rng(7).integers(0, 256, 1 << 20, np.uint8)


def pieces(base: int, numbers: list[int], size: int, lanes: bool = False) -> Pieces:
    found = Pieces(np.array([base + n * size for n in numbers], np.uint64), size)
    if not lanes:
        return found
    pytest.importorskip("numba")
    assert LOOPS.wait(), "the loops do not compile: see the log"
    return found.in_lanes()


def by_definition(order: Pieces) -> bytes:
    """The checksum of lanes' sums, from what `piece_loops` says of them."""
    words = [
        np.ctypeslib.as_array((ctypes.c_uint64 * (order.piece_bytes // 8)).from_address(a))
        for a in order.addresses.tolist()
    ]
    rows = np.concatenate(words).reshape(-1, 64)
    sums = rows.sum(0, dtype=np.uint64), rows.cumsum(0, dtype=np.uint64).sum(0, dtype=np.uint64)
    data = order.nbytes.to_bytes(8, "little") + b"".join(each.tobytes() for each in sums)
    return xxhash.xxh3_128(data).digest()


@given(
    st.sampled_from((1, 8, 24, 512, 4096, 5000, 5120, 65536)),
    st.integers(1, 3000),
    st.integers(),
    st.sampled_from((0, 8, 64)),
    st.booleans(),
    st.booleans(),
)
def test_pieces_in_any_order_arrive_exactly_and_nothing_beside_them(
    far: tuple[int, int], size: int, count: int, seed: int, start: int, mapped: bool, lanes: bool
):
    pid, base = far
    count = min(count, (1 << 20) // size)
    numbers = random.Random(seed).sample(range((1 << 20) // size), count)
    memory = np.full((2 * count + 1) * size + 128, 0xAA, np.uint8)  # a gap after each piece
    skipped = -memory.ctypes.data % 64 + start
    here = memory[skipped:][: (2 * count + 1) * size]
    ours = pieces(here.ctypes.data, list(range(0, 2 * count, 2)), size, lanes)
    assert ours.lanes == (lanes and size % 512 == 0)
    if mapped:
        found = copy_memory(pieces(KNOWN.ctypes.data, numbers, size, lanes), ours)
    else:
        found = read_memory(pid, pieces(base, numbers, size, lanes), ours)
    wanted = [KNOWN[n * size : (n + 1) * size] for n in numbers]
    rows = here[: 2 * count * size].reshape(count, 2, size)
    assert all(np.array_equal(row, part) for row, part in zip(rows[:, 0], wanted, strict=True))
    assert (rows[:, 1] == 0xAA).all()
    assert (here[-size:] == 0xAA).all()
    assert (memory[:skipped] == 0xAA).all()
    assert found == ours.checksum()
    assert not ours.lanes or found == by_definition(ours)


@pytest.mark.parametrize("lanes", [False, True])
@given(st.integers(0, 4095), st.integers(0, 7))
def test_a_changed_bit_or_two_pieces_that_change_places_change_the_checksum(
    lanes: bool, byte: int, bit: int
):
    data = KNOWN[:8192].copy()
    order = pieces(data.ctypes.data, [0, 1], 4096, lanes)
    before = order.checksum()
    assert pieces(data.ctypes.data, [1, 0], 4096, lanes).checksum() != before
    data[byte] ^= 1 << bit
    assert order.checksum() != before
    data[byte] ^= 1 << bit
    words = data.view(np.uint64)
    one, other = byte // 8, (byte // 8 + 64 * (bit + 1)) % len(words)  # in one lane
    words[one], words[other] = words[other], words[one]
    assert order.checksum() != before


def test_zeros_of_another_length_have_another_checksum():
    data = np.zeros(8192, np.uint8)
    assert pieces(data.ctypes.data, [0, 1], 4096, True).checksum() != (
        pieces(data.ctypes.data, [0], 4096, True).checksum()
    )


def test_without_the_loops_nothing_is_summed_in_lanes():
    order = pieces(KNOWN.ctypes.data, [0, 1], 4096, True)
    here = np.zeros(8192, np.uint8)
    ours = pieces(here.ctypes.data, [0, 1], 4096)
    with LOOPS.off():
        assert not order.in_lanes().lanes
        for impossible in (order.checksum, lambda: copy_memory(order, ours)):
            with pytest.raises(OSError, match="4096 bytes cannot be summed in lanes here"):
                impossible()
    assert not here.any()
    odd = order._replace(piece_bytes=4095)
    with pytest.raises(OSError, match="4095 bytes cannot be summed"):
        odd.checksum()


def test_memory_that_is_not_there_is_an_error_and_not_a_crash(far: tuple[int, int]):
    pid, base = far
    here = np.zeros(4096, np.uint8)
    ours = pieces(here.ctypes.data, [0, 1], 2048)
    with pytest.raises(OSError, match=f"process {pid}") as caught:
        read_memory(pid, pieces(8, [0, 1], 2048), ours)
    assert caught.value.errno == errno.EFAULT
    partly = Pieces(np.array([base, 8], np.uint64), 2048)
    with pytest.raises(OSError, match="2048 bytes of 4096"):
        read_memory(pid, partly, ours)


def test_a_process_that_is_gone_is_an_error():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    here = np.zeros(8, np.uint8)
    ours = pieces(here.ctypes.data, [0], 8)
    with pytest.raises(OSError, match="No such process"):
        read_memory(child.pid, ours, ours)


def test_unlike_pieces_are_refused_before_anything_is_written():
    here = np.zeros(16, np.uint8)
    one, two = pieces(here.ctypes.data, [0], 16), pieces(here.ctypes.data, [0, 1], 8)
    for refused in (lambda: read_memory(os.getpid(), one, two), lambda: copy_memory(one, two)):
        with pytest.raises(ValueError, match="1 pieces of 16 bytes there, 2 of 8 here"):
            refused()
