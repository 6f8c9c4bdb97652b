# SPDX-License-Identifier: Apache-2.0
"""Which settings of vLLM the connector can serve, and its own config as vLLM passes it."""

from typing import TYPE_CHECKING, Any

from pd_connector.config import Config
from pd_connector.errors import ConfigError
from pd_connector.pool.host import settings_of
from pd_connector.vllm.pages.state_tables import StateTables
from pd_connector.vllm.shards import context_parallel

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

NAME = "PDConnector"
"""The connector's name in `kv_connector`."""
HOST_VARIABLE = "VLLM_HOST_IP"
"""vLLM's own variable for the address of this host."""


def load_config(extra: dict[str, Any]) -> Config:
    """The config in vLLM's `kv_connector_extra_config`. Raises ConfigError."""
    config = Config.load(extra, host_variable=HOST_VARIABLE)
    settings_of(config.pool)  # only its check
    return config


def check_name(transfer: Any) -> None:
    """Raises ConfigError if the name in vLLM's KVTransferConfig differs from ours only in case. vLLM would report it
    later as unsupported, without advice."""
    name = getattr(transfer, "kv_connector", None)
    if not isinstance(name, str) or name == NAME or name.lower() != NAME.lower():
        return
    if not transfer.kv_connector_module_path:  # Dynamo's PdConnector has one
        raise ConfigError(f"kv_connector {name!r}: did you mean {NAME!r}?")


def connector_parts(transfer: Any) -> list[dict[str, Any]]:
    """The `kv_connector_extra_config` of each PDConnector in vLLM's KVTransferConfig: its own, or those of parts of a
    MultiConnector. Empty without one."""
    if transfer is None:
        return []
    name, extra = transfer.kv_connector, transfer.kv_connector_extra_config or {}
    if name == NAME:
        return [extra]
    parts = extra.get("connectors") if isinstance(extra, dict) else None
    return [
        part.get("kv_connector_extra_config") or {}
        for part in (parts if isinstance(parts, list) else ())
        if isinstance(part, dict) and part.get("kv_connector") == NAME
    ]


def gets_embeddings(vllm_config: "VllmConfig") -> bool:
    """Whether an encode engine sends this engine the embeddings of images and other inputs."""
    settings = vllm_config.ec_transfer_config
    return settings is not None and bool(settings.is_ec_consumer)


def attends_ahead(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether tokens of a prompt attend to what follows them (prefix LM)."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    layers = [
        layer_spec
        for spec in specs
        for layer_spec in getattr(spec, "kv_cache_specs", {0: spec}).values()
    ]
    return any(getattr(layer, "non_causal", False) for layer in layers)


def check_prefixes(
    config: Config, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig"
) -> None:
    """Raises ConfigError if the config has a pool, but KV of this model cannot be shared between prompts. vLLM turns
    off its prefix cache for such a model, and a pool would give wrong answers."""
    if not config.pool:
        return
    if attends_ahead(kv_cache_config):
        raise ConfigError(
            "pool: this model's prompts attend to what follows (prefix LM), so KV of a beginning depends on the whole "
            "prompt; leave out the config key pool"
        )
    if StateTables.of(group.kv_cache_spec for group in kv_cache_config.kv_cache_groups):
        raise ConfigError(
            "pool: this model keeps recurrent states, which the pool has no form for: only handoffs move them; leave out "
            "the config key pool"
        )
    if max(context_parallel(vllm_config)) > 1:
        raise ConfigError(
            "pool: ranks of context parallelism share the tokens of a chunk, or keep copies of it, which the pool has no "
            "form for: only handoffs move them; leave out the config key pool"
        )
    model = vllm_config.model_config
    if not model.is_prefix_caching_supported:
        why = (
            "its pooling needs every token of a prompt"
            if model.pooler_config
            else f"KV of a prompt's beginning does not stand for it alone (attention: {model.attn_type})"
        )
        raise ConfigError(
            f"pool: vLLM has no prefix cache for this model, since {why}; leave out the config key pool"
        )


def _tells_of_sleep() -> bool:
    """Whether vLLM tells a connector before its pages lose their memory: 0.33 and later do."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return hasattr(KVConnectorBase_V1, "unregister_kv_caches")


def check_supported(vllm_config: "VllmConfig") -> None:
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):  # 0.31
        raise ConfigError(
            "calculate_kv_scales: vLLM would compute scales of the FP8 cache while it serves, but peers are told "
            "the scales when it starts; take a checkpoint that has scales, or leave the option out"
        )
    sleeps = getattr(vllm_config.model_config, "enable_sleep_mode", False)
    if sleeps and not _tells_of_sleep():
        raise ConfigError(
            "enable_sleep_mode: this version of vLLM does not say when a sleeping engine frees the memory of pages, "
            "which another engine may be fetching; install vLLM 0.33, leave the option out, or end the process instead"
        )
    # 0.32; earlier, a setting of the model.
    if any(
        getattr(getattr(vllm_config, part, None), "enable_return_routed_experts", False)
        for part in ("aux_output_config", "model_config")
    ):
        raise ConfigError(
            "enable_return_routed_experts: only the prefill engine knows which experts a prompt took, and "
            "does not send them to the decode engine; leave the option out"
        )
