# SPDX-License-Identifier: Apache-2.0
"""Decode steps of SGLang through `--decode-attention-backend pd_kernels` on a GPU: on SGLang's own pools, by its own
token tables, eager and in CUDA graphs."""

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from graphs import Capture, Graph
from streams import Stream
from torch_device import gpu
from transfer_cases import Case
from vllm_door import attended, few_processors

from pd_kernels.attention.mla_call import LATENT, ROPE

PAGE, PAGES, ROWS, ROOM = 16, 40, 9, 256
KV_HEADS, DIM = 2, 128
DEVICE = "cuda:0"
BOUND = 1e-2
STEPS = ((70, 1, 33, 17), (5, 130, 64, 9))


class Served:
    """A layer of SGLang and its cache on the GPU, and the tensors in which a step's batch comes.

    Args:
        heads: of queries.
        latent: whether the cache holds latents.
    """

    def __init__(self, heads: int, latent: bool) -> None:
        pools: Any = importlib.import_module("sglang.srt.mem_cache.memory_pool")
        backends: Any = importlib.import_module("pd_kernels.sglang.backend")
        layers: Any = importlib.import_module("sglang.srt.layers.radix_attention")
        self.latent, self.width = latent, LATENT + ROPE if latent else DIM
        told = {"size": (PAGES - 1) * PAGE, "page_size": PAGE, "dtype": torch.bfloat16}
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
        self.layer = layers.RadixAttention(heads, self.width, 0.1, kv_heads, 0, **values)
        self.req_to_token = torch.zeros(ROWS, ROOM, dtype=torch.int32, device=DEVICE)
        self.backend = (backends.MlaBackend if latent else backends.PagedBackend)(self._runner())
        rows = len(STEPS[0])
        self.batch = SimpleNamespace(
            req_pool_indices=torch.zeros(rows, dtype=torch.int64, device=DEVICE),
            seq_lens=torch.ones(rows, dtype=torch.int64, device=DEVICE),
            seq_lens_cpu=torch.ones(rows, dtype=torch.int64),
            out_cache_loc=torch.zeros(rows, dtype=torch.int64, device=DEVICE),
            out_cache_loc_is_physical=True,
            forward_mode=modes.DECODE,
            batch_size=rows,
            spec_info=None,
        )
        new = rows, kv_heads, self.width
        self.query = torch.zeros(rows, heads * self.width, dtype=torch.bfloat16, device=DEVICE)
        self.new = [torch.zeros(new, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]

    def _runner(self) -> Any:
        return SimpleNamespace(
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
        caches = [torch.full(each.shape, torch.nan, dtype=each.dtype) for each in self.caches]
        query = torch.randn(self.query.shape, generator=chance).bfloat16()
        for row, length in enumerate(lengths):
            pages, free = free[: -(-length // PAGE)], free[-(-length // PAGE) :]
            slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
            tables[2 * row + 1, :length] = slots
            shape = length, self.new[0].shape[1], self.width
            own = [torch.randn(shape, generator=chance).bfloat16() for _ in self.caches]
            for cache, each in zip(caches, own, strict=True):
                cache[slots[:-1]] = each[:-1].to(cache.dtype)
            kv.append((own, slots[-1]))
            keys, values = own[0], own[-1][..., :LATENT] if self.latent else own[-1]
            heads = query[row].view(1, -1, self.width)
            rows.append(attended(heads, keys, values, self.layer.scaling).flatten())
        self.req_to_token.copy_(tables)
        for cache, each in zip(self.caches, caches, strict=True):
            cache.copy_(each)
        self.batch.req_pool_indices.copy_(2 * torch.arange(len(lengths)) + 1)
        self.batch.seq_lens.copy_(torch.tensor(lengths))
        self.batch.seq_lens_cpu.copy_(torch.tensor(lengths))
        self.batch.out_cache_loc.copy_(torch.stack([slot for _, slot in kv]))
        self.query.copy_(query)
        for n, room in enumerate(self.new[: len(self.caches)]):
            room.copy_(torch.stack([own[n][-1] for own, _ in kv]))
        return torch.stack(rows)

    def forward(self) -> torch.Tensor:
        parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
        with parallel.override(dcp_enabled=False):
            told = self.query, *self.new, self.layer, self.batch
            found: torch.Tensor = self.backend.forward_decode(*told)
        return found


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.cpu().float() - wanted).norm() / wanted.norm())


def _check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = _error(found, wanted)
    assert error <= BOUND, f"error {error:.2e}, at most {BOUND}"


def eager(heads: int = 8, latent: bool = False) -> None:
    """A step that no graph replays."""
    with gpu(), few_processors():
        served = Served(heads, latent)
        wanted = served.fill(STEPS[0])
        served.backend.init_forward_metadata(served.batch)
        _check(served.forward(), wanted)


def replayed(heads: int = 8, latent: bool = False) -> None:
    """A graph of a dummy batch, replayed for two others."""
    with gpu(), few_processors():
        served, graph, stream = Served(heads, latent), Graph(), Stream()
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
        ("graphs", replayed, ()),
        ("graphs, mla", replayed, (16, True)),
    )
}
