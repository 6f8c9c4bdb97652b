# SPDX-License-Identifier: Apache-2.0
"""What one engine is busy with, counted by whoever sends it requests. No I/O, no clock.

The live router and the simulator keep the same counts: what they sent, and what they saw end. So a policy sees in
the simulation what it would see live.
"""

from __future__ import annotations

from typing import NamedTuple

from scheduler_plugins.router.policies.base import HEAVY_TOKENS


class _Prefill(NamedTuple):
    tokens: int  # that are not cached
    cost_s: float  # predicted


class _Decode(NamedTuple):
    context: int
    heavy: bool


class EngineLoad:
    """Counts of one engine. They change at once when a request is sent, not when the engine tells."""

    __slots__ = (
        "_busy_since_s",
        "_decodes",
        "_full_until_s",
        "_prefills",
        "_queued_s",
        "context",
        "heavy",
        "queued_tokens",
    )

    def __init__(self) -> None:
        self._prefills: dict[str, _Prefill] = {}
        self._decodes: dict[str, _Decode] = {}
        self._queued_s = 0.0
        self._busy_since_s = 0.0
        self._full_until_s = 0.0
        self.queued_tokens = 0
        """Prompt tokens to compute, cached ones left out."""
        self.context = 0
        """Tokens in the caches of the sequences that decode."""
        self.heavy = 0
        """Sequences that may generate more than `HEAVY_TOKENS` tokens."""

    @property
    def prefills(self) -> int:
        """Requests whose prompt is not computed yet."""
        return len(self._prefills)

    @property
    def batch(self) -> int:
        """Sequences that decode, those whose KV is on the way included."""
        return len(self._decodes)

    @property
    def open_requests(self) -> int:
        return len(self._prefills) + len(self._decodes)

    def queued_s(self, now_s: float) -> float:
        """Predicted seconds until all prompts are computed.

        The one under way was begun when the one before it ended, at the latest; what has passed since is subtracted. It
        may be late: then it counts nothing, and the others count as a whole.
        """
        if not self._prefills:
            return 0.0
        return max(0.0, self._queued_s - (now_s - self._busy_since_s))

    def accepts(self, now_s: float) -> bool:
        """Whether the engine has not said that it has no room until later than `now_s`."""
        return now_s >= self._full_until_s

    def refused(self, until_s: float) -> None:
        """The engine said that it has no room before this time."""
        self._full_until_s = max(self._full_until_s, until_s)

    def prefill_sent(self, request_id: str, tokens: int, cost_s: float, now_s: float) -> None:
        """A prompt was sent there; `tokens` of it are to be computed, in `cost_s` seconds as predicted."""
        if not self._prefills:
            self._busy_since_s = now_s
            self._queued_s = 0.0
        self._prefills[request_id] = _Prefill(tokens, cost_s)
        self._queued_s += cost_s
        self.queued_tokens += tokens

    def prefill_ended(self, request_id: str, now_s: float) -> None:
        """A prompt was computed, or given up. Unknown ids change nothing."""
        ended = self._prefills.pop(request_id, None)
        if ended is not None:
            self._queued_s -= ended.cost_s
            self.queued_tokens -= ended.tokens
            self._busy_since_s = now_s

    def decode_sent(self, request_id: str, tokens: int, max_tokens: int) -> None:
        """A request was sent there to decode: it has `tokens` tokens, and may generate `max_tokens` more."""
        heavy = max_tokens > HEAVY_TOKENS
        self._decodes[request_id] = _Decode(tokens, heavy)
        self.context += tokens
        self.heavy += heavy

    def decode_ended(self, request_id: str) -> None:
        """It got its last token, or was given up. Unknown ids change nothing."""
        ended = self._decodes.pop(request_id, None)
        if ended is not None:
            self.context -= ended.context
            self.heavy -= ended.heavy
