# SPDX-License-Identifier: Apache-2.0
"""Entry point of the group `vllm.general_plugins`: vLLM calls `register` in each of its
processes."""

import os

from pd_kernels.vllm.mla_members import MLA_MEMBERS

MLA_VARIABLE = "PD_KERNELS_MLA"
"""Environment variable that names the MLA backend of vLLM that our backend replaces."""


def register() -> None:
    """Register our backends: as CUSTOM, and as the MLA backend that PD_KERNELS_MLA names, if it is
    set. FLASH_ATTN_DIFFKV and CPU_ATTN become names of vLLM's own class or of ours, as the engine selects. Also warn, when an engine starts, of layers that do not use ours although it is selected.

    May be called several times. Nothing changes for an engine that selects neither.

    Raises:
        ValueError: PD_KERNELS_MLA names a backend that our backend cannot replace.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cuda():
        register_backend(AttentionBackendEnum.CUSTOM, "pd_kernels.vllm.paged_cuda.PagedFlash")
        # Models that choose their backend themselves choose it by this name.
        register_backend(
            AttentionBackendEnum.FLASH_ATTN_DIFFKV,
            "pd_kernels.vllm.diffkv_choice.FLASH_ATTN_DIFFKV",
        )
    elif current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CUSTOM, "pd_kernels.vllm.paged_cpu.PagedCpu")
        # On a CPU vLLM always takes CPU_ATTN.
        register_backend(AttentionBackendEnum.CPU_ATTN, "pd_kernels.vllm.cpu_choice.CPU_ATTN")
    member = os.environ.get(MLA_VARIABLE)
    if member:
        if member not in MLA_MEMBERS:
            raise ValueError(f"{MLA_VARIABLE}={member}: must be one of {', '.join(MLA_MEMBERS)}")
        register_backend(AttentionBackendEnum[member], MLA_MEMBERS[member])
    from pd_kernels.vllm import other_backends

    other_backends.watch()
