# SPDX-License-Identifier: Apache-2.0
"""Attention of decode batches over paged caches, one launch each, balanced by length.

`paged_decode` has keys and values per head, `mla_decode` one latent for all heads; `DecodePlan` shares a
schedule between layers, `Mod` changes scores and masks, `merge_partials` joins shards of sequences.
"""

from pd_kernels.attention.merge import Partials, merge_partials
from pd_kernels.attention.mla import mla_decode, plan_mla_decode
from pd_kernels.attention.mods import Mod, alibi, document, soft_cap
from pd_kernels.attention.paged import paged_decode, plan_paged_decode
from pd_kernels.attention.plan_kernel import DecodePlan

__all__ = [
    "DecodePlan",
    "Mod",
    "Partials",
    "alibi",
    "document",
    "merge_partials",
    "mla_decode",
    "paged_decode",
    "plan_mla_decode",
    "plan_paged_decode",
    "soft_cap",
]
