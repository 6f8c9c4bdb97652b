# SPDX-License-Identifier: Apache-2.0
"""The pace of a stream's tokens. It teaches the router the decode costs of engines that do not report them."""

from __future__ import annotations

import re
from collections.abc import Callable
from time import monotonic

from scheduler_plugins.cost.model import StepLoad
from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.request.resume import AnswerRecord

_USAGE_NAME = b'"completion_tokens"'
_USAGE = re.compile(_USAGE_NAME + rb"\s*:\s*(\d{1,9})")
FEWEST, MOST = 16, 64
"""Fewest and most tokens that a stream is watched for, without the first. Fewer say too little; more only delay the
result."""


class Pace:
    """Watches the beginning of one stream, and reports once."""

    def __init__(
        self,
        engine: BackendEngine,
        record: AnswerRecord | None,
        learnt: Callable[[BackendEngine, StepLoad, float], None],
    ) -> None:
        """Nothing has come yet.

        Args:
            engine: the answering engine.
            record: has noted the answer's tokens before each call of `note`; None: an event counts as one token.
            learnt: called with the load of a step and its duration in seconds.
        """
        self._engine = engine
        self._record = None if engine.kind is Kind.SGLANG else record
        self._learnt = learnt
        self._events = self._first = self._last = 0
        self._first_s = self._last_s = 0.0
        self._batch = self._context = 0
        self._watches = not engine.costs_reported

    def note(self, events: bytes) -> None:
        """These events came now."""
        self._events += events.count(b"data: {")
        if not self._watches:
            return
        tokens = self._events if self._record is None else self._record.tokens
        if tokens <= self._last:
            return
        self._last, self._last_s = tokens, monotonic()
        if not self._first:
            self._first, self._first_s = tokens, self._last_s
            self._batch, self._context = self._load()
        elif tokens - self._first >= MOST:
            self.end()

    @property
    def tokens(self) -> int:
        """Tokens of the answer so far; events of a stream whose tokens are not known."""
        return (self._record.tokens if self._record is not None else 0) or self._events

    def whole(self, answer: bytes) -> None:
        """The answer came at once."""
        match = _USAGE.search(answer, max(0, answer.rfind(_USAGE_NAME)))
        self._events = int(match[1]) if match else 0
        self._record = None

    def give_up(self) -> None:
        """Stop watching: the client delayed the stream, so its pace says nothing about the engine."""
        self._watches = False

    def end(self) -> None:
        """No more tokens will come."""
        steps = self._last - self._first
        if self._watches and steps >= FEWEST:
            batch, context = self._load()
            # A watched stretch is short, so the mean of the loads at its ends is its load.
            load = StepLoad(0, 0, (self._batch + batch + 1) // 2, (self._context + context) // 2)
            self._learnt(self._engine, load, (self._last_s - self._first_s) / steps)
        self._watches = False

    def _load(self) -> tuple[int, int]:
        engine = self._engine
        return engine.batch + engine.prefills, engine.context
