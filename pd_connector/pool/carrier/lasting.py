# SPDX-License-Identifier: Apache-2.0
"""Threads that continue after an unexpected error: a carrier has one thread of each kind, and needs all of them."""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger("pd_connector.pool.carrier")

PAUSE_S = 1.0
"""Pause after a step that has failed, in seconds."""


class LastingThread(threading.Thread):
    """Calls `step` again and again until `ends` is set. An error is logged and counted, and the next step follows after a pause.

    Args:
        failed: is called after an error, before the pause.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], None],
        ends: threading.Event,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._step, self._ends, self._failed = step, ends, failed
        self.errors = 0
        self.start()

    def run(self) -> None:
        while not self._ends.is_set():
            try:
                self._step()
            except Exception:
                self.errors += 1
                logger.exception("carrier: %s failed; it goes on in %g s", self.name, PAUSE_S)
                self._failed()
                self._ends.wait(PAUSE_S)
