# SPDX-License-Identifier: Apache-2.0
"""Refused sessions: all are counted, and a few of each cause are logged. Any program that reaches the port can cause them."""

import logging
from dataclasses import dataclass

from pd_connector.errors import Cause
from pd_connector.telemetry import Telemetry

logger = logging.getLogger("pd_connector.agent.producing.refusals")

EVERY_S = 60.0
MOST_LINES = 5
"""Lines of one cause within `EVERY_S`; the rest become one line, once that time is over."""


@dataclass
class _Told:
    since: float
    lines: int = 0
    unsaid: int = 0


class Refusals:
    """Used by the agent's thread only."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._told: dict[Cause, _Told] = {}

    def refused(self, cause: Cause, detail: str, now: float) -> None:
        """A session is refused; `detail` may repeat what a stranger sent."""
        self._telemetry.count("rejected_sessions", cause=cause)
        told = self._told.setdefault(cause, _Told(now))
        if now - told.since >= EVERY_S:
            if told.unsaid:
                logger.warning("sessions refused (%s): %d more of them", cause, told.unsaid)
            told = self._told[cause] = _Told(now)
        if told.lines == MOST_LINES:
            told.unsaid += 1
            return
        told.lines += 1
        logger.warning("session refused (%s): %s", cause, one_line(detail))


def one_line(text: str) -> str:
    """The text with its control characters and ends of lines escaped, whatever a log's reader takes for one."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
