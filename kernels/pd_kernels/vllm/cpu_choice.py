# SPDX-License-Identifier: Apache-2.0
"""The class behind the name CPU_ATTN: vLLM's, or ours if the engine selects CUSTOM.

On a CPU, vLLM ignores `--attention-backend` and takes the class registered as CPU_ATTN. The plugin
registers this module's attribute CPU_ATTN. vLLM looks it up again for each model.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "CPU_ATTN":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    config = get_current_vllm_config_or_none()
    if config is None or config.attention_config.backend is not AttentionBackendEnum.CUSTOM:
        return CPUAttentionBackend
    from pd_kernels.vllm.paged_cpu import PagedCpu

    return PagedCpu
