# SPDX-License-Identifier: Apache-2.0
"""The last minutes as the live page draws them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from scheduler_plugins.router.recent_history import BEAT_S, KEPT, Beat

RECENT_S = 300.0
"""Shares and counts of the page are of this time."""
OVERFLOW_S = 600.0
"""The share of prompts that engines without a GPU had to compute is of this time, as in the alert."""
FEWEST = 20
"""Fewer prompts say nothing."""


class Recent(msgspec.Struct, frozen=True):
    """Sums of the last `RECENT_S` seconds."""

    arrivals: int = 0
    refusals: int = 0
    sent_chunks: float = 0.0
    early_chunks: float = 0.0
    codecs: dict[str, float] = {}
    outcomes: dict[str, float] = {}


def recent(beats: Sequence[Beat], now_s: float) -> Recent:
    """Sums of the last minutes."""
    first = now_s // BEAT_S - RECENT_S // BEAT_S
    kept = [beat for beat in beats if beat.number >= first]
    codecs, outcomes = Counter[str](), Counter[str]()
    for beat in kept:
        codecs.update(beat.codecs)
        outcomes.update(beat.outcomes)
    return Recent(
        sum(beat.arrivals for beat in kept),
        sum(beat.refusals for beat in kept),
        sum(beat.sent_chunks for beat in kept),
        sum(beat.early_chunks for beat in kept),
        dict(codecs),
        dict(outcomes),
    )


def overflow(beats: Sequence[Beat], now_s: float) -> float:
    """Part of the last ten minutes' prompts that engines without a GPU computed because all others would be late; 0 if
    there were too few prompts."""
    first = now_s // BEAT_S - OVERFLOW_S // BEAT_S
    kept = [beat for beat in beats if beat.number >= first]
    prompts = sum(beat.arrivals for beat in kept)
    return sum(beat.overflows for beat in kept) / prompts if prompts >= FEWEST else 0.0


def trends(beats: Sequence[Beat], now_s: float) -> dict[str, list[float | None]]:
    """One value for each period that has ended, oldest first; null: nothing is known of it."""
    by_number = {beat.number: beat for beat in beats}
    last = int(now_s // BEAT_S)
    first = min(by_number, default=last)  # nothing is known of the time before
    shown = [
        by_number.get(number, Beat(number)) if number >= first else None
        for number in range(last - KEPT, last)
    ]

    def drawn(value: Callable[[Beat], float | None]) -> list[float | None]:
        return [_rounded(None if beat is None else value(beat)) for beat in shown]

    return {
        "ttft_s": drawn(lambda beat: beat.ttft and beat.ttft.median_s),
        "ttft_high_s": drawn(lambda beat: beat.ttft and beat.ttft.high_s),
        "tpot_s": drawn(lambda beat: beat.tpot and beat.tpot.median_s),
        "tpot_high_s": drawn(lambda beat: beat.tpot and beat.tpot.high_s),
        "requests": drawn(lambda beat: beat.arrivals / BEAT_S),
        "refused": drawn(lambda beat: beat.refusals / BEAT_S),
        "kv_bytes": drawn(lambda beat: beat.received_bytes / BEAT_S),
        "pool_hits": drawn(lambda beat: beat.pool_hits / BEAT_S),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")
