# SPDX-License-Identifier: Apache-2.0
"""The outcome of each class's requests: predicted and actual time to the first token."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_plugins.admission.post import ClassRecord

_TOGETHER = 256
"""The most first tokens that wait to be counted. The limit is for engines that post nothing and so never ask."""
_KEPT = 0.98
"""Weight of the past in the mean number of generated tokens, applied at the end of each request."""


@dataclass(slots=True)
class _Open:
    qos: str
    arrival_s: float
    predicted_s: float
    first_token_s: float | None = None


class Ledger:
    """Requests by id, from the scheduler's `add_request` to their end.

    All times are by the clock of the requests' arrival, which is the machine's own.
    """

    def __init__(self) -> None:
        self._classes: dict[str, ClassRecord] = {}
        self._answered: list[_Open] = []
        """Requests that have a first token and are not in `_classes` yet."""
        self.awaited: dict[str, None] = {}
        """Ids of requests that have no token yet."""
        self.generated = 0.0
        """Mean number of generated tokens, over requests that generate more than one; 0: unknown."""
        self._open: dict[str, _Open] = {}
        self._weight = 0.0

    @property
    def classes(self) -> dict[str, ClassRecord]:
        """The counts for the requests of each class."""
        self._count()
        return self._classes

    def arrived(self, request_id: str, qos: str, arrival_s: float, predicted_s: float) -> None:
        """Note a new request. `predicted_s` is its TTFT, counted from its arrival."""
        self._open[request_id] = _Open(qos, arrival_s, predicted_s)
        self.awaited[request_id] = None

    def token(self, request_id: str, now_s: float) -> None:
        """Note that the request has a token. Only the first token counts."""
        if request_id not in self.awaited:
            return
        del self.awaited[request_id]
        request = self._open[request_id]
        request.first_token_s = now_s
        self._answered.append(request)
        if len(self._answered) >= _TOGETHER:
            self._count()

    def age_s(self, request_id: str, now_s: float) -> float:
        """Time since the first token; 0 if there is no token yet."""
        request = self._open.get(request_id)
        if request is None or request.first_token_s is None:
            return 0.0
        return max(0.0, now_s - request.first_token_s)  # the clock may have been set back

    def gone(self, request_id: str, tokens: int, most_tokens: int) -> None:
        """Note that the request ended with `tokens` of at most `most_tokens` tokens, or was aborted."""
        request = self._open.pop(request_id, None)
        self.awaited.pop(request_id, None)
        if request is None or request.first_token_s is None or most_tokens < 2:
            return
        # At first this is the true mean. A plain decay from 0 would need a hundred requests to warm up.
        self._weight = self._weight * _KEPT + 1.0
        self.generated += (tokens - self.generated) / self._weight

    def _count(self) -> None:
        answered, self._answered = self._answered, []
        for request in answered:
            record = self._classes.get(request.qos)
            if record is None:
                record = self._classes[request.qos] = ClassRecord()
            assert request.first_token_s is not None
            record.predicted_ttft.observe(request.predicted_s)
            record.ttft.observe(request.first_token_s - request.arrival_s)
