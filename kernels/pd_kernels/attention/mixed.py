# SPDX-License-Identifier: Apache-2.0
"""Attention of a step with prefill chunks and decodes, in one launch."""

import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from pd_kernels.attention.decode_call import MAX_HEIGHT
from pd_kernels.attention.decode_plan import DecodePlan
from pd_kernels.attention.mixed_kernel import launch_mixed, make_tickets
from pd_kernels.attention.mods import Mod, check_mods
from pd_kernels.attention.operators import DecodeOutputs, check_call
from pd_kernels.attention.paged_call import CacheScales, PagedCall, Scale
from pd_kernels.attention.reference import reference_paged_decode


class PrefillCall(PagedCall):
    """Each sequence is a part of a prefill chunk, with the queries that fit into a row."""

    max_queries = MAX_HEIGHT


class Parts(NamedTuple):
    """Prefill chunks, cut into parts whose queries fit into a row.

    Attributes:
        starts: where each part's queries begin, and where the last ones end.
        owners: the sequence of each part.
        behind: queries of the part's sequence that follow the part.
    """

    starts: list[int]
    owners: list[int]
    behind: list[int]

    @classmethod
    def of(cls, starts: list[int], decodes: int, room: int) -> "Parts":
        """Cut the chunks behind the decodes. `starts` as in `MixedPlan.of`; `room`: queries of a row."""
        parts = cls([], [], [])
        for sequence in range(decodes, len(starts) - 1):
            end = starts[sequence + 1]
            for first in range(starts[sequence], end, room):
                parts.starts.append(first)
                parts.owners.append(sequence)
                parts.behind.append(max(0, end - first - room))
        parts.starts.append(starts[-1])
        return parts


