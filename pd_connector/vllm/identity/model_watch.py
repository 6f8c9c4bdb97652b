# SPDX-License-Identifier: Apache-2.0
"""Watches a rank's weights, which may change while vLLM serves, and tells peers as soon as a change begins."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pd_connector.agent.advertised_model import AdvertisedModel
from pd_connector.agent.commands import Command
from pd_connector.errors import PDConnectorError
from pd_connector.kv.checkpoint_files import CheckpointFiles
from pd_connector.kv.model import ModelFacts
from pd_connector.memory.parameters import Loaded, loaded_full_fingerprint
from pd_connector.vllm.identity.model import loaded_files, loaded_model, loaded_weights
from pd_connector.vllm.identity.weight_loads import LOADS, watch_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("pd_connector.vllm")

_COMPARE_S = 60.0
"""Time between two comparisons of the weights in memory, in seconds, while no event announces a change. One
comparison takes milliseconds."""
_SETTLE_S = 1.0
"""Time after a load of weights in which more may follow, in seconds: a trainer sends weights in parts."""


class ModelWatch:
    """Used by the engine's thread of a worker.

    Args:
        facts: the model as peers are told it when the agent starts.
        loaded: fingerprints of the parameters in memory, as in the facts.
        files: the files that the weights were loaded from; None if unknown. The watch closes them.
        submit: passes a command to the agent.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        facts: ModelFacts,
        loaded: Loaded,
        files: Sequence[CheckpointFiles] | None,
        submit: Callable[[Command], None],
    ) -> None:
        self._vllm_config = vllm_config
        self._told = AdvertisedModel(facts, files, submit)
        self._loaded = self._as_on_disk = loaded
        self._next_compare = time.monotonic() + _COMPARE_S
        self._tells_at = 0.0  # when withdrawn weights are told again, unless they change again
        self._loading = self._whole = self._asleep = False
        if (model := loaded_model(vllm_config)) is not None:
            watch_model(model)
            LOADS.listen(self)

    @property
    def changes(self) -> int:
        """How often the weights have changed. KV from before the last change does not fit the present weights."""
        return self._told.changes

    @property
    def reads(self) -> bool:
        """Whether all bytes of the weights are being read, and will be told."""
        return self._told.reads

    def step(self, *, asked: bool, idle: bool) -> None:
        """A step begins, before its commands are carried out.

        Args:
            asked: weights may have changed since the step before.
            idle: the step computes nothing.
        """
        now = time.monotonic()
        if self._asleep or (idle and not asked):
            return
        if self._told.withdrawn:
            if not self._loading and now >= self._tells_at:
                self._tell()
        elif asked or now >= self._next_compare:
            self._compare()

    def change_version(self, version: str) -> None:
        """The operator has changed the weights while the engine served, and this is their version now.

        Raises:
            PDConnectorError: the weights have no memory.
        """
        if self._asleep:
            raise PDConnectorError(
                "the engine sleeps, and its weights with it: name their version after wake_up"
            )
        if not self._told.withdrawn:
            self._told.other_weights()
        self._loaded = loaded_weights(self._vllm_config)
        self._tell_memory(version)

    def loading(self) -> None:
        """Weights begin to change (`weight_loads.Listener`)."""
        self._loading, self._whole = True, False
        self._told.withdraw()

    def loaded(self, *, over: bool, whole: bool) -> None:
        """Weights have changed (`weight_loads.Listener`)."""
        self._loading, self._whole = False, whole
        self._tells_at = time.monotonic() + (0.0 if over else _SETTLE_S)

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

    def pages_lost(self) -> None:
        """The cache has lost its content. KV of before is handled as KV of other weights is."""
        self._told.pages_lost()

    def close(self) -> None:
        """Stop telling peers."""
        LOADS.forget(self)
        self._told.close()

    def _compare(self) -> None:
        """Check whether the weights are still those that peers were told."""
        self._next_compare = time.monotonic() + _COMPARE_S
        if self._loaded.sampled and loaded_weights(self._vllm_config) != self._loaded:
            self._told.other_weights()
            self._tell()

    def _tell(self) -> None:
        """Weights have changed: tell peers the present ones."""
        self._loaded = loaded_weights(self._vllm_config)
        whole, self._whole = self._whole, False
        files = loaded_files(self._vllm_config) if whole else None
        if files and self._told.tell_files(files, loaded=self._loaded.sampled):
            self._as_on_disk = self._loaded
            return
        logger.warning(
            "the weights have changed while this engine served: until both engines are told the "
            "version of their weights, KV passes only between ranks that hold the same part of the "
            "model and the same parameters, if all of these can be seen (docs/configuration.md#weights-that-change)"
        )
        self._tell_memory()

    def _tell_memory(self, version: str = "") -> None:
        """Tell peers the parameters in memory. If parameters without samples were loaded again, tell nothing: they
        may differ even though all samples are equal."""
        loaded = self._loaded
        if loaded.kernels != self._as_on_disk.kernels:
            loaded = Loaded()
        model = loaded_model(self._vllm_config) if loaded.sampled and not version else None
        self._told.tell_memory(
            loaded=loaded.sampled,
            loaded_full=b"" if model is None else loaded_full_fingerprint(model),
            version=version,
        )
