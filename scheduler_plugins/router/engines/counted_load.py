# SPDX-License-Identifier: Apache-2.0
"""What one engine is busy with, counted by whoever sends it requests. No I/O, no clock.

The live router and the simulator keep the same counts: what they sent, and what they saw end. So a policy sees in
the simulation what it would see live.
"""

from __future__ import annotations

from math import copysign
from typing import NamedTuple

from scheduler_plugins.router.engines.others import Count, NoOthers, Others
from scheduler_plugins.router.policies.base import HEAVY_TOKENS

KNOWN_AFTER_S = 0.25
"""An engine's report may not yet know of what was sent to it this long before."""


class _Prefill(NamedTuple):
    tokens: int  # that are not cached
    cost_s: float  # predicted
    sent_s: float


class Correction(NamedTuple):
    """By how much an engine's own word differed from the counts when it came."""

    queued_s: float = 0.0
    batch: int = 0
    context: int = 0
    at_s: float = 0.0


class _Decode(NamedTuple):
    context: int
    heavy: bool


class EngineLoad:
    """Counts of one engine. They change at once when a request is sent, not when the engine tells."""

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
        """By how much the engine's own word differed from all these counts."""
        self.others: Others = NoOthers()
        """What others have sent there. All counts below are sums over them and this process."""

    @property
    def open_exchanges(self) -> int:
        """HTTP requests open to it."""
        return self._open + int(self.others.sum(Count.OPEN))

    @property
    def prefills(self) -> int:
        """Requests whose prompt is not computed yet."""
        return len(self._prefills) + int(self.others.sum(Count.PREFILLS))

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens to compute, cached ones left out."""
        return self._queued_tokens + int(self.others.sum(Count.QUEUED_TOKENS))

    @property
    def batch(self) -> int:
        """Sequences that decode, those whose KV is on the way included."""
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
        """So many exchanges with it were opened; -1: one was closed."""
        self._open += more
        self._tell()

    def queued_s(self, now_s: float) -> float:
        """Predicted seconds until all prompts are computed.

        The one under way was begun when the one before it ended, at the latest; what has passed since is subtracted. It
        may be late: then it counts nothing, and the others count as a whole.
        """
        own_s = self._all_queued_s - (now_s - self._all_busy_since_s) if self.prefills else 0.0
        told_s, passed_s = self.correction.queued_s, now_s - self.correction.at_s
        if not told_s:
            return max(0.0, own_s)
        # Work of others is done meanwhile; and what was predicted too long is less wrong by and by.
        left_s = copysign(max(0.0, abs(told_s) - passed_s), told_s)
        return max(0.0, max(0.0, own_s) + left_s)

    @property
    def _all_queued_s(self) -> float:
        own_s = self._queued_s if self._prefills else 0.0
        return own_s + self.others.sum(Count.QUEUED_S)

    @property
    def _all_busy_since_s(self) -> float:
        """When a prompt began or ended there last, whoever sent it."""
        return max(self._busy_since_s, self.others.latest(Count.BUSY_SINCE_S))

    def accepts(self, now_s: float) -> bool:
        """Whether the engine has not said that it has no room until later than `now_s`."""
        return now_s >= self._full_until_s

    def refused(self, until_s: float) -> None:
        """The engine said that it has no room before this time."""
        self._full_until_s = max(self._full_until_s, until_s)

    def told(self, queued_s: float, batch: int, context: int, now_s: float) -> None:
        """The engine has said how much it has. It holds until it says so again.

        What was sent in the last `KNOWN_AFTER_S` is not counted against it: it may not know of that yet.

        Args:
            queued_s: seconds of prefill that it has.
            batch: sequences that decode there, with `context` tokens in their caches.
        """
        known_s = sum(
            one.cost_s for one in self._prefills.values() if one.sent_s <= now_s - KNOWN_AFTER_S
        )
        known_s += self.others.sum(Count.QUEUED_S)  # nobody knows when each of those was sent
        under_way_s = min(known_s, now_s - self._all_busy_since_s) if known_s else 0.0
        self.correction = Correction(
            queued_s - max(0.0, known_s - under_way_s),
            max(0, batch - self._all_decodes),
            max(0, context - self._all_context),
            now_s,
        )

    def told_requests(self, waiting: int, running: int, now_s: float) -> None:
        """The engine has said how many requests it has, and nothing of their length.

        Those that the router did not send are taken to be like those it did.
        """
        prefills, decodes = self.prefills, self._all_decodes
        # Prompts of ours may wait or run, and so may sequences of ours whose KV is on its way.
        others = max(0, waiting + running - prefills - decodes)
        queued = min(others, max(0, waiting - prefills))
        mean_s = self._all_queued_s / prefills if prefills else 0.0
        batch = others - queued
        context = self._all_context * batch // max(1, decodes)
        self.correction = Correction(queued * mean_s, batch, context, now_s)

    def prefill_sent(self, request_id: str, tokens: int, cost_s: float, now_s: float) -> None:
        """A prompt was sent there; `tokens` of it are to be computed, in `cost_s` seconds as predicted."""
        if not self.prefills:
            self._busy_since_s = now_s
        if not self._prefills:
            self._queued_s = 0.0
        self._prefills[request_id] = _Prefill(tokens, cost_s, now_s)
        self._queued_s += cost_s
        self._queued_tokens += tokens
        self._tell()

    def prefill_ended(self, request_id: str, now_s: float) -> None:
        """A prompt was computed, or given up. Unknown ids change nothing."""
        ended = self._prefills.pop(request_id, None)
        if ended is not None:
            self._queued_s -= ended.cost_s
            self._queued_tokens -= ended.tokens
            self._busy_since_s = now_s
            self._tell()

    def decode_sent(self, request_id: str, tokens: int, max_tokens: int) -> None:
        """A request was sent there to decode: it has `tokens` tokens, and may generate `max_tokens` more."""
        heavy = max_tokens > HEAVY_TOKENS
        self._decodes[request_id] = _Decode(tokens, heavy)
        self._sent_context += tokens
        self._heavy += heavy
        self._tell()

    def decode_ended(self, request_id: str) -> None:
        """It got its last token, or was given up. Unknown ids change nothing."""
        ended = self._decodes.pop(request_id, None)
        if ended is not None:
            self._sent_context -= ended.context
            self._heavy -= ended.heavy
            self._tell()

    def counts(self) -> tuple[float, ...]:
        """What this process has sent there, in the order of `Count`."""
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
    """The counts of an engine as its view shows them to policies (`policies.base.EngineView`)."""

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
