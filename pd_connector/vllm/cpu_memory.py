# SPDX-License-Identifier: Apache-2.0
"""Says before vLLM allocates it how much memory its CPU build will take: one engine leaves none for a second one."""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("pd_connector.vllm")

GIB = 1 << 30
HALF = 0.5
"""Two engines that take no more fit beside each other."""


def warn_if_alone(config: "VllmConfig") -> None:
    """Log a warning if this engine, on CPUs, takes so large a part of the machine's memory that no second one starts."""
    from vllm.platforms import current_platform

    cache = config.cache_config
    part = cache.gpu_memory_utilization
    if not current_platform.is_cpu() or cache.kv_cache_memory_bytes is not None or part <= HALF:
        return
    total_gib = current_platform.get_device_total_memory() / GIB
    logger.warning(
        "no size of the KV cache is set: on CPUs vLLM reserves %.0f %% of the memory for this engine, %.1f of %.1f GiB, "
        "so no second engine starts on this machine. What to do: set VLLM_CPU_KVCACHE_SPACE, in GiB, for each engine",
        *(part * 100, part * total_gib, total_gib),
    )
