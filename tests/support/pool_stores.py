# SPDX-License-Identifier: Apache-2.0
"""A store of the pool that one test has for itself."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_connector.pool.store.holdings import Space
from pd_connector.pool.store.local import LocalStore


@pytest.fixture
def store() -> Iterator[LocalStore]:
    """A store of 64 MiB in shared memory, without a disk."""
    folder = Path(tempfile.mkdtemp(prefix="pd-test-", dir="/dev/shm"))
    found = LocalStore(Space(folder / "pool", 64 << 20))
    yield found
    found.close()
    shutil.rmtree(folder)
