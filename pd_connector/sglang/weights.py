# SPDX-License-Identifier: Apache-2.0
"""Watches the weights of a rank of SGLang.

SGLang flushes its cache when it has new weights, unless the call forbids it, or requests run. Until the flush its cache
holds KV of the old weights, and the new weights are not advertised. Once a minute, and after a flush, samples of the
parameters in memory are compared with the previous samples.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from pd_connector.agent.advertised_model import DraftFiles
from pd_connector.agent.commands import Command
from pd_connector.agent.weights_watch import WeightsWatch
from pd_connector.kv.checkpoint_files import CheckpointFiles
from pd_connector.kv.model import ModelFacts
from pd_connector.memory.parameters import Loaded
from pd_connector.sglang.model import LOADS, loaded_files, loaded_weights


class SGLangWeights(WeightsWatch):
    """Used by the scheduler's thread. See `WeightsWatch`.

    Args:
        scheduler: SGLang's, whose model is loaded.
        waits: whether the engine waits at its start until its weights are known. SGLang's decode engine computes no
            prompt, so its requests would fail meanwhile. Other engines compute.
        draft: its draft model, if that is loaded from files.
        drafts: returns the files that the draft model was loaded from last (as `draft_model`).
    """

    def __init__(
        self,
        scheduler: Any,
        facts: ModelFacts,
        loaded: Loaded,
        files: CheckpointFiles | None,
        submit: Callable[[Command], None],
        *,
        waits: bool = True,
        draft: DraftFiles | None = None,
        drafts: Callable[[], DraftFiles | bytes] = bytes,
    ) -> None:
        self._scheduler = scheduler
        self._waits = waits
        self._drafts = drafts
        self._stale = False  # the cache holds KV of other weights
        super().__init__(facts, loaded, None if files is None else (files,), draft, submit, LOADS)
        self._wait()

    def _wait(self) -> None:
        """Until the weights are known, if the engine waits for them."""
        if not self._waits:
            return
        with _watchdogs_fed(self._scheduler):
            self._advertised.wait()
        if self._advertised.unreadable:
            self.tell_memory()

    @property
    def withdrawn(self) -> bool:
        """Whether the weights change now, or have changed while SGLang's cache still holds KV of the previous
        weights."""
        return self._advertised.withdrawn

    @property
    def facts(self) -> ModelFacts:
        """The facts with which a new agent starts."""
        return self._advertised.facts_now()

    def tell_to(self, submit: Callable[[Command], None]) -> None:
        """Submit to a new agent, which replaces the previous one and started with `facts`."""
        self._advertised.tell_to(submit)

    def change(self, **facts: bool) -> AbstractContextManager[None]:
        """SGLang changes its weights during the block, and may flush its cache at its end. See `WeightLoads.change`."""
        return LOADS.change(**facts)

    def loading(self) -> None:
        super().loading()
        self._advertised.forget_draft()  # SGLang changes both, unless a call names one
        self._stale = True

    def failed(self) -> None:
        """SGLang reports that the last change has failed. It may have loaded a part of the weights."""
        self._whole = False

    def flushed(self, *, done: bool) -> None:
        """SGLang has flushed its cache, or has failed to: the next step checks which."""
        self._stale &= not done
        self._next_compare = 0.0

    def step(self) -> None:
        """A step begins: report to the agent if it computes with other weights than the previous step."""
        if not self._waits and self._advertised.unreadable:
            self.tell_memory()
        flushed = self._next_compare == 0.0
        if not self._advertised.withdrawn and self.differ():
            self._advertised.withdraw()
            self._advertised.forget_draft()
            self._stale = not flushed
        if self._advertised.withdrawn and not self._stale and not self._loading:
            self.tell()
            self._wait()

    def model(self) -> torch.nn.Module | None:
        module: torch.nn.Module = self._scheduler.tp_worker.model_runner.model
        return module

    def samples(self) -> Loaded:
        return loaded_weights(self._scheduler)

    def files(self) -> Sequence[CheckpointFiles] | None:
        files = loaded_files(self._scheduler)
        return None if files is None else (files,)

    def draft(self) -> DraftFiles | None:
        draft = self._drafts()
        return draft if isinstance(draft, DraftFiles) else None


@contextmanager
def _watchdogs_fed(scheduler: Any) -> Iterator[None]:
    """Keep SGLang's watchdogs satisfied during the block. They end an engine that computes no batch for 300 s
    (`--watchdog-timeout`), also while it starts."""
    watchdogs = [
        watchdog
        for name in ("watchdog", "soft_watchdog")
        if (watchdog := getattr(scheduler, name, None)) is not None
    ]
    counters = [watchdog.get_counter for watchdog in watchdogs]
    for watchdog in watchdogs:
        watchdog.get_counter = time.monotonic_ns
    try:
        yield
    finally:
        for watchdog, counter in zip(watchdogs, counters, strict=True):
            watchdog.get_counter = counter
