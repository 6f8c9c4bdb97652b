# SPDX-License-Identifier: Apache-2.0
"""Policy and classes of a running engine. They are read at the start, and again when the file changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from scheduler_plugins.order.base import QueuePolicy
from scheduler_plugins.order.registry import create
from scheduler_plugins.qos.classes import QosClass
from scheduler_plugins.qos.file import SchedulerSection, WatchedFile

logger = logging.getLogger("scheduler_plugins")


class LiveSettings:
    """The present section `scheduler`."""

    def __init__(self, path: Path | None, without: SchedulerSection) -> None:
        """Read the file, if one is named.

        Args:
            path: the YAML file; None: there is none.
            without: the settings without a file.

        Raises:
            QosError: the file is invalid.
        """
        self._file = WatchedFile(path) if path else None
        self._section = self._file.current.scheduler if self._file else without

    @property
    def classes(self) -> Sequence[QosClass]:
        return self._section.qos_classes

    @property
    def max_overtaken(self) -> int:
        return self._section.max_overtaken

    def policy(self) -> QueuePolicy:
        """A new policy object."""
        return create(self._section.policy, self._section.lambda_)

    def changed(self) -> bool:
        """Whether the settings changed; see `WatchedFile.poll`."""
        file = self._file.poll(time.monotonic()) if self._file else None
        if file is None or file.scheduler == self._section:
            return False
        self._section = file.scheduler
        logger.info("the scheduler's settings have changed: %s", self._section)
        return True
