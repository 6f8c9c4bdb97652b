# SPDX-License-Identifier: Apache-2.0
"""The model that the ranks of an engine have loaded, as the pool knows it."""

import logging
import time
from collections.abc import Mapping

logger = logging.getLogger("pd_connector.vllm")

_UNKNOWN_S = 120.0
"""How long steps are asked for until ranks have told their model, in seconds: they read all of its bytes first."""


class LoadedModel:
    """Used by the scheduler's thread only.

    Args:
        ranks: number of ranks of this engine.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._told: dict[int, bytes] = {}  # by rank
        self._began_s = time.monotonic()
        self._warned = False

    @property
    def root(self) -> bytes:
        """What all ranks have told; empty where the pool cannot be used."""
        told = set(self._told.values())
        return told.pop() if len(self._told) == self._ranks and len(told) == 1 else b""

    @property
    def awaited(self) -> bool:
        """Whether ranks have yet to tell their model, after their start."""
        return not self._told and time.monotonic() < self._began_s + _UNKNOWN_S

    def reported(self, told: Mapping[int, bytes]) -> bool:
        """What ranks have told with a step. Returns whether they load another model than before."""
        before = self.root
        self._told.update(told)
        if self.root != before:
            used = "in use" if self.root else "not used: the weights are not known"
            logger.info("pool: %s", used)
        if not (self._told or self._warned) and time.monotonic() > self._began_s + _UNKNOWN_S:
            self._warned = True
            logger.warning(
                "pool: not used so far: this engine does not know all bytes of its weights. It reads them from the "
                "model's files; weights that are made up (--load-format dummy) or streamed have none"
            )
        return self.root != before
