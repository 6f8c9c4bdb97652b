# SPDX-License-Identifier: Apache-2.0
"""Watches a rank's weights, which may change while its engine serves, and tells peers as soon as a change begins."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from pd_connector.agent.advertised_model import AdvertisedModel, DraftFiles
from pd_connector.agent.commands import Command
from pd_connector.agent.weight_loads import WeightLoads
from pd_connector.kv.checkpoint_files import CheckpointFiles
from pd_connector.kv.model import ModelFacts
from pd_connector.memory.parameters import Loaded, loaded_full_fingerprint

logger = logging.getLogger("pd_connector.agent.weights_watch")

COMPARE_S = 60.0
"""Time between two comparisons of samples of the weights in memory, in seconds, while no event announces a change. One
comparison takes milliseconds."""


class WeightsWatch(ABC):
    """Base class of each engine's watch of its weights. Used by the engine's thread.

    Args:
        facts: the model as the agent advertises it at its start.
        loaded: samples of the parameters in memory, for later comparison. If empty, weights are never compared.
        files: the files that the weights were loaded from; None if unknown. The watch closes them.
        draft: the draft model, if its weights are from files.
        submit: passes a command to the agent.
        loads: the process's weight loads, which report changes of weights.
    """

    advice = "until both engines restart"
    """End of the log line about weights that changed without files: until when only the parameters in memory are
    compared."""

    def __init__(
        self,
        facts: ModelFacts,
        loaded: Loaded,
        files: Sequence[CheckpointFiles] | None,
        draft: DraftFiles | None,
        submit: Callable[[Command], None],
        loads: WeightLoads,
    ) -> None:
        self._advertised = AdvertisedModel(facts, files, submit, draft)
        self._loaded = loaded
        self._next_compare = time.monotonic() + COMPARE_S
        self._asleep = False
        self._loading = False  # weights are neither old nor new
        self._whole = False  # the last load was of all weights
        self._loads = loads
        loads.listen(self)

    @property
    def changes(self) -> int:
        """How often the weights have changed. KV from before the last change does not fit the present weights."""
        return self._advertised.changes

    @property
    def reads(self) -> bool:
        """Whether the weights' files are being read, or could not be read: their fingerprint is advertised later."""
        return self._advertised.reads or self._advertised.unreadable

    def loading(self) -> None:
        """Weights begin to change (`weight_loads.Listener`)."""
        self._loading, self._whole = True, False
        self._advertised.withdraw()

    def loaded(self, *, over: bool, whole: bool) -> None:
        """Weights have changed (`weight_loads.Listener`)."""
        self._loading, self._whole = False, whole

    def asleep(self, *, kept: bool) -> None:
        """The parameters have no memory from now on (`weight_loads.Listener`)."""
        self._asleep = True
        if not kept:
            self.loading()

    def awake(self) -> None:
        """The parameters have memory again (`weight_loads.Listener`)."""
        self._asleep = False
        self._next_compare = 0.0  # before anything is computed with them
        if self._loading:
            self.loaded(over=False, whole=False)

    def close(self) -> None:
        """Stop telling peers."""
        self._loads.forget(self)
        self._advertised.close()

    @abstractmethod
    def model(self) -> torch.nn.Module | None:
        """The model itself, if it can be reached."""

    @abstractmethod
    def samples(self) -> Loaded:
        """Samples of the parameters in memory."""

    @abstractmethod
    def files(self) -> Sequence[CheckpointFiles] | None:
        """The files that the model was loaded from last; None if unknown."""

    def draft(self) -> DraftFiles | None:
        """The files that the draft model was loaded from last, if it changes with the model."""
        return None

    def differ(self) -> bool:
        """Whether the weights in memory have changed since the last comparison. False until the next comparison is
        due."""
        if time.monotonic() < self._next_compare:
            return False
        self._next_compare = time.monotonic() + COMPARE_S
        return bool(self._loaded.sampled) and self.samples() != self._loaded

    def tell(self) -> None:
        """Weights have changed: tell peers the present ones."""
        whole, self._whole = self._whole, False
        files = self.files() if whole else None
        opened = self._loads.opened  # without these, files are of the change before the last
        if files and all(part in opened for part in files):
            draft = self.draft()
            if draft is not None and not all(part in opened for part in draft.files):
                draft = None
            if self._advertised.tell_files(files, draft):
                self._loaded = self.samples()
                return
        logger.warning(
            "the weights have changed while this engine served: KV passes only between ranks that hold the same part of the "
            "model and the same parameters, if all of these can be seen, %s",
            self.advice,
        )
        self.tell_memory()

    def tell_memory(self, version: str = "") -> None:
        """Advertise a fingerprint of all parameters in memory, or the version that the operator has named."""
        self._loaded = self.samples()
        model = self.model() if self._loaded.sampled and not version else None
        loaded = b"" if model is None else loaded_full_fingerprint(model)
        self._advertised.tell_memory(loaded=loaded, version=version)
