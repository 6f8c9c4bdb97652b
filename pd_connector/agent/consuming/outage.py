# SPDX-License-Identifier: Apache-2.0
"""The ends of a consumer's loads: reports to the engine, counts, logs, and outages.

An outage is logged once, with what to set.
"""

import logging
from collections import Counter
from collections.abc import Callable

from pd_connector.control.sockets import no_more_files
from pd_connector.errors import Cause
from pd_connector.hosts import is_loopback
from pd_connector.protocol.consuming.incoming import Finished, Held
from pd_connector.remedies import HARMLESS, counts_text, remedy
from pd_connector.telemetry import Telemetry

logger = logging.getLogger("pd_connector.agent.consuming.outage")

OUTAGE_S = 60.0
"""Seconds. Failures over this time without a success are an outage."""


class OutageWatch:
    """Notices outages from the ends of all transfers of a consumer. Used by the agent's thread only.

    Attributes:
        failing: there is an outage.
    """

    def __init__(self) -> None:
        self.failing = False
        self._since: float | None = None
        self._causes: Counter[Cause] = Counter()

    @property
    def level(self) -> int:
        """The log level of a failure. In an outage failures are only counted."""
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
            counts_text(self._causes),
            detail,
            remedy(worst),
        )


def named_for_what_it_is(host: str, cause: Cause, detail: str) -> str:
    """The error detail of a failed session. If the producer was not reached, a likely reason is added: too many open
    files in this process (libzmq reports that as a refused connection), or an address that is this machine's own."""
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
    """Takes the end of every load that is not an audit. Used by the agent's thread only.

    Args:
        outage: notices that no KV arrives any more.
        report: reports to the engine.
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
        """KV of a watched hold begins to come, or will not come."""
        if held.cause is not None:
            text = "no KV for request %s (%s): %s"
            self._failed(text, held.request, held.cause, held.detail, now)
        self._report(held)

    def finished(self, finished: Finished, now: float) -> None:
        """A load has ended, with success or without."""
        if finished.cause is None:
            self._telemetry.count("received_transfers")
            self._telemetry.observe("transfer_seconds", finished.seconds)
            self._outage.succeeded()
        else:
            text = "KV of request %s did not arrive (%s): %s"
            self._failed(text, finished.request, finished.cause, finished.detail, now)
        self._report(finished)

    def _failed(self, text: str, request: str, cause: Cause, detail: str, now: float) -> None:
        self._telemetry.count("failed_transfers", cause=cause)
        if cause is not Cause.ABORTED:
            logger.log(self._outage.level, text, request, cause, detail)
        self._outage.failed(cause, detail, now)
