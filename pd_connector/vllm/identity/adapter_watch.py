# SPDX-License-Identifier: Apache-2.0
"""What vLLM's engine core does with adapters (LoRA): it loads and removes them, and keys pages by them."""

import weakref
from collections.abc import Callable
from typing import Any

from pd_connector.vllm.identity.adapters import Adapters
from pd_connector.vllm.wrap_once import wrap_once

_KEYS = "_gen_lora_extra_hash_keys"
"""vLLM's function that returns what an adapter adds to the hash of a page."""
_watching: "weakref.WeakSet[Adapters]" = weakref.WeakSet()


def watch(adapters: Adapters) -> None:
    """Report each adapter that this process's engine loads to `adapters`, and key vLLM's pages by content."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore

    if not hasattr(kv_cache_utils, _KEYS):
        adapters.problem = (
            "this version of vLLM cannot key pages by an adapter's content: KV of adapters is not handed over; "
            "install a vLLM version that pd-connector supports"
        )
        return
    _watching.add(adapters)
    wrap_once(kv_cache_utils, _KEYS, _by_content)
    wrap_once(EngineCore, "add_lora", _loads)
    wrap_once(EngineCore, "remove_lora", _removes)


def _by_content(original: Callable[[Any], list[Any]], request: Any) -> list[Any]:
    keys = original(request)
    if not keys:
        return keys
    contents = sorted({adapters.pages(request) for adapters in list(_watching)})
    return [(*key[:-1], " ".join((key[-1], *contents))) for key in keys]


def _loads(original: Callable[..., bool], core: Any, lora_request: Any) -> bool:
    before = [(adapters, adapters.before_load(lora_request)) for adapters in list(_watching)]
    try:
        loaded = original(core, lora_request)
    except BaseException:
        for adapters, _ in before:
            adapters.load_failed(lora_request)
        raise
    for adapters, files in before:
        adapters.load(lora_request, files)
    return loaded


def _removes(original: Callable[..., bool], core: Any, lora_id: int) -> bool:
    try:
        return original(core, lora_id)
    finally:
        for adapters in list(_watching):
            adapters.remove(int(lora_id))
