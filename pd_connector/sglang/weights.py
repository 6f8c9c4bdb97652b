# SPDX-License-Identifier: Apache-2.0
"""Weights that change while SGLang serves, as in reinforcement learning, are noticed before KV of the new ones is
offered.

SGLang flushes its cache when it has new weights, unless it is told not to: then, and once a minute, samples of
the parameters in memory are compared with those before.
"""

import logging
import time
from collections.abc import Callable

import msgspec
import torch

from pd_connector.agent.commands import ChangeModel, Command
from pd_connector.kv.model import ModelFacts
from pd_connector.memory.parameters import loaded_fingerprint

logger = logging.getLogger("pd_connector.sglang")

_COMPARE_S = 60.0
"""Time between two looks at the weights, in seconds, where nothing says that they may have changed. One takes
milliseconds."""


class WeightsWatch:
    """Used by the scheduler's thread.

    Args:
        model: of this rank, as it is loaded.
        facts: what peers were told of it. Without `loaded_fine` nothing is compared.
        submit: hands a command to the agent.
    """

    def __init__(
        self, model: torch.nn.Module, facts: ModelFacts, submit: Callable[[Command], None]
    ) -> None:
        self._model = model
        self._facts = facts
        self._submit = submit
        self._next_look = time.monotonic() + _COMPARE_S

    def flushed(self) -> None:
        """SGLang has flushed its cache: the next step looks."""
        self._next_look = 0.0

    def step(self) -> None:
        """A step begins: tell the agent if it computes with other weights than those before."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _COMPARE_S
        facts = self._facts
        if not facts.loaded_fine:
            return
        found = loaded_fingerprint(self._model)
        if found.fine == facts.loaded_fine:
            return
        logger.warning(
            "the weights have changed while this engine served: KV passes only between SGLang's ranks that "
            "hold the same part of the model, and the same weights, until the engine starts anew"
        )
        self._facts = msgspec.structs.replace(
            facts, loaded=found.sampled, loaded_fine=found.fine, updates=facts.updates + 1
        )
        self._submit(ChangeModel(self._facts))
