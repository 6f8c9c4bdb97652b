# SPDX-License-Identifier: Apache-2.0
"""Stores in folders of their own."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.pool_stores import patient

from pd_connector.pool.store.local import LocalStore, Space

__all__ = ["patient"]

Open = Callable[..., LocalStore]


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder in shared memory."""
    path = Path(tempfile.mkdtemp(prefix="pd-pool-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def open_store(folder: Path, tmp_path: Path) -> Iterator[Open]:
    """Opens a store of `memory` bytes, and `disk` bytes if set, as every process of the host would."""
    with ExitStack() as opened:

        def opens(memory: int = 64 << 20, disk: int = 0) -> LocalStore:
            below = Space(tmp_path / "disk", disk) if disk else None
            store = LocalStore(Space(folder / "pool", memory), below)
            opened.callback(store.close)
            return store

        yield opens


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores of this process remove parts that wait for the others of their chunk at once, not after a minute."""
    monkeypatch.setattr("pd_connector.pool.store.tier_maintenance.STALE_S", 0.0)
