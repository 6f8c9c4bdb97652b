# SPDX-License-Identifier: Apache-2.0
"""MLA: `mla_decode` computes decodes. The stock backend computes prefills and writes the cache.

vLLM's common MLA code splits the batch. A backend made of these classes differs from the stock
backend only in its decodes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from pd_kernels.attention import DecodePlan
from pd_kernels.attention.mla import mla_decode, plan_mla_decode
from pd_kernels.attention.mla_call import CODED_BYTES, MAX_QUERIES
from pd_kernels.attention.paged_call import FP8

logger = init_logger("vllm.pd_kernels")


@dataclass
class MlaDecodes(MLACommonDecodeMetadata):
    """Metadata of the decodes of a batch.

    Attributes:
        queries: new tokens of each request. In a ragged batch, the most that a decode may have: `padded` and `own`
            bring the tokens into that form, and back.
        plan: the work partition, for all layers; None on a CPU.
    """

    queries: int
    plan: DecodePlan | None
    padded: torch.Tensor | None = None
    """In a ragged batch: the token of each query, int64 `[requests * queries]`. A request's tokens are its last
    queries; those before them are any tokens, and nobody reads their results."""

    own: torch.Tensor | None = None
    """In a ragged batch: the query of each token, int64 `[tokens]`."""


class MlaBuilder(MLACommonMetadataBuilder):
    """Makes the metadata of a step, and the plan of its decodes."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    query_len_support = QueryLenSupport.VARLEN

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self.reorder_batch_threshold > MAX_QUERIES:
            raise NotImplementedError(
                f"{self.reorder_batch_threshold} tokens are verified at a time: at most {MAX_QUERIES}, "
                "set num_speculative_tokens lower"
            )
        self._batch = max(
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.compilation_config.max_cudagraph_capture_size or 0,
        )
        self._layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._plans: dict[int, DecodePlan] = {}  # by the number of queries
        logger.info_once("Decoding with pd_kernels.mla_decode.")

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> MlaDecodes:
        counts = query_start_loc_cpu.diff()
        queries, padded, own = int(counts[0]), None, None
        # Requests that pad a batch for a CUDA graph may have no tokens.
        if bool(((counts == queries) | (counts == 0)).all()):
            requests = num_decode_tokens // queries
        else:
            requests, queries = len(counts), self.reorder_batch_threshold
            padded, own = _padded(query_start_loc_device, queries, num_decode_tokens)
        lengths = seq_lens_device[:requests]
        return MlaDecodes(
            block_table=block_table_tensor[:requests],
            seq_lens=lengths,
            dcp_tot_seq_lens=None,
            queries=queries,
            plan=self._plan(queries).fill(lengths) if self.device.type != "cpu" else None,
            padded=padded,
            own=own,
        )

    def _plan(self, queries: int) -> DecodePlan:
        """The plan for a number of queries per request. It is large enough for every CUDA graph,
        and its address never changes."""
        if queries not in self._plans:
            scalar = torch.empty((), dtype=self.model_config.dtype, device=self.device)
            cache = self._layer.kv_cache
            if cache.dtype == torch.uint8 and cache.shape[-1] != CODED_BYTES:
                cache = cache.view(FP8)  # as layers get it
            self._plans[queries] = plan_mla_decode(
                scalar.expand(1, queries, self.num_heads, self.kv_cache_spec.head_size),
                cache,  # the choice of a kernel depends on its strides and alignment
                max_batch=self._batch,
            )
        return self._plans[queries]


class MlaImpl(MLACommonImpl):
    """A layer that decodes with our kernels."""

    can_return_lse_for_decode = False
    supports_dcp = False
    supports_pcp = False

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        decodes = attn_metadata.decode
        lines = query if decodes.padded is None else query[decodes.padded]
        grouped = lines.view(-1, decodes.queries, *lines.shape[1:])
        coded = kv_c_and_k_pe_cache.dtype == FP8
        out = mla_decode(
            grouped,
            kv_c_and_k_pe_cache,
            decodes.block_table,
            decodes.seq_lens,
            scale=self.scale,
            kv_scale=layer._k_scale_float if coded else 1.0,
            plan=decodes.plan,
        ).view(*lines.shape[:2], -1)
        return out if decodes.own is None else out[decodes.own], None


def _padded(starts: torch.Tensor, queries: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`MlaDecodes.padded` and `own`. `starts`: where the tokens of each request begin, and where the last ones end."""
    ends = starts[1:].long()
    behind = torch.arange(queries, 0, -1, device=starts.device)
    padded = (ends[:, None] - behind).clamp(min=0).flatten()
    token = torch.arange(tokens, device=starts.device)
    request = torch.bucketize(token, ends, right=True)
    return padded, (request + 1) * queries - (ends[request] - token)
