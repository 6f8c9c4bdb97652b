# SPDX-License-Identifier: Apache-2.0
"""The consequences of audits: producers that have passed, producers whose sessions end, logs and metrics."""

import logging
from collections.abc import Callable, Iterable

from pd_connector.agent.commands import Distrust
from pd_connector.agent.consuming.open_sessions import OpenSessions
from pd_connector.agent.consuming.outage import OutageWatch
from pd_connector.agent.consuming.session_keeper import SessionKeeper
from pd_connector.agent.resources import RankResources
from pd_connector.errors import Cause
from pd_connector.kv.model import ModelFacts, described
from pd_connector.protocol.consuming.audit import Comparison, Counterpart
from pd_connector.protocol.consuming.consumer import Consumer
from pd_connector.protocol.consuming.incoming import Finished

logger = logging.getLogger("pd_connector.agent.consuming.auditor")

PASSED = "passed"
"""The `cause` under which audits are counted that found nothing wrong."""


class Auditor:
    """Takes the end of every load that compares. Used by the agent's thread only.

    An engine that revokes late (`EngineSteps`) can overwrite pages before it says so. A comparison with such pages has no
    meaning. So a difference counts only when the engine has begun the step after the next: by then it has revoked all pages
    that it had overwritten.

    Args:
        report: takes the end of the load, after its result is known.
    """

    def __init__(
        self,
        resources: RankResources,
        sessions: OpenSessions,
        keeper: SessionKeeper,
        consumer: Consumer,
        outage: OutageWatch,
        report: Callable[[Finished], None],
    ) -> None:
        self._book = resources.audits
        self._steps = resources.steps
        self._facts = resources.identity.facts
        self._telemetry = resources.telemetry
        self._sessions = sessions
        self._keeper = keeper
        self._consumer = consumer
        self._outage = outage
        self._report = report
        self._doubtful: dict[
            str, tuple[Finished, int]
        ] = {}  # by request: and the step in which it ended
        self._ending: list[tuple[Counterpart, str]] = []  # sessions to end in this turn, and why

    @property
    def distrusted(self) -> int:
        """The number of ranks of producers whose KV was found wrong."""
        return self._book.distrusted if self._book is not None else 0

    def ended(self, finished: Finished, now: float) -> None:
        """A load that compares has ended."""
        if finished.cause is Cause.AUDIT and self._steps.late_revokes:
            self._doubtful[finished.request] = finished, self._steps.count
        else:
            self._conclude(finished, now)

    def dropped(self, request: str, now: float) -> None:
        """The engine has taken the request's pages back: a difference in them has no meaning."""
        if doubtful := self._doubtful.pop(request, None):
            detail = "the request was dropped"
            self._conclude(doubtful[0]._replace(cause=Cause.ABORTED, detail=detail), now)

    def tick(self, now: float) -> None:
        """Decide about differences whose pages were not taken back. End sessions with distrusted producers, after the
        last messages in them."""
        for request, (finished, step) in list(self._doubtful.items()):
            if self._steps.handled >= step + 2:
                del self._doubtful[request]
                self._conclude(finished, now)
        ending, self._ending = self._ending, []
        for producer, why in ending:
            if session := self._sessions.get(producer.source):
                self._keeper.end_session(session, Cause.AUDIT, why, now)

    def change_model(self, facts: ModelFacts) -> None:
        """This engine serves other weights: every producer has to pass again."""
        self._facts = facts
        if self._book is not None:
            self._book.forget_passed()

    def know_weights(self, facts: ModelFacts) -> None:
        """All bytes of this engine's weights were read."""
        self._facts = facts

    def distrust(self, command: Distrust) -> None:
        """Another rank of this engine has found that a producer's KV is wrong."""
        ranks = (rank for rank in self._consumer.producers() if rank.engine_id == command.engine_id)
        self._distrust(ranks, command.adapter, command.why)

    def _conclude(self, finished: Finished, now: float) -> None:
        comparison, cause = finished.comparison, finished.cause
        assert comparison is not None
        self._telemetry.count("audits", cause=cause or PASSED)
        if cause is None:
            for producer in comparison.counterparts if self._book is not None else ():
                self._book.passed(producer, comparison.adapter)  # type: ignore[union-attr]
            self._outage.succeeded()
            names = ", ".join(sorted({rank.engine_id for rank in comparison.counterparts}))
            logger.info("audit of engine %s passed: %s", names or "(unnamed)", comparison)
            finished = self._more(finished, comparison)
        elif cause is Cause.AUDIT and comparison.counterparts:
            ours = described(self._facts)
            theirs = ", ".join(sorted({rank.model_text for rank in comparison.counterparts}))
            detail = f"{finished.detail}; the model here: {ours}; at the producer: {theirs}"
            finished = finished._replace(detail=detail)
            self._telemetry.count("failed_transfers", cause=cause)
            self._outage.failed(cause, detail, now)
            names = ", ".join(sorted({rank.engine_id for rank in comparison.counterparts}))
            adapter = comparison.adapter
            name, of_adapter = adapter.partition(" ")[0], ", or the adapter has other content"
            logger.error(
                "audit: KV of engine %s%s is wrong: %s (%s). Prompts for it are computed here until one "
                "of the two engines restarts%s (docs/trust.md#audit)",
                names or "(unnamed)",
                f" with adapter {name}" if adapter else "",
                detail,
                comparison,
                of_adapter if adapter else "",
            )
            self._distrust(comparison.counterparts, adapter, detail)
        elif cause is not Cause.ABORTED:
            self._telemetry.count("failed_transfers", cause=cause)
            self._outage.failed(cause, finished.detail, now)
            logger.log(
                self._outage.level,
                "audit with request %s ended without a result (%s): %s; another request will be audited",
                finished.request,
                cause,
                finished.detail,
            )
        self._report(finished)

    def _more(self, finished: Finished, comparison: Comparison) -> Finished:
        """Report that the next prompt is audited, too, if KV can also come by a path that has not passed an audit."""
        for producer in comparison.counterparts:
            if path := self._consumer.unaudited(producer.source, comparison.adapter):
                detail = f"KV can come by another path ({path}): the next prompt is audited, too"
                return finished._replace(cause=Cause.UNAUDITED, detail=detail)
        return finished

    def _distrust(self, producers: Iterable[Counterpart], adapter: str, why: str) -> None:
        """Use no KV of these producers any more. Their sessions end, so that chunks on their way are not used either."""
        for producer in producers:
            if self._book is not None:
                self._book.distrust(producer.source, producer.epoch, adapter, why)
            self._ending.append((producer, why))
