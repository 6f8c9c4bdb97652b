# SPDX-License-Identifier: Apache-2.0
"""Decode steps of SGLang through `--decode-attention-backend pd_kernels` on a GPU: on SGLang's own pools, by its own
token tables, eager and in CUDA graphs. Drafts that are verified are a chain, or a tree."""

import functools
import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from graphs import Capture, Graph
from streams import Stream
from torch_device import gpu
from transfer_cases import FP8, Case
from vllm_door import attended, few_processors

from pd_kernels.attention.mla_call import LATENT, ROPE

PAGE, PAGES, ROWS, ROOM = 16, 40, 9, 256
KV_HEADS, DIM = 2, 128
DEVICE = "cuda:0"
BOUND = 1e-2
STEPS = ((70, 1, 33, 17), (5, 130, 64, 9))
DRAFTS = 4
CHAIN = torch.ones(len(STEPS[0]), DRAFTS, DRAFTS, dtype=torch.bool).tril()
"""Whether a draft sees another, for each request."""
LONG_CHAIN = torch.ones(len(STEPS[0]), 8, 8, dtype=torch.bool).tril()
TREE = CHAIN.clone()
TREE[:, 2, 1] = TREE[:, 3, 2] = TREE[1, 3, 1] = False
"""The second and the third draft follow the first; the last follows the second, and the first in one request."""


