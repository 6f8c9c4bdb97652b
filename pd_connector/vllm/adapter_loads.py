# SPDX-License-Identifier: Apache-2.0
"""Adapters are read when vLLM loads them.

vLLM shows a connector an adapter with the first request that uses it. It may have loaded the adapter long before,
and the files may be others by then. So the engine's own method is watched that is told to load one.
"""

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

from pd_connector.vllm.inputs import RequestIdentity

logger = logging.getLogger("pd_connector.vllm")

_watching: "weakref.WeakSet[RequestIdentity]" = weakref.WeakSet()
_WATCHED = "_pd_connector_watched"


def watch_loads(identity: RequestIdentity) -> None:
    """Have it read each adapter that the engine of this process is told to load, before it does."""
    from vllm.v1.engine.core import EngineCore

    _watching.add(identity)
    if not hasattr(EngineCore.add_lora, _WATCHED):
        EngineCore.add_lora = _watched(EngineCore.add_lora)


def _watched(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def add_lora(core: Any, lora_request: Any) -> bool:
        for identity in list(_watching):
            try:
                identity.load(lora_request)
            except Exception as error:  # the engine says itself what is wrong with an adapter
                logger.debug("adapter %s cannot be read: %r", lora_request, error)
        return original(core, lora_request)

    setattr(add_lora, _WATCHED, True)
    return add_lora
