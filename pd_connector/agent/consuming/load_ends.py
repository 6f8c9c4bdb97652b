# SPDX-License-Identifier: Apache-2.0
"""How loads and watched holds of a consumer have ended: for the engine, the metrics and the log."""

import logging
from collections.abc import Callable

from pd_connector.agent.consuming.outage import OutageWatch
from pd_connector.errors import Cause
from pd_connector.protocol.consuming.incoming import Finished, Held
from pd_connector.telemetry import Telemetry

logger = logging.getLogger("pd_connector.agent.consuming.load_ends")


class LoadEnds:
    """Is told the end of every load that is not an audit. Used by the agent's thread only.

    Args:
        outage: notices that nothing arrives any more.
        report: tells the engine.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        outage: OutageWatch,
        report: Callable[[Finished | Held], None],
    ) -> None:
        self._telemetry = telemetry
        self._outage = outage
        self._report = report

    def held(self, held: Held, now: float) -> None:
        """What was watched begins to come, or will not come."""
        if held.cause is not None:
            told = "no KV for request %s (%s): %s"
            self._failed(told, held.request, held.cause, held.detail, now)
        self._report(held)

    def finished(self, finished: Finished, now: float) -> None:
        """A load has ended, well or not."""
        if finished.cause is None:
            self._telemetry.count("received_transfers")
            self._telemetry.observe("transfer_seconds", finished.seconds)
            self._outage.succeeded()
        else:
            told = "KV of request %s did not arrive (%s): %s"
            self._failed(told, finished.request, finished.cause, finished.detail, now)
        self._report(finished)

    def _failed(self, told: str, request: str, cause: Cause, detail: str, now: float) -> None:
        self._telemetry.count("failed_transfers", cause=cause)
        if cause is not Cause.ABORTED:
            logger.log(self._outage.level, told, request, cause, detail)
        self._outage.failed(cause, detail, now)
