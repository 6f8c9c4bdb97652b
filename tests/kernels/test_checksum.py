# SPDX-License-Identifier: Apache-2.0
"""The checksum sees what goes wrong with a chunk, and nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_kernels.checksum import checksum_of

ROW_BYTES = 8 * 256
# Whole rows, a last row that is not whole, and words that are not whole.
_sizes = st.integers(0, 3 * ROW_BYTES + 9)


def _data(nbytes: int, seed: int = 0) -> bytearray:
    return bytearray(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes())


def _sum(data: bytes | bytearray) -> bytes:
    return checksum_of(memoryview(data))


@given(_sizes, st.integers(0, 10))
def test_equal_bytes_have_equal_checksums_wherever_they_lie(nbytes: int, shift: int) -> None:
    data = _data(nbytes)
    moved = memoryview(bytes(shift) + data)[shift:]
    assert checksum_of(moved) == _sum(data) == _sum(bytes(data))
    assert len(_sum(data)) == 8


@given(st.integers(1, 3 * ROW_BYTES + 9), st.data(), st.integers(1, 255))
def test_any_single_changed_byte_is_seen(nbytes: int, data: st.DataObject, change: int) -> None:
    original = _data(nbytes)
    changed = bytearray(original)
    changed[data.draw(st.integers(0, nbytes - 1))] ^= change
    assert _sum(changed) != _sum(original)


def test_every_single_flipped_bit_of_a_word_is_seen() -> None:
    original = _data(ROW_BYTES)
    seen = {_sum(original)}
    for bit in range(64):
        changed = bytearray(original)
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(_sum(changed))
    assert len(seen) == 65


@given(st.data())
def test_two_words_that_change_places_are_seen(data: st.DataObject) -> None:
    words = np.frombuffer(_data(4 * ROW_BYTES), dtype="<u8").copy()
    a, b = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    before = _sum(words.tobytes())
    words[[a, b]] = words[[b, a]]
    assert _sum(words.tobytes()) != before


@pytest.mark.parametrize(("a", "b"), [(0, 1), (0, 3), (1, 2)])
def test_two_rows_that_change_places_are_seen(a: int, b: int) -> None:
    rows = np.frombuffer(_data(4 * ROW_BYTES), dtype="<u8").reshape(4, -1).copy()
    before = _sum(rows.tobytes())
    rows[[a, b]] = rows[[b, a]]
    assert _sum(rows.tobytes()) != before


@pytest.mark.parametrize("granule", [512, 2048, 4096, 16384])
def test_pages_that_change_places_are_seen(granule: int) -> None:
    data = _data(8 * granule)
    swapped = data[granule : 2 * granule] + data[:granule] + data[2 * granule :]
    assert _sum(swapped) != _sum(data)


@given(_sizes, st.integers(1, 3 * ROW_BYTES))
def test_zeros_at_the_end_count(nbytes: int, zeros: int) -> None:
    data = _data(nbytes)
    assert _sum(data + bytes(zeros)) != _sum(data)
    blank = bytearray(nbytes)
    assert _sum(blank + bytes(zeros)) != _sum(blank)


@given(st.integers(1, 3 * ROW_BYTES), st.integers(1, 100))
def test_a_part_that_is_missing_is_seen(nbytes: int, missing: int) -> None:
    data = _data(nbytes)
    assert _sum(data[: max(0, nbytes - missing)]) != _sum(data)


def test_a_slot_that_was_never_written_is_seen() -> None:
    data = _data(4 * ROW_BYTES)
    half = data[: 2 * ROW_BYTES] + bytes(2 * ROW_BYTES)
    assert len({_sum(data), _sum(half), _sum(bytes(4 * ROW_BYTES)), _sum(b"")}) == 4


def test_the_checksum_stays_as_it_is_within_a_schema() -> None:
    """Peers of other versions compute it, too."""
    assert checksum_of(memoryview(_data(3 * ROW_BYTES + 5))).hex() == "93bc590bc36a12f7"
