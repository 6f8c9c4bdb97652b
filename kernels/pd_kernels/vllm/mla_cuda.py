# SPDX-License-Identifier: Apache-2.0
"""Replace MLA backends on NVIDIA GPUs. All of them use vLLM's common cache and prefill, so one
class serves under several names.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

from pd_kernels.attention.decode_call import LARGE_MEMORY
from pd_kernels.attention.mla_call import LATENT, ROPE
from pd_kernels.vllm.mla_backend import MlaBuilder, MlaImpl
from pd_kernels.vllm.plugin import MLA_VARIABLE
from pd_kernels.vllm.refusals import FP8_NAMES

CODED = "fp8_ds_mla"
"""vLLM's name of FlashMLA's FP8 layout, 656 bytes a token."""


class StandIn:
    """A backend in the place of one of vLLM's. What vLLM prints if it cannot be selected ends with the way out."""

    @classmethod
    def validate_configuration(cls, *args: Any, **named: Any) -> list[str]:
        reasons: list[str] = super().validate_configuration(*args, **named)  # type: ignore[misc]
        if reasons:
            name = cls.get_name()  # type: ignore[attr-defined]
            reasons.append(f"unset {MLA_VARIABLE} to have vLLM's own {name}")
        return reasons


def refusal(kernel: str, reasons: Sequence[str], capability: Any) -> str | None:
    """What `supports_combination` has against a backend; None if nothing.

    Args:
        kernel: the function that decodes.
        reasons: what is against it besides the GPU.
        capability: of the GPU, if vLLM knows one.
    """
    every = list(reasons)
    if capability is not None and capability.major not in LARGE_MEMORY:
        every.append(
            f"compute capability {capability.major}.{capability.minor}: {kernel} needs "
            "148 KiB of shared memory and runs on 9.0 and 10.x"
        )
    return "; ".join(every) or None


class MlaImplCuda(MlaImpl, TritonMLAImpl):
    """A layer with the common MLA cache. Triton's class refuses everything that our class does not
    support."""


class TritonMla(StandIn, MLACommonBackend):
    """TRITON_MLA with our decodes."""

    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16", *FP8_NAMES, CODED)

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
        """False: `_build_decode` looks at the host's numbers of new tokens to see whether a batch is ragged."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        reasons = []
        same = (None, "auto", str(dtype).removeprefix("torch."))
        if kv_cache_dtype not in (*same, *FP8_NAMES, CODED):
            reasons.append(
                f"cache dtype {kv_cache_dtype}: must be that of the model ({dtype}), fp8_e4m3 or {CODED}"
            )
        if kv_cache_dtype == CODED and dtype != torch.bfloat16:
            reasons.append(f"model dtype {dtype}: must be bfloat16 for a cache of {CODED}")
        return refusal("mla_decode", reasons, device_capability)

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
