# SPDX-License-Identifier: Apache-2.0
"""Entry point of the group `vllm.general_plugins`; vLLM calls it in each of its processes."""

import os

MLA_VARIABLE = "PD_KERNELS_MLA"
"""Names the MLA backend of vLLM's that ours takes the place of."""

MLA_MEMBERS = {
    "CPU_MLA": "pd_kernels.vllm.mla_cpu.CpuMla",
    "TRITON_MLA": "pd_kernels.vllm.mla_cuda.TritonMla",
    "FLASHMLA": "pd_kernels.vllm.mla_cuda.FlashMla",
    "FLASH_ATTN_MLA": "pd_kernels.vllm.mla_cuda.FlashAttnMla",
}


def register() -> None:
    """Make `--attention-backend CUSTOM` ours, and the MLA backend that PD_KERNELS_MLA names, if any.

    Harmless to repeat. Nothing changes for an engine that selects neither.

    Raises:
        ValueError: PD_KERNELS_MLA names a backend that ours cannot stand in for.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cuda():
        register_backend(AttentionBackendEnum.CUSTOM, "pd_kernels.vllm.paged_cuda.PagedFlash")
    elif current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CUSTOM, "pd_kernels.vllm.paged_cpu.PagedCpu")
        # On a CPU vLLM takes CPU_ATTN whatever is selected.
        register_backend(AttentionBackendEnum.CPU_ATTN, "pd_kernels.vllm.cpu_choice.CPU_ATTN")
    member = os.environ.get(MLA_VARIABLE)
    if member:
        if member not in MLA_MEMBERS:
            raise ValueError(f"{MLA_VARIABLE}={member}: must be one of {', '.join(MLA_MEMBERS)}")
        register_backend(AttentionBackendEnum[member], MLA_MEMBERS[member])
