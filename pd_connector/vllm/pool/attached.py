# SPDX-License-Identifier: Apache-2.0
"""Additions of the pool to vLLM's scheduler, beside the connector's hooks.

If a load from the pool breaks off, the prompt is computed, even if other failed loads end their request. vLLM has one
policy for all loads: the config key `on_failure`, or the `kv_load_failure_policy` of a MultiConnector. With `fail` a
request whose handoff fails ends with an error. A prompt that the pool could not load is computed instead.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from pd_connector.vllm.pool.loads import PoolLoads
from pd_connector.vllm.pool.side import PoolSide
from pd_connector.vllm.wake import watch
from pd_connector.vllm.wrap_once import wrap_once

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("pd_connector.vllm")

_HANDLERS: tuple[tuple[str, Callable[[PoolLoads], set[Any]]], ...] = (
    ("_handle_failed_recving", lambda loads: loads.requests),
    ("_handle_invalid_blocks", lambda loads: loads.pages),
)
"""Methods of vLLM's scheduler that take requests, or pages, whose load has failed."""
_watching: WeakSet[PoolLoads] = WeakSet()


def attach(pool: PoolSide, config: "VllmConfig") -> None:
    """Have vLLM's scheduler compute pages that loads leave unfilled, and publish events of chunks if it publishes KV
    events. The pool can wake the engine from now on."""
    watch()
    events = config.kv_events_config
    if events is not None and events.enable_kv_cache_events:
        pool.publish_events()
    _recompute(pool.loads)


def _recompute(loads: PoolLoads) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    _watching.add(loads)
    for name, own in _HANDLERS:
        if hasattr(Scheduler, name):
            wrap_once(Scheduler, name, _recomputes(own))
        else:
            logger.warning(
                "pool: this version of vLLM has no Scheduler.%s: with `on_failure: fail` a request fails if its load "
                "from the pool breaks off; set `on_failure: recompute`",
                name,
            )


def _recomputes(own: Callable[[PoolLoads], set[Any]]) -> Callable[..., set[str]]:
    def handle(
        original: Callable[..., set[str]], scheduler: Any, failed: set[Any], *args: Any
    ) -> set[str]:
        mine = {load for loads in list(_watching) for load in own(loads)} & set(failed)
        if scheduler.recompute_kv_load_failures or not mine:
            return original(scheduler, failed, *args)
        scheduler.recompute_kv_load_failures = True
        try:
            original(scheduler, mine, *args)
        finally:
            scheduler.recompute_kv_load_failures = False
        return original(scheduler, set(failed) - mine, *args)

    return handle
