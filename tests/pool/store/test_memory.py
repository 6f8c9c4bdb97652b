# SPDX-License-Identifier: Apache-2.0
"""A process that saves and loads for long needs no more memory than at first, whatever it evicts meanwhile."""

from __future__ import annotations

import gc
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from chunks import chain, content, loads, save

from pd_connector.pool.store.local import LocalStore, Space

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


def grown(folder: Path) -> tuple[int, int]:
    """Bytes that saves and hits take, then bytes of 64 buffers that are kept. For a process of its own: one that has run
    other tests has memory of theirs to give to new buffers."""
    store = LocalStore(Space(folder / "pool", 16 << 20))
    rounds(store, 0, WARM_UP)
    before = anonymous()
    rounds(store, WARM_UP, SAVES)
    after = anonymous()
    assert store.status().tiers[0].chunks < SAVES, "older chunks were evicted"
    store.close()
    kept = [content(key, "r0", NBYTES) for key in chain("what is kept", 64)]
    return after - before, anonymous() - after if kept else 0


def test_two_thousand_saves_and_hits_take_no_memory_that_stays(folder: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as apart:
        saves, kept = apart.submit(grown, folder).result()
    assert saves < MOST_GROWN
    assert kept > MOST_GROWN, "buffers that are kept would be seen"
