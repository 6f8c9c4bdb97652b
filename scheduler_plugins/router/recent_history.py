# SPDX-License-Identifier: Apache-2.0
"""The last 15 minutes of a router in short periods: speed of answers, and KV on its way. The live page draws them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

BEAT_S = 10.0
"""Length of a period."""
KEPT = 90
"""Periods that are kept: 15 minutes."""
_MOST_TIMES = 500
"""Most times of a period that its quantiles are taken from. A random part is kept if there are more."""


class Moved(msgspec.Struct, frozen=True):
    """What one engine has moved between two looks at its metrics."""

    seconds: float = 0.0
    received_bytes: float = 0.0
    sent_chunks: float = 0.0
    early_chunks: float = 0.0  # those sent while their prompt was computed
    pool_hits: float = 0.0  # chunks
    codecs: dict[str, float] = {}  # transfers asked for, by codec


class Times(NamedTuple):
    """Quantiles of times in seconds."""

    median_s: float
    high_s: float  # the 95th percentile


class Beat(msgspec.Struct, frozen=True):
    """What happened in one period that has ended."""

    number: int  # the time at its start, in periods
    arrivals: int = 0
    refusals: int = 0
    overflows: int = (
        0  # prompts that went to engines without a GPU, because all others would be late
    )
    ttft: Times | None = None  # None: no request got its first token
    tpot: Times | None = None
    received_bytes: float = 0.0
    sent_chunks: float = 0.0
    early_chunks: float = 0.0
    pool_hits: float = 0.0  # chunks
    codecs: dict[str, float] = {}  # transfers asked for, by codec
    outcomes: dict[str, float] = {}  # requests to pairs that have ended, by outcome


@dataclass
class _Sample:
    """A random part of some times."""

    random: Random
    seen: int = 0
    kept: list[float] = field(default_factory=list)

    def add(self, time_s: float) -> None:
        self.seen += 1
        if len(self.kept) < _MOST_TIMES:
            self.kept.append(time_s)
        elif (place := self.random.randrange(self.seen)) < _MOST_TIMES:
            self.kept[place] = time_s

    def times(self) -> Times | None:
        ordered = sorted(self.kept)
        if not ordered:
            return None
        return Times(ordered[len(ordered) // 2], ordered[int(0.95 * (len(ordered) - 1) + 0.5)])


class RecentHistory:
    """Sums of the last periods. `now_s` is the event loop's clock, which all processes of a machine share."""

    def __init__(self) -> None:
        self._beats: deque[Beat] = deque(maxlen=KEPT)
        self._random = Random()
        self._open = Beat(0)
        self._ttft, self._tpot = _Sample(self._random), _Sample(self._random)

    def note(self, now_s: float, kind: str, numbers: Sequence[float]) -> None:
        """An event of a request (`observed.Event`)."""
        self._go_on(now_s)
        if kind == "arrived":
            self._open = replace(self._open, arrivals=self._open.arrivals + 1)
        elif kind == "refused":
            self._open = replace(self._open, refusals=self._open.refusals + 1)
        elif kind == "overflowed":
            self._open = replace(self._open, overflows=self._open.overflows + 1)
        elif kind == "prefilled":
            self._ttft.add(numbers[1])
        elif kind == "answered" and numbers[0] > 1:
            self._tpot.add(numbers[1])

    def moved(self, now_s: float, moved: Moved) -> None:
        """Add KV that an engine has moved until now. The part before the present period counts in the previous
        period."""
        self._go_on(now_s)
        inside = now_s - self._open.number * BEAT_S
        part = min(1.0, inside / moved.seconds) if moved.seconds > 0 else 1.0
        if part < 1.0 and self._beats and self._beats[-1].number == self._open.number - 1:
            self._beats[-1] = _with(self._beats[-1], moved, 1.0 - part)
        else:
            part = 1.0
        self._open = _with(self._open, moved, part)

    def ended(self, now_s: float, outcomes: dict[str, float]) -> None:
        """Requests to pairs have ended, by outcome."""
        self._go_on(now_s)
        self._open = replace(self._open, outcomes=_sum(self._open.outcomes, outcomes))

    def beats(self, now_s: float) -> tuple[Beat, ...]:
        """The periods that have ended, oldest first. Periods in which nothing happened are left out."""
        self._go_on(now_s)
        oldest = self._open.number - KEPT
        return tuple(beat for beat in self._beats if beat.number >= oldest)

    def use(self, beats: Iterable[Beat]) -> None:
        """Another process has found these periods."""
        self._beats = deque(beats, maxlen=KEPT)

    def _go_on(self, now_s: float) -> None:
        number = int(now_s // BEAT_S)
        if number > self._open.number:
            ended = replace(self._open, ttft=self._ttft.times(), tpot=self._tpot.times())
            if ended != Beat(ended.number):
                self._beats.append(ended)
            self._open = Beat(number)
            self._ttft, self._tpot = _Sample(self._random), _Sample(self._random)


def _with(beat: Beat, moved: Moved, part: float) -> Beat:
    codecs = {codec: part * count for codec, count in moved.codecs.items()}
    return replace(
        beat,
        received_bytes=beat.received_bytes + part * moved.received_bytes,
        sent_chunks=beat.sent_chunks + part * moved.sent_chunks,
        early_chunks=beat.early_chunks + part * moved.early_chunks,
        pool_hits=beat.pool_hits + part * moved.pool_hits,
        codecs=_sum(beat.codecs, codecs),
    )


def _sum(first: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: first.get(name, 0.0) + other.get(name, 0.0) for name in {**first, **other}}
