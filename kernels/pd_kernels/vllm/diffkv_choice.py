# SPDX-License-Identifier: Apache-2.0
"""The class behind the name FLASH_ATTN_DIFFKV: vLLM's, or ours if the engine selects CUSTOM.

Models whose values have another head size than their keys (MiMo-V2) choose their backend themselves, by
this name, whatever `--attention-backend` says. The plugin registers this module's attribute
FLASH_ATTN_DIFFKV. vLLM looks it up again for each layer.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "FLASH_ATTN_DIFFKV":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none
    from vllm.v1.attention.backends.flash_attn_diffkv import FlashAttentionDiffKVBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    config = get_current_vllm_config_or_none()
    if config is None:
        return FlashAttentionDiffKVBackend
    options = config.attention_config
    # Here nothing says of which kind the layer is.
    selected = {options.backend, *(getattr(options, "backend_per_kind", None) or {}).values()}
    if selected != {AttentionBackendEnum.CUSTOM}:
        return FlashAttentionDiffKVBackend
    from pd_kernels.vllm.paged_diffkv import PagedFlashDiffKv

    return PagedFlashDiffKv
