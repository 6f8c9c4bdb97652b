# SPDX-License-Identifier: Apache-2.0
"""Requests whose `kv_transfer_params` are invalid, or invalid in part. All are counted, few are logged."""

import logging
import time
from collections.abc import Callable

from pd_connector.errors import Cause
from pd_connector.telemetry import Telemetry

logger = logging.getLogger("pd_connector.vllm")

PAUSE_S = 60.0
"""Time between two log lines of one cause, in seconds. With a misconfigured proxy, every request would log a line."""


class IgnoredParams:
    """Used by vLLM's scheduler only."""

    def __init__(self, telemetry: Telemetry, clock: Callable[[], float] = time.monotonic) -> None:
        self._telemetry = telemetry
        self._clock = clock
        self._logged: dict[Cause, float] = {}
        self._unlogged: dict[Cause, int] = {}

    def note(
        self, request: str, cause: Cause, detail: str, then: str = "its prompt is computed here"
    ) -> None:
        """Count a request whose parameters are ignored, and log the cause and the consequence `then`."""
        self._telemetry.count("ignored_params", cause=cause)
        now = self._clock()
        if now - self._logged.get(cause, float("-inf")) < PAUSE_S:
            self._unlogged[cause] = self._unlogged.get(cause, 0) + 1
            return
        self._logged[cause] = now
        others = self._unlogged.pop(cause, 0)
        logger.warning(
            "request %s: kv_transfer_params ignored (%s): %s; %s%s",
            *(request, cause, detail, then),
            f" (and {others} more since the last such line)" if others else "",
        )
