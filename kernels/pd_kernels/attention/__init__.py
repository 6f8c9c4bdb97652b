# SPDX-License-Identifier: Apache-2.0
"""Attention of decode batches over paged caches: one launch per batch, balanced by the lengths of
sequences.

`paged_decode` is for keys and values per head, `mla_decode` for one latent of all heads.
`sparse_mla_decode` for latents that are chosen one by one.
`DecodePlan` holds the work partition that layers share, `Mod` changes scores and masks,
`merge_partials` joins shards of sequences. `mixed_attention` computes prefill chunks in the same
launch.

One call, in the order of the files: `paged.py` (the public function), `paged_call.py` and
`decode_call.py` (checks, launch options), `operators.py` (kernel or reference), `decode_plan.py`
with `work_partition.py` and `plan_kernel.py` (which worker does what), `paged_kernel.py` with
`online_softmax.py` (attention), `split_merge.py` (split-KV partials).
"""

from pd_kernels.attention.decode_plan import DecodePlan
from pd_kernels.attention.merge import Partials, merge_partials
from pd_kernels.attention.mixed import MixedPlan, mixed_attention
from pd_kernels.attention.mla import mla_decode, plan_mla_decode
from pd_kernels.attention.mla_sparse import plan_sparse_mla_decode, sparse_mla_decode
from pd_kernels.attention.mods import Mod, alibi, document, soft_cap
from pd_kernels.attention.paged import paged_decode, plan_paged_decode

__all__ = [
    "DecodePlan",
    "MixedPlan",
    "Mod",
    "Partials",
    "alibi",
    "document",
    "merge_partials",
    "mixed_attention",
    "mla_decode",
    "paged_decode",
    "plan_mla_decode",
    "plan_paged_decode",
    "plan_sparse_mla_decode",
    "soft_cap",
    "sparse_mla_decode",
]
