# SPDX-License-Identifier: Apache-2.0
"""Weights that change while SGLang serves, as in reinforcement learning, are told from the moment on when they begin
to.

SGLang flushes its cache when it has new weights, unless it is told not to, or requests run. Until it has, its cache
holds KV of the old ones, and nothing is told of the new ones. Once a minute, and after a flush, samples of the
parameters in memory are compared with those before.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pd_connector.agent.advertised_model import AdvertisedModel
from pd_connector.agent.commands import Command
from pd_connector.kv.checkpoint_files import CheckpointFiles
from pd_connector.kv.model import ModelFacts
from pd_connector.memory.parameters import loaded_full_fingerprint
from pd_connector.sglang.model import LOADS, loaded_files, loaded_weights

logger = logging.getLogger("pd_connector.sglang")

_COMPARE_S = 60.0
"""Time between two looks at the weights, in seconds, where nothing says that they may have changed. One takes
milliseconds."""


class WeightsWatch:
    """Used by the scheduler's thread.

    Args:
        scheduler: SGLang's, whose model is loaded.
        facts: what peers were told of it. Without `loaded` nothing is compared.
        files: what its weights were read from; None where they are not from files. It closes them.
        submit: hands a command to the agent.
    """

    def __init__(
        self,
        scheduler: Any,
        facts: ModelFacts,
        files: CheckpointFiles | None,
        submit: Callable[[Command], None],
    ) -> None:
        self._scheduler = scheduler
        self._told = AdvertisedModel(facts, None if files is None else (files,), submit)
        self._sampled = facts.loaded
        self._next_look = time.monotonic() + _COMPARE_S
        self._stale = False  # the cache holds KV of other weights
        self._session = False  # between the beginning and the end of an update
        self._whole = False  # the last load was of all weights

    @property
    def facts(self) -> ModelFacts:
        """What an agent that starts now tells its peers."""
        return self._told.facts_now()

    def tell_to(self, submit: Callable[[Command], None]) -> None:
        """Another agent has taken the place of the one before, and knows `facts`."""
        self._told.tell_to(submit)

    @contextmanager
    def change(
        self, *, begins: bool = False, ends: bool = False, whole: bool = False
    ) -> Iterator[None]:
        """Within, SGLang changes its weights, and flushes its cache in the end, or does not.

        Args:
            begins: an update of several parts begins.
            ends: that update ends.
            whole: it loads all of them from files.
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
        """SGLang says that the last change has failed: it may have loaded a part of what it was to load."""
        self._whole = False

    def flushed(self, *, done: bool) -> None:
        """SGLang has flushed its cache, or could not: the next step looks."""
        self._stale &= not done
        self._next_look = 0.0

    def step(self) -> None:
        """A step begins: tell the agent if it computes with other weights than those before."""
        if not self._told.withdrawn:
            self._look()
        if self._told.withdrawn and not self._stale and not self._session:
            self._tell()

    def close(self) -> None:
        """Tell nothing any more."""
        self._told.close()

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        flushed, self._next_look = self._next_look == 0.0, now + _COMPARE_S
        if self._sampled and loaded_weights(self._scheduler).sampled != self._sampled:
            self._told.withdraw()
            self._stale = not flushed

    def _tell(self) -> None:
        loaded = loaded_weights(self._scheduler)
        self._sampled = loaded.sampled
        whole, self._whole = self._whole, False
        files = loaded_files(self._scheduler) if whole else None
        if files is not None and self._told.tell_files((files,), loaded=loaded.sampled):
            return
        logger.warning(
            "the weights have changed while this engine served: KV passes only between SGLang's ranks that "
            "hold the same part of the model, and the same weights, until the engine restarts"
        )
        module = self._scheduler.tp_worker.model_runner.model
        full = loaded_full_fingerprint(module) if loaded.sampled else b""
        self._told.tell_memory(loaded=loaded.sampled, loaded_full=full)
