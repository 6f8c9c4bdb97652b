# SPDX-License-Identifier: Apache-2.0
"""A store of the pool that one test has for itself."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_connector.pool.store import tier_storage as tier_storage
from pd_connector.pool.store.catalog import Catalog
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space


def wait_for_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gives up on books that a keeper's thread holds, however long that waits for a processor."""
    monkeypatch.setitem(Catalog.transaction.__wrapped__.__kwdefaults__, "wait_s", 30.0)  # type: ignore[attr-defined]
    monkeypatch.setattr(tier_storage, "_PUBLISHES_S", 30.0)
    monkeypatch.setattr(tier_storage, "WAIT_S", 30.0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of a store that nobody disturbs."""
    wait_for_books(monkeypatch)


@pytest.fixture
def store(patient: None) -> Iterator[LocalStore]:
    """A store of 64 MiB in shared memory, without a disk."""
    folder = Path(tempfile.mkdtemp(prefix="pd-test-", dir="/dev/shm"))
    found = LocalStore(Space(folder / "pool", 64 << 20))
    yield found
    found.close()
    shutil.rmtree(folder)
