# SPDX-License-Identifier: Apache-2.0
"""How often engines without a GPU compute prompts because all others would be late."""

from __future__ import annotations

from collections import deque

KEPT_MINUTES = 10
FEWEST = 20
"""Fewer prompts say nothing."""


class Overflow:
    """Counts of the last ten minutes, of this process."""

    def __init__(self) -> None:
        self._minutes = deque[list[int]](maxlen=KEPT_MINUTES + 1)  # [minute, prompts, late]

    def note(self, now_s: float, *, late: bool) -> None:
        """A prompt was sent to a prefill engine. `late`: to one without a GPU, because all others would be late."""
        minute = int(now_s // 60)
        if not self._minutes or self._minutes[-1][0] < minute:
            self._minutes.append([minute, 0, 0])
        self._minutes[-1][1] += 1
        self._minutes[-1][2] += late

    def share(self, now_s: float) -> float:
        """Part of the prompts that went to engines without a GPU because all others would be late; 0 if there were too
        few prompts."""
        first = int(now_s // 60) - KEPT_MINUTES
        rows = [row for row in self._minutes if row[0] > first]
        prompts = sum(row[1] for row in rows)
        return sum(row[2] for row in rows) / prompts if prompts >= FEWEST else 0.0
