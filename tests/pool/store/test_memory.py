# SPDX-License-Identifier: Apache-2.0
"""A process that saves and loads for long needs no more memory than at first, whatever it evicts meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

from chunks import chain, content, loads, save

from pd_connector.pool.store.local import LocalStore

NBYTES = 64 << 10
WARM_UP, SAVES = 200, 2000
MOST_GROWN = 2 << 20
"""A KiB for each save. It is far below what one forgotten buffer for each tenth save takes."""


def anonymous() -> int:
    """Bytes of this process's memory, without files."""
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon in /proc/self/status")


def rounds(store: LocalStore, number: int, count: int) -> None:
    """Save chains of ten chunks, and load each chunk."""
    for n in range(number, number + count // 10):
        keys = chain(f"chain {n}", 10)
        assert save(store, keys, nbytes=NBYTES) == len(keys)
        assert all(loads(store, key) for key in keys)


def test_two_thousand_saves_and_hits_take_no_memory_that_stays(
    open_store: Callable[..., LocalStore],
) -> None:
    memory = open_store(memory=16 << 20)
    rounds(memory, 0, WARM_UP)
    before = anonymous()
    rounds(memory, WARM_UP, SAVES)
    assert memory.status().tiers[0].chunks < SAVES, "older chunks were evicted"
    assert anonymous() - before < MOST_GROWN
    kept = [content(key, "r0", NBYTES) for key in chain("what is kept", 64)]
    assert anonymous() - before > MOST_GROWN, f"{len(kept)} buffers that are kept would be seen"
