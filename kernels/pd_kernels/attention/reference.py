# SPDX-License-Identifier: Apache-2.0
"""Attention in float32 with plain torch, sequence by sequence. It defines the kernels' results."""

import torch

from pd_kernels.attention.mla_call import GROUPS, LATENT, MlaCall
from pd_kernels.attention.mods import Mod
from pd_kernels.attention.paged_call import PagedCall


def read_pages(
    cache: torch.Tensor, pages: torch.Tensor, tokens: int, first: int = 0
) -> torch.Tensor:
    """Tokens `first` to `tokens` of a sequence, `[token, ...]`, from a cache `[page, token,
    ...]`."""
    size = cache.shape[1]
    begin = first // size
    taken = cache[pages[begin : -(-tokens // size)].long()]
    return taken.flatten(0, 1)[first - begin * size : max(0, tokens) - begin * size]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sequence: int,
    scale: float,
    causal: bool,
    window: int,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    first: int = 0,
    tree: torch.Tensor | None = None,
    missing: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with the last tokens of one sequence.

    Args:
        query: `[queries, heads, dim]`.
        keys, values: float32 `[token, kv heads, dim]`.
        sequence: its number in the batch, for mods.
        first: place of the first of these tokens in the sequence.
        tree: `[queries]`, the words of `mla_decode`; it takes the place of causality.
        missing: which of the tokens nobody sees, `[token]`.

    Returns:
        The result, float32 `[queries, heads, value dim]`, and lse, float32 `[queries, heads]`.
    """
    queries, heads, _ = query.shape
    _, kv_heads, _ = keys.shape
    tokens = first + len(keys)
    grouped = query.float().unflatten(1, (kv_heads, heads // kv_heads))
    score = torch.einsum("qkgd,tkd->qkgt", grouped, keys).flatten(1, 2) * scale
    place = torch.arange(first, tokens, device=query.device)
    position = torch.arange(tokens - queries, tokens, device=query.device)
    clamped = position.clamp(min=0)[:, None, None]
    head = torch.arange(heads, device=query.device)[None, :, None]
    own = torch.tensor(sequence, device=query.device)
    where = (own, head, clamped, place[None, None, :])
    seen = torch.ones_like(score, dtype=torch.bool)
    if tree is not None:
        draft = place - (tokens - queries)
        bits = (tree[:, None] >> draft.clamp(0, 31)) & 1
        seen = seen & ((draft < 0) | bits.bool())[:, None, :]
    elif causal:
        seen = seen & (place <= position[:, None])[:, None, :]
    if window:
        seen = seen & (place > position[:, None] - window)[:, None, :]
    if missing is not None:
        seen = seen & ~missing
    if score_mod and tokens:
        score = score_mod.reference(score, *where, score_mod.args)
    if mask_mod and tokens:
        seen = seen & mask_mod.reference(*where, mask_mod.args)
    score = score.masked_fill(~seen, -torch.inf)
    lse = score.logsumexp(2)
    share = (score - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    share = share.unflatten(1, (kv_heads, -1))
    return torch.einsum("qkgt,tkd->qkgd", share, values).flatten(1, 2), lse


def reference_paged_decode(batch: PagedCall, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Compute `paged_decode`. Write `out`, and `lse` if it is given."""
    for number, length in enumerate(batch.lengths.tolist()):
        pages = batch.table[number]
        own = batch.own_queries(number)
        query = batch.query[own].flatten(0, -3)
        # Memory before the window may hold NaN, and 0 * NaN is NaN.
        first = max(0, length - len(query) - batch.window + 1) if batch.window else 0
        keys, values = (
            read_pages(cache, pages, length, first).float() * factor
            for cache, factor in (
                (batch.keys, batch.key_scale),
                (batch.values, batch.value_scale),
            )
        )
        if batch.head_scales is not None:
            keys, values = (
                each * own[:, None]
                for each, own in zip((keys, values), batch.head_scales, strict=True)
            )
        result, sums = attend(
            query,
            keys,
            values,
            number,
            batch.scale,
            batch.causal,
            batch.window,
            batch.score_mod,
            batch.mask_mod,
            first,
        )
        if batch.sinks is not None:
            tokens, sums = sums, torch.logaddexp(sums, batch.sinks.float())
            share = torch.where(tokens == -torch.inf, 0.0, (tokens - sums).exp())
            result = result * share[..., None]
        out[own] = result.view_as(out[own])
        if lse is not None:
            lse[own] = sums.view_as(lse[own])


def decoded_latents(cache: torch.Tensor) -> torch.Tensor:
    """Decode FlashMLA's FP8 layout, uint8 `[..., 656]`, into float32 `[..., 576]`."""
    codes = cache[..., :LATENT].contiguous().view(torch.float8_e4m3fn).float()
    rest = cache[..., LATENT:].contiguous()
    scales = rest[..., : 4 * GROUPS].contiguous().view(torch.float32)
    rope = rest[..., 4 * GROUPS :].contiguous().view(torch.bfloat16).float()
    return torch.cat(
        [(codes.unflatten(-1, (GROUPS, -1)) * scales[..., None]).flatten(-2), rope], -1
    )


def reference_mla_decode(batch: MlaCall, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Compute `mla_decode`. Write `out`, and `lse` if it is given."""
    for number, length in enumerate(batch.lengths.tolist()):
        pages = batch.table[number]
        missing = None
        if batch.cache.shape[1] == 1:  # of single tokens, of which some may be missing
            missing = pages[: max(0, length)] < 0
            pages = pages.clamp(min=0)
        tokens = read_pages(batch.cache, pages, length)
        latents = decoded_latents(tokens) if batch.coded else tokens.float() * batch.kv_scale
        if missing is not None:
            latents = latents.masked_fill(missing[:, None], 0.0)  # 0 * NaN is NaN
        latents = latents[:, None]
        result, sums = attend(
            batch.query[number],
            latents,
            latents[..., :LATENT],
            number,
            batch.scale,
            batch.causal,
            window=0,
            tree=None if batch.tree is None else batch.tree[number],
            missing=missing,
        )
        out[number] = result
        if lse is not None:
            lse[number] = sums
