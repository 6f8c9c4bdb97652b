# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA of DeepSeek V3.2 and GLM-5 on NVIDIA GPUs: `sparse_mla_decode` reads what the indexer has chosen.

vLLM's common code chooses the tokens, writes the cache, and computes prompts that are no longer than the choice. All other
tokens, of prompts and decodes alike, are queries of one call.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla import sparse_utils
from vllm.v1.attention.backends.mla.index_group import HiSparseMLAIndexGroup
from vllm.v1.attention.backends.mla.sparse_utils import (
    flat_kv_row_view,
    triton_convert_req_index_to_global_index,
)

from pd_kernels.attention import DecodePlan
from pd_kernels.attention.mla_call import LATENT, ROPE
from pd_kernels.attention.mla_sparse import plan_sparse_mla_decode, sparse_mla_decode
from pd_kernels.vllm.mla_cuda import CODED, StandIn, refusal
from pd_kernels.vllm.plugin import MLA_VARIABLE

logger = init_logger("vllm.pd_kernels")

ALIASES = ("fp8", "fp8_e4m3")
"""Names that vLLM takes for CODED if the backend is FLASHMLA_SPARSE."""

PIECE = 4096
"""The most queries of one call. A plan for more would be a slow kernel, because one program makes it."""


@dataclass(kw_only=True)
class SparseMlaMetadata(SparseMLACommonMetadata):
    """Metadata of a step.

    Attributes:
        counts: tokens that each query attends to, int32 `[queries]`.
        plan: the work partition for these counts, for all layers; None on a CPU and for more queries than decodes have.
        piece_plan: for pieces of up to PIECE queries, filled for each of them; None on a CPU.
    """

    counts: torch.Tensor | None = None
    plan: DecodePlan | None = None
    piece_plan: DecodePlan | None = None


class SparseMlaBuilder(SparseMLACommonMetadataBuilder[SparseMlaMetadata]):
    """Makes the metadata of a step, and the plan of its queries."""

    metadata_cls = SparseMlaMetadata
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        most = vllm_config.scheduler_config.max_num_batched_tokens
        few = vllm_config.scheduler_config.max_num_seqs * (self.reorder_batch_threshold or 1)
        graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self._few = min(most, max(few, graphs))
        self._piece = min(most, PIECE)
        self._counts = torch.zeros(most, dtype=torch.int32, device=device)
        self._layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._plans: tuple[DecodePlan, DecodePlan] | None = None  # of decodes, of pieces
        logger.info_once("Sparse attention with pd_kernels.sparse_mla_decode.")

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> SparseMlaMetadata:
        metadata: SparseMlaMetadata = super().build(
            common_prefix_len, common_attn_metadata, fast_build
        )
        dense = metadata.prefill is not None and metadata.prefill.use_dense_mha
        queries = metadata.num_decode_tokens if dense else metadata.num_actual_tokens
        if not queries:
            return metadata
        counts = self._counts[:queries]
        request = metadata.req_id_per_token[:queries].long()
        ends, lengths = metadata.query_start_loc[1:], common_attn_metadata.seq_lens
        token = torch.arange(queries, device=counts.device)
        place = lengths[request] - ends[request] + token  # in its sequence
        counts.copy_((place + 1).clamp(0, self.topk_tokens))
        metadata.counts = counts
        if counts.is_cuda:
            plan, metadata.piece_plan = self._planned(counts)
            metadata.plan = plan.fill(counts) if queries <= self._few else None
        return metadata

    def _planned(self, counts: torch.Tensor) -> tuple[DecodePlan, DecodePlan]:
        """A plan for the queries of decodes and of CUDA graphs, whose address never changes, and one for pieces. Both are
        made and compiled by the first step, which is one of vLLM's own."""
        if self._plans is None:
            scalar = torch.empty((), dtype=self.model_config.dtype, device=self.device)
            heads = self.model_config.get_num_attention_heads(self.vllm_config.parallel_config)
            rows, _ = flat_kv_row_view(self._layer.kv_cache, self.kv_cache_spec.block_size)
            query = scalar.expand(1, heads, LATENT + ROPE)
            plan, pieces = (
                plan_sparse_mla_decode(query, rows, max_tokens=most)
                for most in (self._few, self._piece)
            )
            pieces.fill(counts[:1])
            self._plans = plan, pieces
        return self._plans


