# SPDX-License-Identifier: Apache-2.0
"""Decides whether an SGLang engine uses the KV pool, and checks that no option is set that cannot be combined with a
pool. If one is set, the engine does not start, and the error names the option."""

import os
from collections.abc import Collection
from typing import Any

from pd_connector.config import CONFIG_VARIABLE, Config
from pd_connector.errors import ConfigError
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.sglang.settings import BACKEND, load_config

LINKER = {"linker": "PoolLinker", "linker_module_path": "pd_connector.sglang.pool"}
"""SGLang's `--unified-cache-external-linker-config` of an engine with a pool."""
OPTIONS: dict[str, Any] = {
    "enable_unified_cache_external_linker": True,
    "unified_cache_external_linker_backend": "dynamic",
    "unified_cache_external_linker_config": LINKER,
}
"""SGLang's arguments of an engine with a pool. The config key `pool` sets them."""


def pool_config() -> Config:
    """The config of this engine.

    Raises:
        ConfigError: it is wrong, or has no `pool`.
    """
    config = load_config(os.environ.get(CONFIG_VARIABLE, ""))
    if not config.pool:
        raise ConfigError(
            f"--unified-cache-external-linker-config names PDConnector's pool, and {CONFIG_VARIABLE} has no `pool`: set it "
            'to a JSON object such as {"pool": true}; the three arguments of the linker can be left out then'
        )
    return config


def uses_pool() -> bool:
    """Whether the config of this engine has a pool."""
    text = os.environ.get(CONFIG_VARIABLE, "")
    return bool(text.strip()) and bool(load_config(text).pool)


_WANTED: dict[str, tuple[Any, ...]] = {
    "enable_pd_role_switch": (False,),
    "enable_hierarchical_cache": (False,),
    "enable_lmcache": (False,),
    "enable_flexkv": (False,),
    "disable_radix_cache": (False,),
    "disaggregation_decode_retraction_backup": (None, "cpu_tensor", "none"),
    "radix_cache_backend": (None,),
    "enable_unified_memory": (False,),
    "enable_kv_cache_sharding": (False,),
    "enable_memory_saver": (False,),
    "speculative_algorithm": (None,),
    "dllm_algorithm": (None,),
    "enable_dp_attention": (False,),
    "enable_hisparse": (False,),
    "enable_pdmux": (False,),
    "enable_eplb": (False,),
    "enable_session_radix_cache": (False,),
    "enable_streaming_session": (False,),
    "tokenizer_worker_num": (1,),
    "nnodes": (1,),
    "pp_size": (1,),
    "dcp_size": (1,),
    "attn_cp_size": (1,),
    "prefill_cp_size": (1,),
}
"""SGLang's arguments, each with the values that are known to work beside a pool."""


def check_arguments(server_args: Any) -> None:
    """Raises ConfigError if an argument cannot be combined with a pool, and names the argument. SGLang would report
    some of these later, but name arguments that the operator has not typed."""
    for name, supported in _WANTED.items():
        value = getattr(server_args, name, supported[0])
        if value not in supported:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value}: not supported beside the KV pool of PDConnector in this version; "
                f"leave it {supported[0]}, or leave out the config key `pool` in {CONFIG_VARIABLE}"
            )
    _check_handoffs(server_args)
    given = getattr(server_args, "unified_cache_external_linker_config", None)
    if given is not None and given != LINKER:
        raise ConfigError(
            f"--unified-cache-external-linker-config {given}: the config key `pool` in {CONFIG_VARIABLE} sets it; leave one "
            "of the two out"
        )


def _check_handoffs(server_args: Any) -> None:
    """Raises ConfigError if an engine of a pair hands over by another backend, or has no cache from which to save."""
    mode = getattr(server_args, "disaggregation_mode", "null")
    backend = getattr(server_args, "disaggregation_transfer_backend", None)
    if mode != "null" and backend != BACKEND:
        raise ConfigError(
            f"--disaggregation-transfer-backend {backend}: an engine of a pair uses the KV pool of PDConnector with {BACKEND} "
            f"alone; set it to {BACKEND}, or leave out the config key `pool` in {CONFIG_VARIABLE}"
        )
    if mode == "decode" and not getattr(
        server_args, "disaggregation_decode_enable_radix_cache", False
    ):
        raise ConfigError(
            "--disaggregation-mode decode: KV is saved when it enters SGLang's radix cache; add "
            f"--disaggregation-decode-enable-radix-cache, or leave out the config key `pool` in {CONFIG_VARIABLE} (its prefill "
            "engines save and load without it)"
        )


def check_linker(server_args: Any, params: Any, components: Collection[Any]) -> None:
    """Raises ConfigError if the cache of an engine cannot be kept."""
    check_arguments(server_args)
    names = sorted(component.name for component in components)
    if names not in (["FULL"], ["FULL", "SWA"]):
        raise ConfigError(
            f"cache of {', '.join(names)}: the KV pool of PDConnector keeps full attention and sliding windows of SGLang in this "
            f"version; serve this model without the config key `pool` in {CONFIG_VARIABLE}"
        )
    check_page_size(params.page_size)


def check_page_size(page_size: int) -> None:
    """Raises ConfigError if a chunk is not a whole number of pages."""
    if CHUNK_TOKENS % page_size:
        raise ConfigError(
            f"--page-size {page_size}: the pool's chunks have {CHUNK_TOKENS} tokens, and SGLang loads whole pages; "
            f"set it to a divisor of {CHUNK_TOKENS}, such as 64"
        )


def check_model(scheduler: Any, parallel: Any) -> None:
    """Raises ConfigError if KV of this model does not follow from tokens."""
    model = scheduler.model_config
    if getattr(model, "is_multimodal", False):
        raise ConfigError(
            "this model takes images or other inputs: SGLang's engines keep KV of text models in the pool in this version; "
            "leave out the config key `pool`"
        )
    if not getattr(model, "is_generation", True):
        raise ConfigError(
            "this model generates nothing: its pooling needs every token; leave out the config key `pool`"
        )
    if parallel.attn_dp_size > 1:
        raise ConfigError("--enable-dp-attention: not supported beside the KV pool of PDConnector")


def check_kv_pool(pool: Any, allocator: Any) -> None:
    """Raises ConfigError if a prompt's KV has parts that a load would not wait for, or pages that are not the cache's."""
    pools = pool, getattr(pool, "full_kv_pool", None), getattr(pool, "swa_kv_pool", None)
    if any(getattr(each, "use_dsa", False) for each in pools):
        raise ConfigError(
            "sparse attention (DSA): the KV pool of PDConnector does not keep index keys of SGLang in this version; serve "
            f"this model without the config key `pool` in {CONFIG_VARIABLE}"
        )
    if getattr(pool, "full_layer_nums", 1) == 0:
        raise ConfigError(
            "all layers have a sliding window: the KV pool of PDConnector keeps windows of SGLang beside full attention in this "
            "version; add --disable-hybrid-swa-memory, so that SGLang keeps all tokens, or leave out the config key `pool` in "
            f"{CONFIG_VARIABLE}"
        )
    if getattr(allocator, "swa_req_ring", False):
        raise ConfigError(
            "sliding windows in a ring of each request: SGLang's cache does not have them; leave out the config key `pool` in "
            f"{CONFIG_VARIABLE}"
        )
