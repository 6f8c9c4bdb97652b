# SPDX-License-Identifier: Apache-2.0
"""How the loads of a consumer end: what the engine is told, what is counted and logged, and when failures are an outage.

An outage is reported once, with what to set.
"""

import logging
from collections import Counter
from collections.abc import Callable

from pd_connector.control.sockets import no_more_files
from pd_connector.errors import Cause
from pd_connector.hosts import is_loopback
from pd_connector.protocol.consuming.incoming import Finished, Held
from pd_connector.remedies import HARMLESS, remedy, told
from pd_connector.telemetry import Telemetry

logger = logging.getLogger("pd_connector.agent.consuming.outage")

OUTAGE_S = 60.0
"""Failures over this time, and no success between them, are an outage."""


class OutageWatch:
    """Told the end of every transfer of a consumer. Used by the agent's thread only.

    Attributes:
        failing: whether there is an outage.
    """

    def __init__(self) -> None:
        self.failing = False
        self._since: float | None = None
        self._causes: Counter[Cause] = Counter()

    @property
    def level(self) -> int:
        """The level on which one failure is logged. In an outage they are counted only."""
        return logging.DEBUG if self.failing else logging.WARNING

    def succeeded(self) -> None:
        """KV has arrived."""
        if self.failing:
            logger.info("KV arrives again")
        self.failing, self._since = False, None
        self._causes.clear()

    def failed(self, cause: Cause, detail: str, now: float) -> None:
        """A transfer has failed."""
        if cause in HARMLESS:
            return
        self._causes[cause] += 1
        if self._since is None:
            self._since = now
        if self.failing or now - self._since < OUTAGE_S:
            return
        self.failing = True
        worst = self._causes.most_common(1)[0][0]
        logger.error(
            "no KV has arrived for %.0f s, every prompt is computed here: %d transfers failed (%s). The last: %s. "
            "What to do: %s. (This is logged once. Until KV arrives, failures are only counted.)",
            now - self._since,
            self._causes.total(),
            told(self._causes),
            detail,
            remedy(worst),
        )


def named_for_what_it_is(host: str, cause: Cause, detail: str) -> str:
    """The detail of a failed session. Where the producer could not be reached because this process has too many open
    files, which libzmq reports as a refused connection, with that; else, at a loopback address, with what that means."""
    if cause is not Cause.UNREACHABLE:
        return detail
    if full := no_more_files():
        return f"{detail}: {full}"
    if not is_loopback(host):
        return detail
    return (
        f"{detail}: {host} is this machine itself. A prefill engine on another machine that tells it has no `host` "
        "of its own (config key, or PD_CONNECTOR_HOST)"
    )


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