class SparseMlaImpl(SparseMLACommonImpl[SparseMlaMetadata]):
    """A layer whose sparse attention our kernel computes."""

    can_return_lse_for_decode = False
    supports_dcp = False
    supports_pcp = False

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        if isinstance(self.index_group, HiSparseMLAIndexGroup):
            raise NotImplementedError(f"HiSparse: unset {MLA_VARIABLE} to have vLLM's own backend")
        self.supports_quant_query_input = False

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMlaMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        rows, stride = flat_kv_row_view(kv_c_and_k_pe_cache, attn_metadata.block_size)
        slots, counts = self._slots(len(query), attn_metadata, stride)
        planned, plan, pieces = attn_metadata.counts, attn_metadata.plan, attn_metadata.piece_plan
        if planned is None or len(planned) != len(query):
            planned, plan = counts, None
        # Otherwise the plan's counts. Where the indexer has chosen fewer, the rest of the slots is -1.
        if plan is not None or pieces is None:
            return sparse_mla_decode(query, rows, slots, planned, scale=self.scale, plan=plan), None
        out = query.new_empty(*query.shape[:2], LATENT)
        for parts in zip(
            *(each.split(pieces.room) for each in (query, slots, planned, out)), strict=True
        ):
            some, its_slots, its_counts, its_out = parts
            pieces.fill(its_counts)
            sparse_mla_decode(
                *(some, rows, its_slots, its_counts), scale=self.scale, out=its_out, plan=pieces
            )
        return out, None

    def _slots(
        self, queries: int, attn_metadata: SparseMlaMetadata, stride: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that each query attends to, int32 `[queries, top k]`, and their number, int32 `[queries]`."""
        buffer = self.topk_indices_buffer
        assert buffer is not None, "the layer has no indexer"
        chosen, group = buffer[:queries], self.index_group
        if (
            group is not None
            and group.num_layers > 1
            and attn_metadata.num_decode_tokens == queries
        ):
            converted = self._convert_logical_to_physical_topk(
                chosen, attn_metadata, block_stride_rows=stride, return_valid_counts=True
            )
        else:
            converted = triton_convert_req_index_to_global_index(
                attn_metadata.req_id_per_token[:queries],
                attn_metadata.block_table,
                chosen,
                BLOCK_SIZE=attn_metadata.block_size,
                BLOCK_STRIDE_ROWS=stride,
                NUM_TOPK_TOKENS=chosen.shape[1],
                return_valid_counts=True,
            )
        slots, counts = converted
        return slots, counts


class FlashMlaSparse(StandIn, AttentionBackend):
    """FLASHMLA_SPARSE with our kernel."""

    supported_dtypes = (torch.bfloat16, torch.float16)
    supported_kv_cache_dtypes: ClassVar[Any] = ("auto", "bfloat16", "float16", CODED, *ALIASES)

    @staticmethod
    def get_name() -> str:
        return "FLASHMLA_SPARSE"

    @staticmethod
    def get_impl_cls() -> type[SparseMlaImpl]:
        return SparseMlaImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMlaBuilder]:
        return SparseMlaBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(64)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [LATENT + ROPE]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        align = getattr(sparse_utils, "align_blocks_to_rows", None)  # 0.31 has none
        return align(spec) if align else spec

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

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
        coded = {CODED, *ALIASES} & set(cls.supported_kv_cache_dtypes)
        if kv_cache_dtype not in (*same, *coded):
            reasons.append(
                f"cache dtype {kv_cache_dtype}: must be that of the model ({dtype}) or {CODED}"
            )
        if kv_cache_dtype in coded and dtype != torch.bfloat16:
            reasons.append(f"model dtype {dtype}: must be bfloat16 for a cache of {CODED}")
        return refusal("sparse_mla_decode", reasons, device_capability)


class FlashAttnMlaSparse(FlashMlaSparse):
    """The same under FLASH_ATTN_MLA_SPARSE's name."""

    supported_kv_cache_dtypes = ("auto", "bfloat16", "float16", CODED)

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN_MLA_SPARSE"
