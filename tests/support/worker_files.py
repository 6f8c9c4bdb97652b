# SPDX-License-Identifier: Apache-2.0
"""Which worker of pytest-xdist runs a file."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest


def files_together(config: pytest.Config, log: Any, together: Collection[str]) -> Any:
    """A scheduler that gives each file to one worker, and the files `together`, by their stems, to the same one.

    `--dist loadgroup` of xdist 3.8 does not: it names groups in a place where pytest 9.2 does not look.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            name = Path(nodeid.partition("::")[0]).stem
            return "together" if name in together else name

    return Files(config, log)
