# SPDX-License-Identifier: Apache-2.0
"""Watches weights that change while SGLang serves, as in reinforcement learning, and tells peers as soon as a change
begins.

SGLang flushes its cache after a change of weights, unless it is told not to, or requests are running. Until the flush
its cache holds KV of the old weights, and peers are told nothing of the new ones. Once a minute, and after a flush,
samples of the parameters in memory are compared with earlier samples.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pd_connector.agent.commands import Command
from pd_connector.agent.told_model import ToldModel
from pd_connector.kv.checkpoint_files import CheckpointFiles
from pd_connector.kv.model import ModelFacts
from pd_connector.memory.parameters import loaded_full_fingerprint
from pd_connector.sglang.model import LOADS, loaded_files, loaded_weights

logger = logging.getLogger("pd_connector.sglang")

_COMPARE_S = 60.0
"""Time between two comparisons of the weights, in seconds, while no event announces a change. One comparison takes
milliseconds."""


class WeightsWatch:
    """Used by the scheduler's thread.

    Args:
        scheduler: SGLang's, with its model loaded.
        facts: what peers were told about the model. Without `loaded_fine` nothing is compared.
        files: the files that its weights were read from; None if they did not come from files. The watch closes them.
        submit: passes a command to the agent.
    """

    def __init__(
        self,
        scheduler: Any,
        facts: ModelFacts,
        files: CheckpointFiles | None,
        submit: Callable[[Command], None],
    ) -> None:
        self._scheduler = scheduler
        self._told = ToldModel(facts, None if files is None else (files,), submit)
        self._fine = facts.loaded_fine
        self._next_look = time.monotonic() + _COMPARE_S
        self._stale = False  # the cache holds KV of other weights
        self._session = False  # between the beginning and the end of an update
        self._whole = False  # the last load was of all weights

    @contextmanager
    def change(
        self, *, begins: bool = False, ends: bool = False, whole: bool = False
    ) -> Iterator[None]:
        """A context in which SGLang changes its weights. At the end SGLang may flush its cache.

        Args:
            begins: an update of several parts begins.
            ends: that update ends.
            whole: all weights are loaded from files.
        """
        self._session |= begins
        self._told.withdraw()
        self._stale, self._whole = True, False
        try:
            yield
        except BaseException:
            whole = False
            raise
        finally:
            LOADS.end()
            self._session &= not ends
            self._whole = whole

    def failed(self) -> None:
        """SGLang reports that the last change has failed. A part of it may have been loaded."""
        self._whole = False

    def flushed(self, *, done: bool) -> None:
        """SGLang has flushed its cache, or failed to: the next step compares."""
        self._stale &= not done
        self._next_look = 0.0

    def step(self) -> None:
        """A step begins: tell the agent if its weights differ from those of earlier steps."""
        if not self._told.withdrawn:
            self._look()
        if self._told.withdrawn and not self._stale and not self._session:
            self._tell()

    def close(self) -> None:
        """Stop telling peers."""
        self._told.close()

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        flushed, self._next_look = self._next_look == 0.0, now + _COMPARE_S
        if self._fine and loaded_weights(self._scheduler).fine != self._fine:
            self._told.withdraw()
            self._stale = not flushed

    def _tell(self) -> None:
        loaded = loaded_weights(self._scheduler)
        self._fine = loaded.fine
        whole, self._whole = self._whole, False
        files = loaded_files(self._scheduler) if whole else None
        if files is not None and self._told.tell_files(
            (files,), loaded=loaded.sampled, loaded_fine=loaded.fine
        ):
            return
        logger.warning(
            "the weights have changed while this engine served: KV passes only between SGLang's ranks that "
            "hold the same part of the model, and the same weights, until the engine restarts"
        )
        module = self._scheduler.tp_worker.model_runner.model
        full = loaded_full_fingerprint(module) if loaded.fine else b""
        self._told.tell_memory(loaded=loaded.sampled, loaded_fine=loaded.fine, loaded_full=full)
