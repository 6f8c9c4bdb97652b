# SPDX-License-Identifier: Apache-2.0
"""Steps with prefill chunks and decodes, in one launch of `mixed_attention` per layer instead of
two kernels in turn.

Off until a benchmark on a GPU has chosen it (`Tuning.mixed_steps`).
"""

from collections.abc import Sequence
from typing import Any

import torch

from pd_kernels.attention import MixedPlan
from pd_kernels.tuning import tuning
from pd_kernels.vllm.batch_split import Decodes

PlanKey = tuple[int, int]
"""A layer's window and query heads. Layers of a group with equal values share a plan."""


def mixed_plans(
    common: Any, decodes: Decodes, layers: Sequence[Any], page_size: int, dtype: torch.dtype
) -> dict[PlanKey, MixedPlan]:
    """The plans of a step for all layers of a group. Empty if `mixed_attention` does not take the step.

    Nothing is read from the device, because the host knows where queries begin.

    Args:
        common: vLLM's `CommonAttentionMetadata` of the whole step.
        decodes: the step's decodes, which come first.
        layers: vLLM's layers of the group, whose `impl` is a `PagedImpl`.
        page_size: tokens of a page.
        dtype: the model's dtype.
    """
    prefills = common.num_actual_tokens > decodes.tokens
    if not tuning().mixed_steps or not prefills:
        return {}
    impls = {layer.impl.plan_key: layer.impl for layer in layers}
    starts = common.query_start_loc_cpu.tolist()
    scalar = torch.empty((), dtype=dtype, device=common.seq_lens.device)
    plans = {}
    for key, impl in impls.items():
        cache = scalar.to(impl.stored_dtype or dtype)
        places = 1, page_size, impl.num_kv_heads
        plans[key] = MixedPlan.of(
            scalar.expand(starts[-1], impl.num_heads, impl.head_size),
            cache.expand(*places, impl.head_size),
            common.block_table_tensor,
            common.seq_lens,
            starts,
            decodes.requests,
            impl.window,
            cache.expand(*places, impl.value_size),
        )
    return plans
