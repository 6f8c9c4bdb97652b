# SPDX-License-Identifier: Apache-2.0
"""Which settings of vLLM the connector can serve, and its own config as vLLM passes it."""

from typing import TYPE_CHECKING, Any

from pd_connector.config import Config
from pd_connector.errors import ConfigError
from pd_connector.pool.host import settings_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HOST_VARIABLE = "VLLM_HOST_IP"
"""vLLM's own variable for the address of this host."""


def load_config(extra: dict[str, Any]) -> Config:
    """The config in vLLM's `kv_connector_extra_config`. Raises ConfigError."""
    config = Config.load(extra, host_variable=HOST_VARIABLE)
    settings_of(config.pool)  # only its check
    return config


def gets_embeddings(vllm_config: "VllmConfig") -> bool:
    """Whether an encode engine sends this engine the embeddings of images and other inputs."""
    told = vllm_config.ec_transfer_config
    return told is not None and bool(told.is_ec_consumer)


def check_supported(vllm_config: "VllmConfig") -> None:
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):  # 0.31
        raise ConfigError(
            "calculate_kv_scales: vLLM would compute scales of the FP8 cache while it serves, but peers are told "
            "the scales when it starts; take a checkpoint that has scales, or leave the option out"
        )
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise ConfigError(
            "enable_sleep_mode: an engine that falls asleep frees the memory of pages while another engine "
            "fetches them; leave the option out, or end the process instead"
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
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise ConfigError(
                f"{name} {size}: PDConnector does not split a prompt's tokens over ranks; start "
                "the engine with 1"
            )