@dataclass(frozen=True, eq=False)
class MixedPlan:
    """The work of each program in a step. A plan is made and filled once a step, and used by every
    layer.

    A prefill chunk is cut into parts whose queries fit into a row. A part counts as a sequence of
    its own, which ends with the part's last query.

    Attributes:
        starts: where each sequence's queries begin, and where the last ones end, int64
            `[sequences + 1]`.
        tokens: queries of all sequences.
        decodes: the number of decodes; they are the first sequences.
        most: the largest number of queries of a sequence.
        owner: the sequence of each part, int64 `[parts]`.
        behind: queries of the part's sequence that follow the part, int64 `[parts]`.
        prefill, decode: calls with the right shapes; `fill` sets their tables and lengths.
        plans: the plans of both calls.
        tickets: the tickets of `mixed_kernel.claim`.
        lengths: tokens of each sequence; set by `fill`.
    """

    starts: torch.Tensor
    tokens: int
    decodes: int
    most: int
    owner: torch.Tensor
    behind: torch.Tensor
    prefill: PagedCall
    decode: PagedCall
    plans: tuple[DecodePlan, DecodePlan]
    tickets: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        starts: list[int],
        decodes: int,
        window: int = 0,
        v_cache: torch.Tensor | None = None,
    ) -> "MixedPlan":
        """Plan a step. Nothing is read from the device, so the host does not wait.

        Args:
            q: `[tokens, heads, dim]`, the queries of all sequences one after another.
            k_cache: as `paged_decode` takes it. Only shape, dtype and device matter, as for `q`.
            block_table, lengths: of all sequences, as `paged_decode` takes them.
            starts: where each sequence's queries begin, and where the last ones end.
            decodes: the number of decodes, which are the first sequences, with up to 8 queries
                each. At least one sequence, and not all.
            window: as in `paged_decode`.
            v_cache: as in `plan_paged_decode`.

        Raises:
            ValueError: there are no decodes, or no tokens of prefills.
        """
        sequences, device = len(starts) - 1, q.device
        if not 0 < decodes < sequences:
            raise ValueError(
                f"{decodes} decodes of {sequences} sequences: must be at least one and not all; "
                "paged_decode takes decodes alone"
            )
        if starts[decodes] == starts[-1]:
            raise ValueError(
                f"no tokens behind the {decodes} decodes: must be at least one; paged_decode takes decodes alone"
            )
        room = max(1, MAX_HEIGHT // (q.shape[1] // k_cache.shape[2]))
        parts = Parts.of(starts, decodes, room)
        places = [torch.tensor(each) for each in (starts, parts.owners, parts.behind, parts.starts)]
        begins, owners, rests, cuts = (each.to(device, non_blocking=True) for each in places)
        counts = [end - first for first, end in itertools.pairwise(starts)]
        decode = PagedCall(
            query=q.unsqueeze(1),
            keys=k_cache,
            values=k_cache if v_cache is None else v_cache,
            table=block_table[:decodes],
            lengths=lengths[:decodes],
            scale=1.0,
            key_scale=1.0,
            value_scale=1.0,
            causal=True,
            window=window,
            score_mod=None,
            mask_mod=None,
            starts=begins[: decodes + 1],
            most_queries=max(counts[:decodes]),
        )
        prefill = PrefillCall(
            **{
                **decode.__dict__,
                "table": block_table[owners],
                "lengths": (lengths[owners] - rests).to(lengths.dtype),
                "starts": cuts,
                "most_queries": room,
            }
        )
        for call in (prefill, decode):
            call.check()
        plans = [
            call.plan_for(len(call.lengths), 1).fill(call.lengths) for call in (prefill, decode)
        ]
        return cls(
            starts=begins,
            tokens=starts[-1],
            decodes=decodes,
            most=max(counts),
            owner=owners,
            behind=rests,
            prefill=prefill,
            decode=decode,
            plans=(plans[0], plans[1]),
            tickets=make_tickets(device),
            table=block_table,
            lengths=lengths,
        )

    def calls(self, **layer: Any) -> tuple[PagedCall, PagedCall]:
        """The call of the prefills and the call of the decodes for a layer, with its queries,
        caches and scales."""
        return replace(self.prefill, **layer), replace(self.decode, **layer)

    def whole(self, **layer: Any) -> PagedCall:
        """One call for all sequences, for the reference."""
        own = {"table": self.table, "lengths": self.lengths, "starts": self.starts}
        return replace(self.decode, **layer, **own, most_queries=self.most)


def mixed_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: MixedPlan,
    *,
    scale: float | None = None,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with the queries of prefill chunks and of decodes to their paged KV, in one launch.

    Args:
        q: bfloat16 or float16 `[tokens, heads, dim]`, as the plan was made for.
        k_cache, v_cache, scale, k_scale, v_scale, sinks: as in `paged_decode`. Queries are the last tokens
            of their sequence, whose KV is in the cache, and see no later tokens.
        score_mod, mask_mod: as in `paged_decode`; `b` is the sequence's number in the step. All tiles are read.
        plan: the step's plan, which all layers share.
        out: dense, shaped like q with V's dim; written and returned.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes or strides are not supported, or differ from the plan's.

    Source:
        POD-Attention (Kamath et al. 2024), with its SM-aware scheduling; see `mixed_kernel.py`.

    Example:
        A decode of a sequence of 20 tokens, and the last 6 of 9 tokens as a prefill chunk.

        >>> import torch
        >>> from pd_kernels.attention import MixedPlan, mixed_attention
        >>> q, (keys, values) = torch.randn(7, 4, 64), torch.randn(2, 3, 16, 2, 64)
        >>> table = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32)
        >>> plan = MixedPlan.of(q, keys, table, torch.tensor([20, 9]), [0, 1, 7], decodes=1)
        >>> mixed_attention(q, keys, values, plan).shape
        torch.Size([7, 4, 64])
    """
    if len(q) < plan.tokens:
        raise ValueError(f"q of {len(q)} tokens: the plan was made for {plan.tokens}")
    check_mods(score_mod, mask_mod)
    scales = CacheScales.of(k_scale, v_scale)
    out = DecodeOutputs.of(q, v_cache.shape[-1], out, return_lse=False, return_partials=False).out
    layer = {
        "query": q.unsqueeze(1),
        "keys": k_cache,
        "values": v_cache,
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "key_scale": scales.key,
        "value_scale": scales.value,
        "head_scales": scales.heads,
        "sinks": sinks,
        "score_mod": score_mod,
        "mask_mod": mask_mod,
    }
    prefill, decode = plan.calls(**layer)
    for call, own in zip((prefill, decode), plan.plans, strict=True):
        check_call(call, list(own.rows), own.tensors)
    if not q.is_cuda:
        reference_paged_decode(plan.whole(**layer), out.unsqueeze(1), None)
        return out
    with torch.cuda.device(q.device):
        launch_mixed(prefill, decode, plan.plans, plan.tickets, out, None, owners=plan.owner)
    return out
