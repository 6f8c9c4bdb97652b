# SPDX-License-Identifier: Apache-2.0
"""The memory of a table that has grown goes back to the system piece by piece."""

from __future__ import annotations

import numpy as np

from scheduler_plugins.router.index.retired import Retired, private_words
from scheduler_plugins.router.index.table import HashTable

MIB = 1 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as told:
        return int(told.read().split()[1]) * 4096


def touched(mib: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    words = private_words(mib * MIB // 8)
    words[::512] = 1
    return words


def test_memory_goes_back_in_pieces() -> None:
    retired = Retired()
    words = touched(64)
    retired.add(words[:100].view(np.bool_))  # a view stands for all of it
    full = resident_bytes()
    retired.give_back(16 * MIB)
    assert retired.nbytes == 48 * MIB
    assert full - resident_bytes() > 14 * MIB
    retired.give_back(48 * MIB)
    assert retired.nbytes == 0
    assert full - resident_bytes() > 60 * MIB
    retired.give_back(MIB)  # nothing is left


def test_little_by_little_is_enough() -> None:
    retired = Retired()
    retired.add(touched(1))
    for _ in range(1 << 11):
        retired.give_back(512)
    assert retired.nbytes == 0


def test_a_table_that_grows_gives_its_memory_back_before_it_grows_again() -> None:
    random, table, most = np.random.default_rng(0), HashTable(), 0
    begun = False
    for _ in range(2000):
        table.put(random.integers(1, 2**63, 500).astype(np.uint64), 1)
        most = max(most, table._retired.nbytes)
        if table.grows and not begun:
            assert table._retired.nbytes == 0
        begun = table.grows
    assert most > MIB
