# SPDX-License-Identifier: Apache-2.0
"""SGLang's functions around which the pool's linker works (`pool.py`). Without a pool they only call SGLang's."""

import os
import uuid
from collections.abc import Callable
from typing import Any

from pd_connector.config import CONFIG_VARIABLE
from pd_connector.errors import ConfigError
from pd_connector.pool.advertised import ENGINE_VARIABLE
from pd_connector.sglang.hooks import linker_behind, linker_of
from pd_connector.sglang.pool_settings import OPTIONS, check_arguments, uses_pool


def resolved(original: Callable[..., Any], server_args: Any, *args: Any, **options: Any) -> Any:
    """SGLang resolves its arguments: if the config has `pool`, set the arguments of the linker."""
    if uses_pool():
        from sglang.srt.arg_groups.overrides import declare_resolution
        from sglang.srt.environ import envs

        check_arguments(server_args)
        declare_resolution(server_args, "pd_connector", **OPTIONS)
        # Processes that this one starts inherit it.
        os.environ[ENGINE_VARIABLE] = f"sglang-{uuid.uuid4().hex[:12]}"
        # Otherwise SGLang frees a prompt's windows, all but the last one, before the prompt enters its cache and is saved.
        frees = envs.SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS
        # A decode engine gets the last window of a prompt alone. The slots before it are never written, and must be freed.
        if server_args.disaggregation_mode != "decode" and not frees.is_set():
            frees.set(False)
    return original(server_args, *args, **options)


def scheduler_made(original: Callable[..., Any], scheduler: Any, *args: Any, **options: Any) -> Any:
    """The scheduler has its model and its cache."""
    result = original(scheduler, *args, **options)
    if (linker := linker_of(scheduler)) is not None:
        linker.attach(scheduler)
    elif uses_pool():
        raise ConfigError(
            f"the config key `pool` in {CONFIG_VARIABLE}: SGLang has made a cache of type {type(scheduler.tree_cache).__name__} "
            "without an external linker for these arguments; leave out the key, or the arguments of the cache"
        )
    return result


def arrives(
    original: Callable[..., Any], scheduler: Any, req: Any, *args: Any, **options: Any
) -> Any:
    """A request enters the queue, new or retracted."""
    if (linker := linker_of(scheduler)) is not None:
        linker.arrived(req)
    return original(scheduler, req, *args, **options)


def schedules(original: Callable[..., Any], scheduler: Any, *args: Any, **options: Any) -> Any:
    """SGLang makes a batch of the requests that wait."""
    linker = linker_of(scheduler)
    if linker is None:
        return original(scheduler, *args, **options)
    with linker.scheduling(scheduler):
        return original(scheduler, *args, **options)


def decodes(original: Callable[..., Any], scheduler: Any, *args: Any, **options: Any) -> Any:
    """A decode engine handles its queues: check for ended offloads, too. SGLang itself does so only with HiCache."""
    if (
        linker_of(scheduler) is not None and scheduler.tree_cache.linker.pending_offloads
    ):  # as on all ranks
        scheduler.tree_cache.check_hicache_events()
    return original(scheduler, *args, **options)


def inserts(original: Callable[..., Any], cache: Any, req: Any, *args: Any, **options: Any) -> Any:
    """A request's KV enters SGLang's cache."""
    linker = linker_behind(cache.linker)
    if linker is None:
        return original(cache, req, *args, **options)
    with linker.inserting(req):
        return original(cache, req, *args, **options)


def matches(original: Callable[..., Any], wrapper: Any, key: Any, req: Any, result: Any) -> Any:
    """SGLang asks for what is stored of a prompt."""
    if (linker := linker_behind(wrapper)) is not None:
        wrapper.hit_markers.pop(req.rid, None)  # of an earlier look, behind another prefix
        linker.matching(key, req, result)
    return original(wrapper, key, req, result)


def offloads_node(original: Callable[..., Any], wrapper: Any, node_id: Any, transfers: Any) -> Any:
    """SGLang offloads a node of its cache."""
    linker = linker_behind(wrapper)
    if linker is None:
        return original(wrapper, node_id, transfers)
    with linker.offloading(wrapper, node_id, transfers):
        return original(wrapper, node_id, transfers)
