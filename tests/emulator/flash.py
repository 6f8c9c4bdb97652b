# SPDX-License-Identifier: Apache-2.0
"""A stand-in for FlashAttention, which computes what is left beside decodes: in torch, with its signature, and queued
on the stream as a kernel is."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from device_memory import on_host
from streams import STREAMS


def scheduled(*, cu_seqlens_q: torch.Tensor, cache_seqlens: torch.Tensor, **_: Any) -> torch.Tensor:
    """Scheduler metadata. It names the batch that it is made for."""
    return torch.cat((cu_seqlens_q, cache_seqlens))


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **told: Any) -> torch.Tensor:
    """As `flash_attn_varlen_func`. Keys and values lie in pages, or one request's behind the other's."""
    assert told["causal"]
    assert not told.get("return_softmax_lse")
    out = told.pop("out", None)
    if out is None:
        out = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device)
    given = {"q": q, "k": k, "v": v, "out": out} | told
    tensors = {
        name: on_host(each) for name, each in given.items() if isinstance(each, torch.Tensor)
    }
    STREAMS.queue(lambda: _attend(**(given | tensors)))
    result: torch.Tensor = out
    return result


def _by_head(scales: torch.Tensor, heads: int) -> torch.Tensor:
    """Scales of KV heads, for heads of which each KV head has as many as the next."""
    return scales.repeat_interleave(heads // len(scales))[:, None]


def _attend(
    out: torch.Tensor, softmax_scale: float, s_aux: torch.Tensor | None = None, **given: Any
) -> None:
    left = (given.get("window_size") or [-1])[0]
    for rows, query, keys, values in _requests(**given):
        behind = torch.arange(len(keys) - len(query), len(keys))[:, None] - torch.arange(len(keys))
        seen = (behind >= 0) & ((behind <= left) | (left < 0))
        if s_aux is not None:
            found = _with_sinks(query, keys, values, softmax_scale, seen, s_aux)
        else:
            told = (each.float().transpose(0, 1) for each in (query, keys, values))
            attend = torch.nn.functional.scaled_dot_product_attention
            found = attend(*told, seen, scale=softmax_scale, enable_gqa=True).transpose(0, 1)
        out[rows] = found.to(out.dtype)


def _with_sinks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    seen: torch.Tensor,
    sinks: torch.Tensor,
) -> torch.Tensor:
    heads = []
    for head, sink in enumerate(sinks.float()):
        of = head * keys.shape[1] // query.shape[1]
        scores = query[:, head].float() @ keys[:, of].float().T * scale
        scores = scores.masked_fill(~seen, -torch.inf)
        most = torch.maximum(scores.amax(1), sink)[:, None]
        weights = (scores - most).exp()
        total = weights.sum(1, keepdim=True) + (sink - most).exp()
        heads.append(weights / total @ values[:, of].float())
    return torch.stack(heads, 1)


def _requests(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **given: Any,
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each request's place in the batch, and its queries, keys and values without their scales."""
    starts, table, used = cu_seqlens_q.tolist(), given.get("block_table"), given.get("seqused_k")
    own = given.get("cu_seqlens_k")
    assert starts[0] == 0, f"queries begin at {starts[0]}"
    assert starts[-1] == len(q), f"queries end at {starts[-1]} of {len(q)}"
    schedule = given.get("scheduler_metadata")
    if schedule is not None and used is not None:
        assert schedule.tolist() == [*starts, *used.tolist()], "a schedule for another batch"
    for row, (first, last) in enumerate(itertools.pairwise(starts)):
        place = slice(*own[row : row + 2].tolist()) if own is not None else slice(0, int(used[row]))
        sides = [
            each if table is None else each[table[row].long()].flatten(0, 1) for each in (k, v)
        ]
        keys, values = (each[place] for each in sides)
        assert last - first <= max_seqlen_q, f"{last - first} queries: told {max_seqlen_q} at most"
        assert len(keys) <= max_seqlen_k, f"{len(keys)} tokens: told {max_seqlen_k} at most"
        scaled = [
            each.float() if scale is None else each.float() * _by_head(scale[row], each.shape[1])
            for each, scale in (
                (q[first:last], given.get("q_descale")),
                (keys, given.get("k_descale")),
                (values, given.get("v_descale")),
            )
        ]
        yield slice(first, last), scaled[0], scaled[1], scaled[2]
