# SPDX-License-Identifier: Apache-2.0
"""The attention metadata of a step: its decodes, the rest, and the plans of the kernels. It is made
once a step for all layers of a group."""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from pd_kernels.attention import DecodePlan, MixedPlan, plan_paged_decode
from pd_kernels.attention.paged_call import MAX_QUERIES
from pd_kernels.vllm.batch_split import Decodes, decodes_of, rest_of
from pd_kernels.vllm.mixed_steps import PlanKey, mixed_plans

logger = init_logger("vllm.pd_kernels")


@dataclass
class PagedMetadata:
    """Metadata of a step, for the layers of a group. The other attributes are vLLM's.

    Attributes:
        decodes: the decodes, which come first in the batch; None if there are none.
        rest: the stock backend's metadata of all other tokens; None if there are none.
        plans: work partitions of the decodes; empty on a CPU.
        mixed: plans of all tokens, decodes or not. If there are any, `rest` and `plans` are not
            needed.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    decodes: Decodes | None
    rest: Any
    plans: dict[PlanKey, DecodePlan] = field(default_factory=dict)
    mixed: dict[PlanKey, MixedPlan] = field(default_factory=dict)


class PagedBuilder(AttentionMetadataBuilder):
    """Splits the batch of a step, and makes the plans of its decodes."""

    # All decodes of a batch have the same number of queries; their lengths may differ.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = False

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.supports_draft_decode_metadata_update = False
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        if self.reorder_batch_threshold > MAX_QUERIES:
            raise NotImplementedError(
                f"{self.reorder_batch_threshold} tokens are verified at a time: at most {MAX_QUERIES}, "
                "set num_speculative_tokens lower"
            )
        if vllm_config.cache_config.kv_sharing_fast_prefill:
            raise NotImplementedError("kv_sharing_fast_prefill: leave it out with CUSTOM attention")
        self._layers = [
            vllm_config.compilation_config.static_forward_context[name] for name in layer_names
        ]
        self._batch = max(
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.compilation_config.max_cudagraph_capture_size or 0,
        )
        self._allocated: dict[int, dict[PlanKey, DecodePlan]] = {}  # by the number of queries
        logger.info_once("Decoding with pd_kernels.paged_decode.")

    def use_cascade_attention(self, *args: Any, **named: Any) -> bool:
        """No: vLLM 0.31 asks where `--no-disable-cascade-attn` is set. Decodes would leave CUDA graphs for nothing, because
        they do not use a shared prefix. Later versions do not ask."""
        return False

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PagedMetadata:
        common = common_attn_metadata
        decodes = decodes_of(common, self.reorder_batch_threshold, self._batch)
        mixed = self._mixed(common, decodes) if decodes else {}
        rest = rest_of(common, decodes) if decodes else common
        if mixed:
            rest = None
        elif rest is not None:
            rest = super().build(common_prefix_len, rest, fast_build)
        return PagedMetadata(
            common.num_actual_tokens,
            common.max_query_len,
            common.query_start_loc,
            common.max_seq_len,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            decodes,
            rest,
            self._plans(decodes) if decodes and not mixed else {},
            mixed,
        )

    def _mixed(self, common: Any, decodes: Decodes) -> dict[PlanKey, MixedPlan]:
        size, dtype = self.kv_cache_spec.block_size, self.vllm_config.model_config.dtype
        return mixed_plans(common, decodes, self._layers, size, dtype)

    def _plans(self, decodes: Decodes) -> dict[PlanKey, DecodePlan]:
        """The plans of the group's layers, filled for these decodes."""
        if self.device.type == "cpu":  # the reference in torch needs no plan
            return {}
        plans = self._allocated.get(decodes.queries)
        if plans is None:
            impls = {layer.impl.plan_key: layer.impl for layer in self._layers}
            plans = {key: self._allocate(impl, decodes.queries) for key, impl in impls.items()}
            self._allocated[decodes.queries] = plans
        return {key: plan.fill(decodes.lengths) for key, plan in plans.items()}

    def _allocate(self, impl: Any, queries: int) -> DecodePlan:
        """A plan for a layer and a number of queries per request. It is large enough for every CUDA
        graph, and its address never changes."""
        scalar = torch.empty((), dtype=self.vllm_config.model_config.dtype, device=self.device)
        q = scalar.expand(1, queries, impl.num_heads, impl.head_size)
        cache = scalar.to(impl.stored_dtype or scalar.dtype)
        places = 1, self.kv_cache_spec.block_size, impl.num_kv_heads
        keys, values = (cache.expand(*places, dim) for dim in (impl.head_size, impl.value_size))
        return plan_paged_decode(q, keys, values, window=impl.window, max_batch=self._batch)
