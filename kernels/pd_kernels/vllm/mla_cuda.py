# SPDX-License-Identifier: Apache-2.0
"""Replace MLA backends on NVIDIA GPUs. All of them use vLLM's common cache and prefill, so one
class serves under several names.
"""

from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

from pd_kernels.attention.mla_call import LATENT, ROPE
from pd_kernels.vllm.mla_backend import MlaBuilder, MlaImpl


class MlaImplCuda(MlaImpl, TritonMLAImpl):
    """A layer with the common MLA cache. Triton's class refuses everything that our class does not
    support."""


class TritonMla(MLACommonBackend):
    """TRITON_MLA with our decodes."""

    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16")

    @staticmethod
    def get_name() -> str:
        return "TRITON_MLA"

    @staticmethod
    def get_impl_cls() -> type[MlaImplCuda]:
        return MlaImplCuda

    @staticmethod
    def get_builder_cls() -> type[MlaBuilder]:
        return MlaBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [LATENT + ROPE]

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """False: all decodes must have the number of new tokens that the host knows for the first
        decode."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        *others: Any,
        **named: Any,
    ) -> str | None:
        if kv_cache_dtype in (None, "auto", str(dtype).removeprefix("torch.")):
            return None
        return f"cache dtype {kv_cache_dtype}: must be that of the model ({dtype})"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]


class FlashMla(TritonMla):
    """The same under FLASHMLA's name."""

    @staticmethod
    def get_name() -> str:
        return "FLASHMLA"


class FlashAttnMla(TritonMla):
    """The same under FLASH_ATTN_MLA's name."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN_MLA"
