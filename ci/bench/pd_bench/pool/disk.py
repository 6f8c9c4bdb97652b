# SPDX-License-Identifier: Apache-2.0
"""Chunks of the disk tier that no cache has, read and verified, beside raw reads of the same files without a cache."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from pd_bench.pool.folders import own_folder
from pd_bench.pool.raw_party import OBJECT_BYTES
from pd_bench.report import BenchError, Comparison, Say
from pd_bench.sample import Sample
from pd_connector.pool.record import SUM_BYTES, layer_sum
from pd_connector.pool.store.base import Refusal
from pd_connector.pool.store.catalog_ops import DISK_TIER
from pd_connector.pool.store.folder import PAGE, charge_of
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space

BAR = 0.8
READERS = 2
"""Threads that read, as a rank of an engine has."""
LEAST_OBJECTS = 128
"""Fewer are read within a burst that the disk of a virtual machine allows: each second read is then twice as fast."""
_LITTLE = 1 << 20
"""A memory tier that takes none of these chunks."""

What = TypeVar("What")


def measure(folder: Path, objects: int, runs: int, warm_ups: int, say: Say) -> list[Comparison]:
    """Measure the rates of both, alternating.

    Args:
        folder: on the disk that is measured; empty.
        objects: of 8 MiB; at least `LEAST_OBJECTS` are read.

    Raises:
        BenchError: a chunk was not stored, or has other bytes.
    """
    objects = max(objects, LEAST_OBJECTS)
    keys = [b"%032d" % number for number in range(objects)]
    _write(folder, keys)
    rates: dict[str, list[float]] = {"pool": [], "raw": []}
    with own_folder() as memory, contextlib.closing(_opened(memory, folder, _LITTLE)) as store:
        files = [path for path in folder.rglob("data/*") if path.is_file()]
        ways = {"pool": lambda: _read(store, keys), "raw": lambda: _read_raw(files)}
        for number in range(warm_ups + runs):
            seconds = {}
            for way in ways if number % 2 else reversed(ways):
                _drop_caches(files)
                began_s = time.perf_counter()
                ways[way]()
                seconds[way] = objects * OBJECT_BYTES / (time.perf_counter() - began_s) / 1e9
            said = ", ".join(f"{way} {rate:.2f}" for way, rate in seconds.items())
            say(f"disk, {'warm-up' if number < warm_ups else 'run'}, GB/s: {said}")
            if number >= warm_ups:
                for way, rate in seconds.items():
                    rates[way].append(rate)
    ours, raw = (Sample(tuple(rates[way])) for way in ("pool", "raw"))
    params = {"MiB": OBJECT_BYTES >> 20, "objects": objects}
    return [Comparison("disk get", params, ours, raw, "GB/s", BAR, more_is_better=True)]


def _opened(memory: Path, disk: Path, budget: int) -> LocalStore:
    return LocalStore(Space(memory / "pool", budget), Space(disk, 64 << 30))


def _write(folder: Path, keys: list[bytes]) -> None:
    """Put a chunk of each key onto the disk: its sum, then its bytes."""
    nbytes = PAGE + OBJECT_BYTES
    with (
        own_folder() as memory,
        contextlib.closing(_opened(memory, folder, 2 * charge_of(nbytes))) as store,
    ):
        for key in keys:
            data = memoryview(os.urandom(OBJECT_BYTES))
            writing = store.begin(key, parent=b"", part="0", parts=1, nbytes=nbytes)
            if isinstance(writing, Refusal):
                raise BenchError(f"a chunk was refused: {writing.text}")
            with writing:
                writing.write(0, memoryview(layer_sum(data)))
                writing.write(PAGE, data)
                if not writing.publish() or not store.maintenance.copy(key, DISK_TIER):
                    raise BenchError("a chunk was not kept")


def _drop_caches(files: list[Path]) -> None:
    """Have the kernel forget what it holds of these files."""
    for path in files:
        with _open(path, os.O_RDONLY) as file:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _read(store: LocalStore, keys: list[bytes]) -> None:
    """Read chunks into private memory and verify them, as a rank does."""

    def read(key: bytes, buffer: memoryview) -> None:
        with store.read(key, "0") as reading:
            sums = reading.take(0, SUM_BYTES)
            reading.into(buffer, PAGE)
        if layer_sum(buffer) != sums:
            raise BenchError("a chunk differs from its sum")

    _in_threads(keys, read, OBJECT_BYTES)


def _read_raw(files: list[Path]) -> None:
    def read(path: Path, buffer: memoryview) -> None:
        with _open(path, os.O_RDONLY | os.O_DIRECT) as file:
            if os.preadv(file, [buffer], 0) != len(buffer):
                raise BenchError(f"{path} was read in part")

    _in_threads(files, read, PAGE + OBJECT_BYTES)


def _in_threads(items: list[What], read: Callable[[What, memoryview], None], nbytes: int) -> None:
    def some(place: int) -> None:
        buffer = memoryview(mmap.mmap(-1, nbytes))  # begins at a page: O_DIRECT needs it
        for item in items[place::READERS]:
            read(item, buffer)

    with ThreadPoolExecutor(READERS) as threads:
        list(threads.map(some, range(READERS)))


@contextlib.contextmanager
def _open(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
