# SPDX-License-Identifier: Apache-2.0
"""The scheduler's view of the model that the ranks of an engine have loaded.

Ranks report their model with a step, after they have read all bytes of their weights. An idle engine makes no steps, so
it is woken for a step now and then. A permanent request for steps would keep the engine from being paused, or stopped.
"""

import time
from threading import Timer
from typing import TYPE_CHECKING

from pd_connector.agent.commands import Command
from pd_connector.kv.model import ModelFacts
from pd_connector.vllm.messages import WorkerActivity
from pd_connector.vllm.part import Part
from pd_connector.vllm.wake import wake

if TYPE_CHECKING:
    from pd_connector.vllm.pool.prompt import PoolPrompt

_EACH_S = 0.25
"""Time between two steps of an idle engine whose ranks read their weights, in seconds."""
_OLD_S = 0.1
"""A report of ranks is out of date after this time, in seconds. A request waits for the next report at most as long."""


class LoadedModel(Part):
    """Used by the scheduler's thread only.

    Args:
        ranks: number of ranks of this engine.
        pool: the engine uses a pool, which waits for the ranks' first report.

    Attributes:
        facts: the first rank's facts about its model, as peers get them; None: not reported yet.
    """

    def __init__(self, ranks: int, *, pool: bool) -> None:
        self._ranks = ranks
        self._reported: dict[int, bytes | None] = {}  # by rank; None: it reads its weights
        self._heard_s = 0.0
        self._timer: Timer | None = None
        self._due = pool  # a step is needed: ranks may have something to tell
        self.facts: ModelFacts | None = None

    def introduce(self, facts: ModelFacts | None) -> None:
        """The engine has started. `facts`: the first rank's facts at that moment, maybe without its weights'
        fingerprint."""
        self.facts = facts
        self._due |= facts is not None and facts.reading

    @property
    def pending(self) -> bool:
        return self._due

    @property
    def root(self) -> bytes:
        """The model that all ranks have reported; empty if the pool cannot be used."""
        reported = set(self._reported.values())
        agreed = (
            reported.pop() if len(self._reported) == self._ranks and len(reported) == 1 else None
        )
        return agreed or b""

    @property
    def unknown(self) -> bool:
        """Whether all ranks have reported that their weights stay unidentified."""
        return len(self._reported) == self._ranks and not self._reading and not self.root

    @property
    def _reading(self) -> bool:
        return None in self._reported.values()

    def awaited_by(self, prompt: "PoolPrompt") -> bool:
        """Whether a request waits for the next report, so that it can use the pool.

        True for a short time, if ranks were reading weights at their last report, and this report was old when vLLM
        first asked about the request. A busy engine has fresh reports.
        """
        now = time.monotonic()
        prompt.matched_s = prompt.matched_s or now
        late = self._reading and self._heard_s + _OLD_S < prompt.matched_s
        return late and now < prompt.matched_s + _OLD_S

    def reported(self, activity: WorkerActivity) -> list[Command]:
        self._reported.update(activity.models)
        self.facts = activity.facts or self.facts
        self._heard_s, self._due = time.monotonic(), False
        if self._reading and self._timer is None:
            self._timer = Timer(_EACH_S, self._ask)
            self._timer.daemon = True
            self._timer.start()
        return []

    def _ask(self) -> None:
        """Called by the timer's thread."""
        self._timer, self._due = None, True
        wake()
