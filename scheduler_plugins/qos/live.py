# SPDX-License-Identifier: Apache-2.0
"""Policy and classes of a running engine. They are read at the start, and again when the file changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from scheduler_plugins.order.base import QueuePolicy
from scheduler_plugins.order.registry import create
from scheduler_plugins.qos.classes import QosClass, QosError
from scheduler_plugins.qos.file import SchedulerSection, WatchedFile

logger = logging.getLogger("scheduler_plugins")

LOOK_EVERY_S = 1.0


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
        self._look_s = 0.0
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
        """Whether the settings changed. Checks the file at most once a second.

        If the file is invalid, the log says so, and the old settings stay.
        """
        if self._file is None or (now_s := time.monotonic()) < self._look_s:
            return False
        self._look_s = now_s + LOOK_EVERY_S
        try:
            file = self._file.changed()
        except QosError as error:
            logger.error(
                "the changed settings cannot be used, so the scheduler keeps the old settings: %s",
                error,
            )
            return False
        if file is None or file.scheduler == self._section:
            return False
        self._section = file.scheduler
        logger.info("the scheduler's settings have changed: %s", self._section)
        return True