class Served:
    """A layer of SGLang and its cache on the GPU, and the tensors in which a step's batch comes.

    Args:
        heads: of queries.
        latent: whether the cache holds latents.
        seen: CHAIN, LONG_CHAIN or TREE, if drafts are verified.
        stored: the dtype of the cache.
        window: tokens of a branch that a query sees; 0 for all.
    """

    def __init__(
        self,
        heads: int,
        latent: bool,
        seen: torch.Tensor | None,
        stored: torch.dtype = torch.bfloat16,
        window: int = 0,
    ) -> None:
        self.window = window
        self.seen, self.drafts = seen, 0 if seen is None else seen.shape[1]
        self.stored = stored
        modes: Any = importlib.import_module("sglang.srt.model_executor.forward_batch_info")
        pools: Any = importlib.import_module("sglang.srt.mem_cache.memory_pool")
        backends: Any = importlib.import_module("pd_kernels.sglang.backend")
        layers: Any = importlib.import_module("sglang.srt.layers.radix_attention")
        self.latent, self.width = latent, LATENT + ROPE if latent else DIM
        told = {"size": (PAGES - 1) * PAGE, "page_size": PAGE, "dtype": stored}
        told |= {"layer_num": 1, "device": DEVICE, "enable_memory_saver": False, "start_layer": 0}
        if latent:
            latents = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE}
            self.pool = pools.MLATokenToKVPool(**told, **latents)
            self.caches = [self.pool.kv_buffer[0]]
        else:
            self.pool = pools.MHATokenToKVPool(**told, head_num=KV_HEADS, head_dim=DIM)
            self.caches = [self.pool.k_buffer[0], self.pool.v_buffer[0]]
        kv_heads = 1 if latent else KV_HEADS
        values = {"v_head_dim": LATENT} if latent else {}
        own = {**values, "sliding_window_size": window - 1}
        self.layer = layers.RadixAttention(heads, self.width, 0.1, kv_heads, 0, **own)
        self.req_to_token = torch.zeros(ROWS, ROOM, dtype=torch.int32, device=DEVICE)
        with mock.patch.object(backends, "get_spec", self._options):
            make = backends.MlaBackend if latent else backends.PagedBackend
            self.backend = make(self._runner())
        rows, modes = len(STEPS[0]), modes.ForwardMode
        tokens = rows * max(1, self.drafts)
        self.batch = SimpleNamespace(
            req_pool_indices=torch.zeros(rows, dtype=torch.int64, device=DEVICE),
            seq_lens=torch.ones(rows, dtype=torch.int64, device=DEVICE),
            seq_lens_cpu=torch.ones(rows, dtype=torch.int64),
            out_cache_loc=torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
            out_cache_loc_is_physical=True,
            forward_mode=modes.TARGET_VERIFY if self.drafts else modes.DECODE,
            batch_size=rows,
            spec_info=SimpleNamespace(draft_token=None),
        )
        new = tokens, kv_heads, self.width
        self.query = torch.zeros(tokens, heads * self.width, dtype=torch.bfloat16, device=DEVICE)
        self.new = [torch.zeros(new, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]

    def _options(self) -> Any:
        return SimpleNamespace(
            speculative_algorithm="EAGLE",
            speculative_attention_mode="decode",
            speculative_num_draft_tokens=self.drafts,
            speculative_eagle_topk=2 if self.seen is TREE else 1,
            speculative_adaptive=False,
            enable_multi_layer_eagle=False,
        )

    def _runner(self) -> Any:
        spec: Any = importlib.import_module("sglang.srt.speculative.spec_info")
        algorithms = spec.SpeculativeAlgorithm
        return SimpleNamespace(
            spec_algorithm=algorithms.EAGLE if self.drafts else algorithms.NONE,
            is_draft_worker=False,
            token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
            page_size=PAGE,
            device=DEVICE,
            dtype=torch.bfloat16,
            model=torch.nn.ModuleList([self.layer]),
            server_args=SimpleNamespace(dcp_size=1, tp_size=1),
            prefill_attention_backend_str="fa3",
            attention_chunk_size=None,
        )

    def fill(self, lengths: tuple[int, ...]) -> torch.Tensor:
        """Put a batch into the tensors and what it had before into the cache; returns the wanted result."""
        chance = torch.Generator().manual_seed(sum(lengths))
        free, rows = torch.randperm(PAGES - 1, generator=chance) + 1, []
        tables, kv = torch.zeros(ROWS, ROOM, dtype=torch.int32), []
        caches = [
            torch.full(each.shape, torch.nan).to(self.stored).view(each.dtype)
            for each in self.caches
        ]
        query = torch.randn(self.query.shape, generator=chance).bfloat16()
        queries = max(1, self.drafts)
        for row, counted in enumerate(lengths):
            length = counted + self.drafts
            pages, free = free[: -(-length // PAGE)], free[-(-length // PAGE) :]
            slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
            tables[2 * row + 1, :length] = slots
            shape = length, self.new[0].shape[1], self.width
            own = [
                torch.randn(shape, generator=chance).to(self.stored).bfloat16() for _ in self.caches
            ]
            for cache, each in zip(caches, own, strict=True):
                cache[slots[:-queries]] = each[:-queries].to(self.stored).view(cache.dtype)
            kv.append((own, slots[-queries:]))
            keys, values = own[0], own[-1][..., :LATENT] if self.latent else own[-1]
            heads = query.view(len(lengths), queries, -1, self.width)[row]
            for place in range(queries):
                told = torch.ones(length - queries + place + 1, dtype=torch.bool)
                if self.seen is not None:
                    told[counted:] = self.seen[row, place, : place + 1]
                if self.window:
                    told[told.nonzero()[: -self.window, 0]] = False
                k, v = (each[: len(told)][told] for each in (keys, values))
                one = attended(heads[place : place + 1], k, v, self.layer.scaling)
                rows.append(one.flatten())
        self.req_to_token.copy_(tables)
        for cache, each in zip(self.caches, caches, strict=True):
            cache.copy_(each)
        self.batch.req_pool_indices.copy_(2 * torch.arange(len(lengths)) + 1)
        self.batch.seq_lens.copy_(torch.tensor(lengths))
        self.batch.seq_lens_cpu.copy_(torch.tensor(lengths))
        self.batch.out_cache_loc.copy_(torch.cat([slots for _, slots in kv]))
        self.query.copy_(query)
        for n, room in enumerate(self.new[: len(self.caches)]):
            room.copy_(torch.cat([own[n][-queries:] for own, _ in kv]))
        if self.seen is TREE:
            buffer = self.backend.verify_mask.buffer
            buffer[: TREE.numel()].copy_(TREE.flatten())
            self.batch.spec_info.custom_mask = buffer
            self.batch.spec_info.draft_token = self.batch.out_cache_loc
        return torch.stack(rows)

    def forward(self) -> torch.Tensor:
        parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
        with parallel.override(dcp_enabled=False):
            told = self.query, *self.new, self.layer, self.batch
            found: torch.Tensor = self.backend.forward(*told)
        return found


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.cpu().float() - wanted).norm() / wanted.norm())


def _check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = _error(found, wanted)
    assert error <= BOUND, f"error {error:.2e}, at most {BOUND}"


def eager(
    heads: int = 8,
    latent: bool = False,
    seen: torch.Tensor | None = None,
    stored: torch.dtype = torch.bfloat16,
    window: int = 0,
) -> None:
    """A step that no graph replays."""
    with gpu(), few_processors():
        served = Served(heads, latent, seen, stored, window)
        wanted = served.fill(STEPS[0])
        served.backend.init_forward_metadata(served.batch)
        _check(served.forward(), wanted)
        if seen is TREE:  # the control: each draft sees all before it
            served.backend.verify_mask.buffer.fill_(True)
            served.backend.init_forward_metadata(served.batch)
            assert not _error(served.forward(), wanted) <= BOUND, "a tree needs no mask"


def replayed(heads: int = 8, latent: bool = False, seen: torch.Tensor | None = None) -> None:
    """A graph of a dummy batch, replayed for two others."""
    with gpu(), few_processors():
        served, graph, stream = Served(heads, latent, seen), Graph(), Stream()
        backend, rows = served.backend, len(STEPS[0])
        backend.init_cuda_graph_state(rows, rows)
        backend.init_forward_metadata_out_graph(served.batch, in_capture=True)
        served.forward()
        out = served.forward().clone()
        with Capture(graph, stream=stream):
            out.copy_(served.forward())
        for lengths in STEPS:
            wanted = served.fill(lengths)
            graph.replay()  # the control: with tables and a plan for the step before
            assert not _error(out, wanted) <= BOUND, "a replay needs no tables"
            backend.init_forward_metadata_out_graph(served.batch)
            graph.replay()
            _check(out, wanted)


SGLANG: dict[str, Case] = {
    f"sglang, {name}": functools.partial(case, *told)
    for name, case, told in (
        ("decodes", eager, ()),
        ("mla", eager, (16, True)),
        ("verify", eager, (8, False, CHAIN)),
        ("verify, mla", eager, (16, True, CHAIN)),
        ("verify, mla, 8 drafts", eager, (16, True, LONG_CHAIN)),
        ("mla, fp8", eager, (16, True, None, FP8)),
        ("verify, mla, 8 drafts, fp8", eager, (16, True, LONG_CHAIN, FP8)),
        ("fp8", eager, (8, False, None, FP8)),
        ("verify, tree", eager, (8, False, TREE)),
        ("verify, tree, window", eager, (8, False, TREE, torch.bfloat16, 20)),
        ("verify, tree, mla", eager, (16, True, TREE)),
        ("verify, tree, mla, fp8", eager, (8, True, TREE, FP8)),
        ("graphs, tree, mla", replayed, (16, True, TREE)),
        ("graphs", replayed, ()),
        ("graphs, verify", replayed, (8, False, CHAIN)),
        ("graphs, tree", replayed, (8, False, TREE)),
        ("graphs, mla", replayed, (16, True)),
    )
}
