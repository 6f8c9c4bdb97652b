# SPDX-License-Identifier: Apache-2.0
"""What vLLM's model runner does around a step, derived from its settings."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pd_connector.vllm.identity.layers import CacheId

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def hooks_tell_layers(vllm_config: "VllmConfig", caches: Mapping[str, CacheId]) -> bool:
    """Whether `save_kv_layer` is called once a step has computed a layer's KV for all of its requests.

    If not, KV streams step by step. If layers have several caches, vLLM does not tell which cache is done. With
    `--enable-dbo` or `--ubatch-size`, vLLM computes a batch in parts, and each part calls separately.
    """
    single = all(cache.label.endswith("/attention") for cache in caches.values())
    return single and not getattr(vllm_config.parallel_config, "use_ubatching", False)


def revokes_late(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> bool:
    """Whether vLLM may overwrite pages of a preempted request before it calls a hook.

    vLLM's second model runner zeroes pages and copies shared pages (`update_requests`) before it calls
    `handle_preemptions` (`pre_forward`); the first runner calls that hook before both. Pages are zeroed if
    the cache needs it, and copied only in caches of several groups.
    """
    changes = kv_cache_config.needs_kv_cache_zeroing or len(kv_cache_config.kv_cache_groups) > 1
    return bool(vllm_config.use_v2_model_runner and changes)


def in_lockstep(vllm_config: "VllmConfig") -> bool:
    """Whether data-parallel ranks compute each step together, as ranks of a mixture of experts do.

    A rank with nothing to compute joins with a dummy batch right after its own empty step. If it paused there, all
    other ranks would wait.
    """
    parallel = vllm_config.parallel_config
    return bool(parallel.data_parallel_size > 1 and vllm_config.model_config.is_moe)
