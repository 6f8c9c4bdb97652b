# SPDX-License-Identifier: Apache-2.0
"""The pool of this host, as an engine's config names it."""

import functools
import os
from pathlib import Path
from typing import Any

from pd_connector.pool.store.base import Store
from pd_connector.pool.store.local import LocalStore, Space


@functools.cache
def _opened(root: Path) -> Store:
    root.mkdir(0o700, exist_ok=True)
    return LocalStore(Space(root / "pool", 1 << 30))


def open_store(value: bool | dict[str, Any]) -> Store | None:
    """The store of the config key `pool`; None if that is off."""
    if not value:
        return None
    root = Path(os.environ.get("PD_TEST_POOL", f"/dev/shm/pd_connector-{os.getuid()}"))
    return _opened(root)
