# SPDX-License-Identifier: Apache-2.0
"""The load of one engine, counted by the sender of its requests. No I/O, no clock.

The live router and the simulator keep the same counts of requests sent and ended, so a policy sees the same numbers
in both.
"""

from __future__ import annotations

from math import copysign
from typing import NamedTuple

from scheduler_plugins.router.engines.others import Count, NoOthers, Others
from scheduler_plugins.router.policies.base import HEAVY_TOKENS

KNOWN_AFTER_S = 0.25
"""An engine's report may miss requests that were sent less than this time before it."""


class _Prefill(NamedTuple):
    tokens: int  # that are not cached
    cost_s: float  # predicted
    sent_s: float


class Correction(NamedTuple):
    """The difference between an engine's last report and the counts when it came."""

    queued_s: float = 0.0
    batch: int = 0
    context: int = 0
    at_s: float = 0.0


class _Decode(NamedTuple):
    context: int
    heavy: bool


class EngineLoad:
    """Counts of one engine. They change at once when a request is sent, not when the engine reports."""

    __slots__ = (
        "_busy_since_s",
        "_decodes",
        "_full_until_s",
        "_heavy",
        "_open",
        "_prefills",
        "_queued_s",
        "_queued_tokens",
        "_sent_context",
        "correction",
        "others",
    )

    def __init__(self) -> None:
        self._prefills: dict[str, _Prefill] = {}
        self._decodes: dict[str, _Decode] = {}
        self._queued_s = 0.0
        self._busy_since_s = 0.0
        self._full_until_s = 0.0
        self._sent_context = 0
        self._queued_tokens = 0
        self._heavy = 0
        self._open = 0
        self.correction = Correction()
        """The difference between the engine's last report and these counts."""
        self.others: Others = NoOthers()
        """Counts of other workers and routers. All counts below are sums over them and this process."""

    @property
    def open_exchanges(self) -> int:
        """Open HTTP requests to the engine."""
        return self._open + int(self.others.sum(Count.OPEN))

    @property
    def own_open(self) -> int:
        """Open HTTP requests of this process."""
        return self._open

    @property
    def prefills(self) -> int:
        """Requests whose prompt is not computed yet."""
        return len(self._prefills) + int(self.others.sum(Count.PREFILLS))

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens to compute, without cached ones."""
        return self._queued_tokens + int(self.others.sum(Count.QUEUED_TOKENS))

    @property
    def batch(self) -> int:
        """Sequences that decode. A sequence whose KV is on its way counts."""
        return max(0, self._all_decodes + self.correction.batch)

    @property
    def context(self) -> int:
        """Tokens in the caches of the sequences that decode."""
        return max(0, self._all_context + self.correction.context)

    @property
    def heavy(self) -> int:
        """Sequences that may generate more than `HEAVY_TOKENS` tokens."""
        return self._heavy + int(self.others.sum(Count.HEAVY))

    @property
    def open_requests(self) -> int:
        return self.prefills + self._all_decodes

    @property
    def _all_decodes(self) -> int:
        return len(self._decodes) + int(self.others.sum(Count.DECODES))

    @property
    def _all_context(self) -> int:
        return self._sent_context + int(self.others.sum(Count.CONTEXT))

    def opened(self, more: int) -> None:
        """`more` exchanges with the engine were opened; -1: one was closed."""
        self._open += more
        self._tell()

    def queued_s(self, now_s: float) -> float:
        """Predicted seconds until all prompts are computed.

        The prompt under way began at the latest when the preceding prompt ended. The time since then is subtracted from
        its prediction, down to 0. The other prompts count in full.
        """
        own_s = self._all_queued_s - (now_s - self._all_busy_since_s) if self.prefills else 0.0
        told_s, passed_s = self.correction.queued_s, now_s - self.correction.at_s
        if not told_s:
            return max(0.0, own_s)
        # The correction shrinks with time: the engine works off requests of others, and errors of the prediction
        # pass.
        left_s = copysign(max(0.0, abs(told_s) - passed_s), told_s)
        return max(0.0, max(0.0, own_s) + left_s)

    @property
    def _all_queued_s(self) -> float:
        own_s = self._queued_s if self._prefills else 0.0
        return own_s + self.others.sum(Count.QUEUED_S)

    @property
    def _all_busy_since_s(self) -> float:
        """When the engine last began or ended a prompt of any sender."""
        return max(self._busy_since_s, self.others.latest(Count.BUSY_SINCE_S))

    def accepts(self, now_s: float) -> bool:
        """False while the engine's last "no room" still holds."""
        return now_s >= self._full_until_s

    def refused(self, until_s: float) -> None:
        """The engine said that it has no room until this time."""
        self._full_until_s = max(self._full_until_s, until_s)

    def reported(self, queued_s: float, batch: int, context: int, now_s: float) -> None:
        """Correct the counts by the engine's report. The correction holds until the next report.

        Requests of the last `KNOWN_AFTER_S` are left out of the comparison, as the report may miss them.

        Args:
            queued_s: seconds of prefill queued at the engine.
            batch: sequences that decode at the engine, with `context` tokens in their caches.
        """
        known_s = sum(
            prefill.cost_s
            for prefill in self._prefills.values()
            if prefill.sent_s <= now_s - KNOWN_AFTER_S
        )
        known_s += self.others.sum(Count.QUEUED_S)  # when each of those was sent is unknown
        under_way_s = min(known_s, now_s - self._all_busy_since_s) if known_s else 0.0
        self.correction = Correction(
            queued_s - max(0.0, known_s - under_way_s),
            max(0, batch - self._all_decodes),
            max(0, context - self._all_context),
            now_s,
        )

    def reported_requests(self, waiting: int, running: int, now_s: float) -> None:
        """Correct the counts by the engine's number of requests. Their lengths are unknown.

        Requests of other senders are assumed to have the mean length of the router's own requests.
        """
        prefills, decodes = self.prefills, self._all_decodes
        # Our prompts may wait or run at the engine. So may our sequences whose KV is on its way.
        others = max(0, waiting + running - prefills - decodes)
        queued = min(others, max(0, waiting - prefills))
        mean_s = self._all_queued_s / prefills if prefills else 0.0
        batch = others - queued
        context = self._all_context * batch // max(1, decodes)
        self.correction = Correction(queued * mean_s, batch, context, now_s)

    def prefill_sent(self, request_id: str, tokens: int, cost_s: float, now_s: float) -> None:
        """A prompt was sent to the engine. It has `tokens` uncached tokens, which take `cost_s` seconds as
        predicted."""
        if not self.prefills:
            self._busy_since_s = now_s
        if not self._prefills:
            self._queued_s = 0.0
        self._prefills[request_id] = _Prefill(tokens, cost_s, now_s)
        self._queued_s += cost_s
        self._queued_tokens += tokens
        self._tell()

    def prefill_ended(self, request_id: str, now_s: float) -> None:
        """A prompt was computed or given up. Unknown ids change nothing."""
        ended = self._prefills.pop(request_id, None)
        if ended is not None:
            self._queued_s -= ended.cost_s
            self._queued_tokens -= ended.tokens
            self._busy_since_s = now_s
            self._tell()

    def decode_sent(self, request_id: str, tokens: int, max_tokens: int) -> None:
        """A request was sent to the engine to decode. It has `tokens` tokens, and may generate `max_tokens` more."""
        heavy = max_tokens > HEAVY_TOKENS
        self._decodes[request_id] = _Decode(tokens, heavy)
        self._sent_context += tokens
        self._heavy += heavy
        self._tell()

    def decode_ended(self, request_id: str) -> None:
        """A request got its last token or was given up. Unknown ids change nothing."""
        ended = self._decodes.pop(request_id, None)
        if ended is not None:
            self._sent_context -= ended.context
            self._heavy -= ended.heavy
            self._tell()

    def counts(self) -> tuple[float, ...]:
        """The counts of this process alone, in the order of `Count`."""
        return (
            self._open,
            len(self._prefills),
            self._queued_s if self._prefills else 0.0,
            self._busy_since_s,
            self._queued_tokens,
            len(self._decodes),
            self._sent_context,
            self._heavy,
        )

    def _tell(self) -> None:
        self.others.tell(self.counts())


class Loaded:
    """The counts of an engine as policies see them (`policies.base.EngineView`)."""

    load: EngineLoad

    @property
    def open_requests(self) -> int:
        return self.load.open_requests

    @property
    def queued_tokens(self) -> int:
        return self.load.queued_tokens

    @property
    def prefills(self) -> int:
        return self.load.prefills

    @property
    def batch(self) -> int:
        return self.load.batch

    @property
    def context(self) -> int:
        return self.load.context

    @property
    def heavy(self) -> int:
        return self.load.heavy
