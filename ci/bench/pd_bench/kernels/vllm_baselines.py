# SPDX-License-Identifier: Apache-2.0
"""Baselines of `paged_decode` that vLLM brings: FlashAttention 3, which the backend `CUSTOM`
replaces, and its own Triton kernel.

As in `decode_baselines`: each function returns a call for each set of buffers, planning is not
timed, and a baseline that cannot run raises.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pd_bench.kernels.decode_baselines import Calls
from pd_bench.kernels.decode_cases import PagedSet
from pd_kernels.attention.paged_call import FP8

FA3 = 3
SEGMENTS, LEAST_PROGRAMS = 16, 128
"""vLLM's `TRITON_ATTN` splits the KV of a sequence into 16 segments, if sequences and KV heads
together are fewer than 128."""


def flash_attention_calls(sets: Sequence[PagedSet]) -> Calls:
    """FlashAttention 3, planned ahead as vLLM plans it. With FP8 caches the queries are FP8, too."""
    flash = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    if not flash.is_fa_version_supported(FA3):
        raise RuntimeError(str(flash.fa_version_unsupported_reason(FA3)))

    def call(given: PagedSet) -> Callable[[], Any]:
        page, kv_heads, dim = given.keys.shape[1:]
        query = given.query[:, 0].to(given.keys.dtype)
        batch, heads = query.shape[:2]
        starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
        longest = int(given.lengths.max())
        planned = flash.get_scheduler_metadata(
            batch_size=batch,
            max_seqlen_q=1,
            max_seqlen_k=longest,
            num_heads_q=heads,
            num_heads_kv=kv_heads,
            headdim=dim,
            cache_seqlens=given.lengths,
            qkv_dtype=query.dtype,
            cu_seqlens_q=starts,
            page_size=page,
            causal=True,
        )
        out = torch.empty_like(query, dtype=torch.bfloat16)
        scales = _ones(batch, kv_heads, query) if query.dtype == FP8 else None
        return lambda: flash.flash_attn_varlen_func(
            q=query,
            k=given.keys,
            v=given.values,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=given.lengths,
            max_seqlen_k=longest,
            softmax_scale=dim**-0.5,
            causal=True,
            block_table=given.table,
            scheduler_metadata=planned,
            q_descale=scales,
            k_descale=scales,
            v_descale=scales,
            fa_version=FA3,
        )

    return [call(given) for given in sets]


def triton_attention_calls(sets: Sequence[PagedSet]) -> Calls:
    """vLLM's `TRITON_ATTN`. FP8 caches have one scale for the tensor."""
    module = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention")
    interface = importlib.import_module("vllm.v1.kv_cache_interface")

    def call(given: PagedSet) -> Callable[[], Any]:
        kv_heads, dim = given.keys.shape[2:]
        query = given.query[:, 0]
        batch, heads = query.shape[:2]
        coded = given.keys.dtype == FP8
        room = (LEAST_PROGRAMS // kv_heads, heads, SEGMENTS)
        kind = interface.KVQuantMode
        arguments = {
            "q": query,
            "k": given.keys,
            "v": given.values,
            "out": torch.empty_like(query),
            "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=query.device),
            "max_seqlen_q": 1,
            "seqused_k": given.lengths,
            "max_seqlen_k": int(given.lengths.max()),
            "softmax_scale": dim**-0.5,
            "causal": True,
            "window_size": (-1, -1),
            "block_table": given.table,
            "softcap": 0.0,
            "q_descale": None,
            "k_descale": _ones(batch, kv_heads, query) if coded else None,
            "v_descale": _ones(batch, kv_heads, query) if coded else None,
            "seq_threshold_3D": room[0],
            "num_par_softmax_segments": SEGMENTS,
            "softmax_segm_output": _floats((*room, 1 << (dim - 1).bit_length()), query),
            "softmax_segm_max": _floats(room, query),
            "softmax_segm_expsum": _floats(room, query),
            "kv_quant_mode": kind.FP8_PER_TENSOR if coded else kind.NONE,
        }
        return lambda: module.unified_attention(**arguments)

    return [call(given) for given in sets]


def _ones(batch: int, heads: int, like: torch.Tensor) -> torch.Tensor:
    """A scale of 1 for each sequence and KV head."""
    return torch.ones(1, dtype=torch.float32, device=like.device).expand(batch, heads)


def _floats(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)
