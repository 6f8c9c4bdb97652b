# SPDX-License-Identifier: Apache-2.0
"""Watches the weights of a rank of vLLM."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from pd_connector.agent.advertised_model import DraftFiles
from pd_connector.agent.commands import Command
from pd_connector.agent.weights_watch import WeightsWatch
from pd_connector.errors import PDConnectorError
from pd_connector.kv.checkpoint_files import CheckpointFiles
from pd_connector.kv.model import ModelFacts
from pd_connector.memory.parameters import Loaded
from pd_connector.vllm.identity.model import loaded_files, loaded_model, loaded_weights
from pd_connector.vllm.identity.weight_loads import LOADS, watch_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SETTLE_S = 1.0
"""Time after a load of weights in which more may follow, in seconds: a trainer sends weights in parts."""


class ModelWatch(WeightsWatch):
    """Used by the engine's thread of a worker. See `WeightsWatch`."""

    advice = "until both engines are told the version of their weights (docs/configuration.md#weights-that-change)"

    def __init__(
        self,
        vllm_config: "VllmConfig",
        facts: ModelFacts,
        loaded: Loaded,
        files: Sequence[CheckpointFiles] | None,
        submit: Callable[[Command], None],
        draft: DraftFiles | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._tells_at = 0.0  # when withdrawn weights are told again, unless they change again
        super().__init__(facts, loaded, files, draft, submit, LOADS)
        if (model := self.model()) is not None:
            watch_model(model)

    def step(self, *, suspected: bool, idle: bool) -> None:
        """A step begins, before its commands are carried out.

        Args:
            suspected: whether weights may have changed since the previous step.
            idle: whether the step computes nothing.
        """
        if self._asleep:
            return
        if self._advertised.unreadable:
            self.tell_memory()
        if idle and not suspected:
            return
        if self._advertised.withdrawn:
            if not self._loading and time.monotonic() >= self._tells_at:
                self.tell()
            return
        if suspected:
            self._next_compare = 0.0
        if self.differ():
            self._advertised.other_weights()
            self.tell()

    def change_version(self, version: str) -> None:
        """The operator has changed the weights while the engine served, and names their new version.

        Raises:
            PDConnectorError: the engine sleeps, so its weights are not in memory.
        """
        if self._asleep:
            raise PDConnectorError(
                "the engine sleeps, and its weights with it: name their version after wake_up"
            )
        if not self._advertised.withdrawn:
            self._advertised.other_weights()
        self.tell_memory(version)

    def loaded(self, *, over: bool, whole: bool) -> None:
        super().loaded(over=over, whole=whole)
        self._tells_at = time.monotonic() + (0.0 if over else _SETTLE_S)

    def pages_lost(self) -> None:
        """The cache has lost its content. Earlier KV is handled like KV of other weights."""
        self._advertised.pages_lost()

    def model(self) -> torch.nn.Module | None:
        return loaded_model(self._vllm_config)

    def samples(self) -> Loaded:
        return loaded_weights(self._vllm_config)

    def files(self) -> Sequence[CheckpointFiles] | None:
        return loaded_files(self._vllm_config)
