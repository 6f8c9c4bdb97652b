# SPDX-License-Identifier: Apache-2.0
"""Baselines of the decode kernels. A baseline that cannot run raises; the caller prints why.

Each function takes sets of buffers and returns a call for each. Planning is not timed, only
attention.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pd_bench.kernels import decode_cases
from pd_bench.kernels.decode_cases import LatentSet, PagedSet

Calls = list[Callable[[], Any]]
FLEX_PAGE = 128
"""The page size must be the block size of FlexAttention's masks, which is 128 by default."""


def flex_attention_calls(
    sets: Sequence[PagedSet], compiled: bool = True, documents: torch.Tensor | None = None
) -> Calls:
    """torch's FlexAttention with its own `PagedAttention`, whose pages must have 128 tokens. With
    `documents` (see `mods.document`) its block mask skips the same tiles as `paged_decode`.

    Resets torch's compiler: all shapes share one limit of recompilations, beyond which torch would
    run FlexAttention uncompiled and slowly. `fullgraph` turns that into an error.
    """
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    paging = importlib.import_module("torch.nn.attention.experimental._paged_attention")
    attend = flex.flex_attention
    if compiled:
        importlib.import_module("torch._dynamo").reset()  # takes a second to import
        attend = torch.compile(attend, dynamic=False, fullgraph=True)

    def call(given: PagedSet) -> Callable[[], Any]:
        device, batch = decode_cases.DEVICE, len(given.lengths)
        pages, page, kv_heads, dim = given.keys.shape
        paged = paging.PagedAttention(pages, page, batch, device)
        lengths = given.lengths.long()
        for row, length in enumerate(given.lengths.tolist()):
            used = -(-length // page)
            ids = given.table[row, :used].long()
            paged.page_table[row, :used] = ids
            paged.physical_to_logical[row, ids] = torch.arange(used, device=device)

        def seen(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            there = kv_idx < lengths[b]
            if documents is None:
                return there
            # FlexAttention asks about whole blocks of tokens.
            token = kv_idx.clamp(max=documents.shape[1] - 1)
            return there & (documents[b, token] == documents[b, lengths[b] - 1])

        longest = int(lengths.max())
        logical = flex.create_block_mask(seen, batch, None, 1, longest, device=device)
        mask = paged.convert_logical_block_mask(logical, kv_len=lengths)
        # FlexAttention's cache has all pages on one axis.
        keys, values = (
            x.transpose(1, 2).transpose(0, 1).reshape(1, kv_heads, pages * page, dim)
            for x in (given.keys, given.values)
        )
        query = given.query.transpose(1, 2)
        return lambda: attend(query, keys, values, block_mask=mask, enable_gqa=True)

    return [call(given) for given in sets]


def flashinfer_calls(sets: Sequence[PagedSet]) -> Calls:
    """FlashInfer's batch decode with tensor cores."""
    flashinfer = importlib.import_module("flashinfer")

    def call(given: PagedSet) -> Callable[[], Any]:
        page, kv_heads, dim = given.keys.shape[1:]
        counts = (given.lengths + page - 1) // page
        ends = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
        ends[1:] = counts.cumsum(0)
        pairs = zip(given.table, counts.tolist(), strict=True)
        ids = torch.cat([row[:count] for row, count in pairs])
        last = given.lengths - (counts - 1) * page
        room = torch.empty(256 << 20, dtype=torch.uint8, device=counts.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=True)
        wrapper.plan(
            ends,
            ids,
            last,
            given.query.shape[2],
            kv_heads,
            dim,
            page,
            q_data_type=given.query.dtype,
            kv_data_type=given.keys.dtype,
        )
        cache = given.keys.contiguous(), given.values.contiguous()
        query = given.query[:, 0].contiguous()
        return lambda: wrapper.run(query, cache)

    return [call(given) for given in sets]


def xqa_calls(sets: Sequence[PagedSet]) -> Calls:
    """TensorRT-LLM's XQA, from FlashInfer: its fastest decode on Hopper, above all for FP8."""
    decode = importlib.import_module("flashinfer.decode")

    def call(given: PagedSet) -> Callable[[], Any]:
        query = given.query[:, 0].contiguous()
        room = torch.zeros(256 << 20, dtype=torch.uint8, device=query.device)
        arguments = {
            "query": query,
            "kv_cache": (given.keys.contiguous(), given.values.contiguous()),
            "workspace_buffer": room,
            "block_tables": given.table,
            "seq_lens": given.lengths,
            "max_seq_len": int(given.lengths.max()),
            "bmm1_scale": query.shape[-1] ** -0.5,
            "bmm2_scale": 1.0,
            "out": torch.empty_like(query),
            "kv_layout": "NHD",
        }
        return lambda: decode.xqa_batch_decode_with_kv_cache(**arguments)

    return [call(given) for given in sets]


def flash_mla_calls(sets: Sequence[LatentSet], scale: float) -> Calls:
    """FlashMLA's dense decoding for Hopper, from the wheel sgl-flash-mla; pages of 64 tokens."""
    flash_mla = importlib.import_module("flash_mla")
    # The wheel has two kernels, and this argument selects one. Other versions have only the dense
    # kernel.
    parameters = inspect.signature(flash_mla.flash_mla_with_kvcache).parameters
    chosen = {"use_legacy": True} if "use_legacy" in parameters else {}

    def call(given: LatentSet) -> Callable[[], Any]:
        meta, _ = flash_mla.get_mla_metadata()
        cache = given.cache[:, :, None]
        return lambda: flash_mla.flash_mla_with_kvcache(
            given.query,
            cache,
            given.table,
            given.lengths,
            512,
            meta,
            softmax_scale=scale,
            causal=True,
            **chosen,
        )

    return [call(given) for given in sets]
