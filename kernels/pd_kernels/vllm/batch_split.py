# SPDX-License-Identifier: Apache-2.0
"""Split a batch in two: decodes, which come first, and the rest, which the stock backend
computes."""

import dataclasses
import functools
from typing import Any

import torch

_REQUESTS = (
    "seq_lens",
    "block_table_tensor",
    "is_prefilling",
    "seq_lens_cpu_upper_bound",
    "req_idx",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu_upper_bound",
    "rswa_prefix_lens",
    "replayssm_decode_base_cpu",
)
_TOKENS = ("slot_mapping", "positions")
_COMPUTED_LATER = ("_num_computed_tokens_cache", "_token_to_req_indices_cache")


@dataclasses.dataclass(frozen=True, eq=False)
class Decodes:
    """The decodes of a batch: its first requests, all with the same number of new tokens.

    Attributes:
        queries: new tokens of each request.
        block_table: int32 `[requests, pages]`.
        lengths: int32 `[requests]`, tokens of KV, the new ones included; 0 for padding.
    """

    queries: int
    block_table: torch.Tensor
    lengths: torch.Tensor

    @functools.cached_property
    def requests(self) -> int:
        return int(self.lengths.shape[0])

    @functools.cached_property
    def tokens(self) -> int:
        """Every layer of a step asks for it."""
        return self.requests * self.queries


def decodes_of(common: Any, threshold: int, most: int) -> Decodes | None:
    """Find the decodes of a batch; None if it has none.

    A request is a decode if it has at most `threshold` new tokens, and the same number as the first
    request. A batch that is not simply causal has no decodes.

    Args:
        common: vLLM's `CommonAttentionMetadata`, with requests in vLLM's order.
        threshold: the most new tokens of a decode.
        most: the most decodes, which is the room of a plan. Attention in chunks cuts requests at
            the ends of chunks. So a batch can have more decodes than the engine has requests.
    """
    from vllm.v1.attention.backends.utils import split_decodes_and_prefills

    if common.causal is not True:
        return None
    requests, _, tokens, _ = split_decodes_and_prefills(
        common, decode_threshold=threshold, require_uniform=True
    )
    if not tokens:
        return None
    starts = common.query_start_loc_cpu
    queries = int(starts[1] - starts[0])
    # Requests that pad a batch for a CUDA graph may have no tokens.
    requests = min(requests, tokens // queries, most)
    return Decodes(queries, common.block_table_tensor[:requests], common.seq_lens[:requests])


def rest_of(common: Any, decodes: Decodes) -> Any | None:
    """The batch without its decodes, as `CommonAttentionMetadata`; None if nothing is left."""
    requests, tokens = decodes.requests, decodes.tokens
    if common.num_actual_tokens <= tokens:
        return None
    names = {field.name for field in dataclasses.fields(common)}
    changed: dict[str, Any] = {
        "num_reqs": common.num_reqs - requests,
        "num_actual_tokens": common.num_actual_tokens - tokens,
        "query_start_loc": common.query_start_loc[requests:] - tokens,
        "query_start_loc_cpu": common.query_start_loc_cpu[requests:] - tokens,
    }
    for name in names.intersection(_COMPUTED_LATER):
        changed[name] = None
    for sliced, count in ((_REQUESTS, requests), (_TOKENS, tokens)):
        for name in names.intersection(sliced):
            value = getattr(common, name)
            changed[name] = None if value is None else value[count:]
    return dataclasses.replace(common, **changed)
