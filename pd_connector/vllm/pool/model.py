# SPDX-License-Identifier: Apache-2.0
"""The model that the ranks of an engine have loaded, as the pool knows it.

Ranks tell it with a step. They read all bytes of their weights first, and an idle engine makes no steps. So it is woken for a
step now and then. A step that is always asked for would keep the engine from being paused, or stopped.
"""

import logging
import time
from collections.abc import Mapping
from threading import Timer

from pd_connector.vllm.pool.prompt import PoolPrompt
from pd_connector.vllm.wake import wake

logger = logging.getLogger("pd_connector.vllm")

_EACH_S = 0.25
"""Time between two steps of an idle engine whose ranks read their weights, in seconds."""
_OLD_S = 0.1
"""What ranks told longer ago, in seconds, may have changed: a request waits for their next report, at most as long."""


class LoadedModel:
    """Used by the scheduler's thread only.

    Args:
        ranks: number of ranks of this engine.

    Attributes:
        due: a step is needed: ranks may have something to tell.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._told: dict[int, bytes | None] = {}  # by rank; None: it reads its weights
        self._heard_s = 0.0
        self._timer: Timer | None = None
        self._quiet = False  # what is said once is said, or need not be
        self.due = True

    @property
    def root(self) -> bytes:
        """What all ranks have told; empty where the pool cannot be used."""
        told = set(self._told.values())
        known = told.pop() if len(self._told) == self._ranks and len(told) == 1 else None
        return known or b""

    @property
    def _reading(self) -> bool:
        return None in self._told.values()

    def awaited_by(self, prompt: PoolPrompt) -> bool:
        """Whether a request waits for the next report, so that it can use the pool: ranks were reading when they reported
        last, and that was long before vLLM asked about the request. A busy engine has fresh reports."""
        now = time.monotonic()
        prompt.matched_s = prompt.matched_s or now
        late = self._reading and self._heard_s + _OLD_S < prompt.matched_s
        return late and now < prompt.matched_s + _OLD_S

    def reported(self, told: Mapping[int, bytes | None]) -> bool:
        """What ranks have told with a step. Returns whether they load another model than before."""
        before = self.root
        self._told.update(told)
        self._heard_s, self.due = time.monotonic(), False
        if self._reading and self._timer is None:
            self._timer = Timer(_EACH_S, self._ask)
            self._timer.daemon = True
            self._timer.start()
        if self.root != before:
            self._quiet = True
            used = "in use" if self.root else "not used: the weights are not known"
            logger.info("pool: %s", used)
        elif len(self._told) == self._ranks and not (self._quiet or self._reading):
            self._quiet = True
            logger.warning(
                "pool: not used so far: this engine does not know all bytes of its weights. It reads them from the "
                "model's files; weights that are made up (--load-format dummy) or streamed have none"
            )
        return self.root != before

    def _ask(self) -> None:
        """Called by the timer's thread."""
        self._timer, self.due = None, True
        wake()
