# SPDX-License-Identifier: Apache-2.0
"""Folders of benchmarks' own pools."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pd_bench.report import BenchError
from pd_connector.pool.settings import memory_folder


@contextlib.contextmanager
def own_folder(within: Path | None = None) -> Iterator[Path]:
    """A pool's folder of its own, by default in the tmpfs that the pool uses. It is gone at the end."""
    parent = within or memory_folder().parents[1]
    try:
        folder = Path(tempfile.mkdtemp(prefix="pd-bench-", dir=parent))
    except OSError as error:
        raise BenchError(
            f"{parent}: {error.strerror}: name a folder in which this user can make files"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
