# SPDX-License-Identifier: Apache-2.0
"""Chunks of a disk are read past the kernel's cache, unless they are in it, and into any buffer."""

import contextlib
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from chunks import chain, content, save

from pd_connector.pool.store import parts
from pd_connector.pool.store.catalog_ops import DISK_TIER
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.parts import LocalReading

pytestmark = pytest.mark.usefixtures("patient")
Open = Callable[..., LocalStore]
NBYTES = (1 << 20) + 4096 + 77


@pytest.fixture
def reading(open_store: Open, tmp_path: Path) -> tuple[LocalReading, bytes]:
    """A part of a disk that no cache has."""
    store = open_store(disk=64 << 20)
    (key,) = chain("a", 1)
    save(store, [key], nbytes=NBYTES)
    store.maintenance.stop()  # its thread opens files, too
    assert store.maintenance.copy(key, DISK_TIER)
    folder = store._tier_storage.folders[DISK_TIER]
    entry = folder.entry(key)
    assert entry
    descriptor = folder.open_part(key, entry, "r0")
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return LocalReading(descriptor, NBYTES, "disk", lambda: None), content(key, "r0", NBYTES)


def aligned(nbytes: int, shift: int = 0) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes + shift))[shift : shift + nbytes]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    ("offset", "nbytes", "shift"),
    [
        (0, NBYTES, 0),
        (0, NBYTES, 16),
        (4096, 1 << 20, 0),
        (5, 1 << 20, 0),
        (4096, NBYTES - 4096, 0),
    ],
)
def test_every_byte_is_that_of_the_file(
    reading: tuple[LocalReading, bytes],
    monkeypatch: pytest.MonkeyPatch,
    direct: bool,
    cached: bool,
    offset: int,
    nbytes: int,
    shift: int,
) -> None:
    part, wanted = reading
    if not direct:  # as on a file system without direct reads
        monkeypatch.setattr(parts, "_DIRECT", os.O_RDONLY | os.O_DIRECTORY)
    with part:
        if cached:
            part.take(0, NBYTES // 2)
        buffer = aligned(nbytes, shift)
        part.into(buffer, offset)
        assert buffer == wanted[offset : offset + nbytes]


def descriptors_of(file: os.stat_result) -> int:
    """How often this process has a file open."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # others of this process come and go
            found += os.path.samestat(os.stat(f"/proc/self/fd/{name}"), file)
    return found


def test_no_descriptor_is_left(reading: tuple[LocalReading, bytes]) -> None:
    part, wanted = reading
    file = os.fstat(part.descriptor)
    with part:
        buffer = aligned(NBYTES)
        part.into(buffer, 0)
        assert descriptors_of(file) >= 1
    assert buffer == wanted
    assert descriptors_of(file) == 0
