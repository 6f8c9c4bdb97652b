# SPDX-License-Identifier: Apache-2.0
"""Another process' memory is copied exactly, and what cannot be copied is said."""

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

from pd_connector.memory.pieces import Pieces, read_memory

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


def pieces(base: int, numbers: list[int], size: int) -> Pieces:
    return Pieces(np.array([base + n * size for n in numbers], np.uint64), size)


@given(
    st.sampled_from((1, 8, 24, 512, 4096, 5000, 5120, 65536)), st.integers(1, 3000), st.integers()
)
def test_pieces_in_any_order_arrive_exactly_and_nothing_beside_them(
    far: tuple[int, int], size: int, count: int, seed: int
):
    pid, base = far
    count = min(count, (1 << 20) // size)
    numbers = random.Random(seed).sample(range((1 << 20) // size), count)
    here = np.full((2 * count + 1) * size, 0xAA, np.uint8)  # a gap after each piece
    ours = pieces(here.ctypes.data, list(range(0, 2 * count, 2)), size)
    found = read_memory(pid, pieces(base, numbers, size), ours)
    wanted = [KNOWN[n * size : (n + 1) * size] for n in numbers]
    rows = here[: 2 * count * size].reshape(count, 2, size)
    assert all(np.array_equal(row, part) for row, part in zip(rows[:, 0], wanted, strict=True))
    assert (rows[:, 1] == 0xAA).all()
    assert (here[-size:] == 0xAA).all()
    assert found == ours.checksum() == xxhash.xxh3_128(np.concatenate(wanted)).digest()


@given(st.integers(0, 4095), st.integers(0, 7))
def test_a_changed_bit_or_two_pieces_that_change_places_change_the_checksum(byte: int, bit: int):
    data = KNOWN[:8192].copy()
    order = pieces(data.ctypes.data, [0, 1], 4096)
    before = order.checksum()
    assert pieces(data.ctypes.data, [1, 0], 4096).checksum() != before
    data[byte] ^= 1 << bit
    assert order.checksum() != before


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
    one, two = pieces(here.ctypes.data, [0], 8), pieces(here.ctypes.data, [0, 1], 8)
    with pytest.raises(ValueError, match="1 pieces of 8 bytes there, 2 of 8 here"):
        read_memory(os.getpid(), one, two)
    assert not here.any()


def test_pieces_of_unlike_sizes_fit_if_their_bytes_do(far: tuple[int, int]):
    pid, base = far
    here = np.zeros(6 * 4096, np.uint8)
    theirs, ours = pieces(base, [1, 4, 2], 8192), pieces(here.ctypes.data, [5, 0, 1, 3, 2, 4], 4096)
    found = read_memory(pid, theirs, ours)
    wanted = np.concatenate([KNOWN[n * 8192 : (n + 1) * 8192] for n in (1, 4, 2)])
    assert np.array_equal(here.reshape(6, 4096)[[5, 0, 1, 3, 2, 4]].reshape(-1), wanted)
    assert found == ours.checksum() == xxhash.xxh3_128(wanted).digest()


def test_a_peer_cannot_have_memory_cut_into_crumbs(far: tuple[int, int]):
    pid, base = far
    here = np.zeros(1 << 20, np.uint8)
    with pytest.raises(ValueError, match="common divisor 1 is too small"):
        read_memory(
            pid,
            pieces(base, list(range(1 << 20)), 1),
            Pieces(np.array([here.ctypes.data], np.uint64), 1 << 20),
        )
    assert not here.any()


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30))
def test_joined_and_cut_pieces_are_the_same_memory(numbers: list[int]):
    data = KNOWN[: 41 * 24].copy()
    order = pieces(data.ctypes.data, numbers, 24)
    for same in (order.joined(), order.cut(8), order.cut(8).joined(), Pieces.together([order])):
        assert same.nbytes == order.nbytes
        assert same.checksum() == order.checksum()


def test_neighbours_become_one_piece():
    """The pages of one token each that a fresh request has, in two stretches."""
    joined = pieces(1 << 20, [*range(8, 24), *range(64, 72)], 512).joined()
    assert joined.piece_bytes == 8 * 512
    assert joined.addresses.tolist() == [(1 << 20) + 512 * n for n in (8, 16, 64)]


def test_pieces_of_unlike_planes_are_cut_to_one_size():
    keys, values = pieces(1 << 20, [0, 1], 24), pieces(1 << 21, [0, 1], 16)
    both = Pieces.together([keys, values])
    assert both.piece_bytes == 8
    assert both.addresses.tolist() == [
        *range(1 << 20, (1 << 20) + 48, 8),
        *range(1 << 21, (1 << 21) + 32, 8),
    ]
