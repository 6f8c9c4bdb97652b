# SPDX-License-Identifier: Apache-2.0
"""Events of one request for role policies: its arrival, its first token, its end, or its refusal."""

from __future__ import annotations

import asyncio
from math import inf

from scheduler_plugins.router.engines.observed import Observer
from scheduler_plugins.router.policies.base import Request
from scheduler_plugins.router.request.client_request import ParsedRequest


class RequestEvents:
    """Notes each event of one request once, whatever its attempts do. Requests that generate nothing are not noted."""

    def __init__(self, history: Observer, parsed: ParsedRequest) -> None:
        self._history = history
        self._parsed = parsed
        self._clock = asyncio.get_running_loop().time
        self._notes = parsed.generates
        self._first_s: float | None = None

    @property
    def _request(self) -> Request:
        return self._parsed.request

    def arrived(self) -> None:
        """The request has come, and its length is known as well as it will be."""
        if self._notes:
            request = self._request
            self._history.arrived(
                self._clock(), request.group, request.tokens, request.ttft_slo_s, request.tpot_slo_s
            )

    def first_token(self, fresh_tokens: int) -> None:
        """The first token has come. `fresh_tokens`: tokens of the prompt that were computed for it."""
        if not self._notes or self._first_s is not None:
            return
        now, request = self._clock(), self._request
        self._first_s = now
        self._history.prefilled(
            now, request.group, fresh_tokens, now - self._parsed.arrived, request.ttft_slo_s
        )

    def answered(self, tokens: int) -> None:
        """The client has its whole answer of `tokens` tokens; 0: they were not counted."""
        if not self._notes or self._first_s is None:
            return
        now, request, steps = self._clock(), self._request, tokens - 1
        tpot_s, slo_s = (
            ((now - self._first_s) / steps, request.tpot_slo_s) if steps > 0 else (0.0, inf)
        )
        self._history.answered(now, request.group, tokens, tpot_s, slo_s)

    def refused(self) -> None:
        """The request was refused for lack of room or time."""
        if self._notes:
            self._history.refused(self._clock(), self._request.group)
