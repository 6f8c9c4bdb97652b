# SPDX-License-Identifier: Apache-2.0
"""The place of one process among the workers of a router."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import NamedTuple


class WorkerPlace(NamedTuple):
    """One of several equal processes that listen on one port."""

    router_id: str
    """What all workers of the router have in common. It is new at each start of the router."""
    folder: Path
    """A folder that only the router's user can enter. Workers have their sockets and metrics there."""
    number: int
    """From 0 on. A worker that is started again has the number of the one before it."""
    workers: int
    """Number of workers."""
    counts: mmap.mmap
    """The counts of all workers (`counts.new_table`)."""
    again: bool = False
    """Whether a worker with this number has ended."""

    @property
    def is_first(self) -> bool:
        """Whether this worker serves the admin API and talks to other routers."""
        return self.number == 0

    @property
    def address(self) -> str:
        """Where other workers hear this one."""
        return self._address(self.number)

    @property
    def others(self) -> tuple[str, ...]:
        """Where this worker hears the others."""
        return tuple(self._address(n) for n in range(self.workers) if n != self.number)

    def _address(self, number: int) -> str:
        return f"ipc://{self.folder}/{number}.load"
