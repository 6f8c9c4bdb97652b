# SPDX-License-Identifier: Apache-2.0
"""The MLA backends of vLLM that ours can replace, with the class that does."""

MLA_MEMBERS = {
    "CPU_MLA": "pd_kernels.vllm.mla_cpu.CpuMla",
    "TRITON_MLA": "pd_kernels.vllm.mla_cuda.TritonMla",
    "FLASHMLA": "pd_kernels.vllm.mla_cuda.FlashMla",
    "FLASH_ATTN_MLA": "pd_kernels.vllm.mla_cuda.FlashAttnMla",
    "FLASHMLA_SPARSE": "pd_kernels.vllm.mla_sparse.FlashMlaSparse",
    "FLASH_ATTN_MLA_SPARSE": "pd_kernels.vllm.mla_sparse.FlashAttnMlaSparse",
}
