# SPDX-License-Identifier: Apache-2.0
"""vLLM's own attention layers, with their builders, and random batches to run through them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata

MODEL = Path(__file__).parents[2] / "pd_connector" / "tools" / "demo" / "model"
PAGE, PAGES = 32, 40
NAME = "model.layers.0.attn"

# Another order of summation, in the layer's dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

DECODES = ((1, 70), (1, 1), (1, 33), (1, 32), (1, 200))
MIXED = (*DECODES, (20, 20), (7, 90), (64, 130))
PREFILLS = ((20, 20), (7, 90))
VERIFIED = ((4, 70), (4, 4), (4, 33), (1, 50), (30, 60))
"""Each request's new tokens, and all of its tokens."""


@dataclass(frozen=True)
class Shape:
    """The shape of a layer."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.float32
    cache_dtype: str = "auto"
    window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    shared: bool = False  # its KV is another layer's: it gets no new keys and values
    device: str = "cpu"
    page: int = PAGE

    def layer(self, backend: str | None, **engine: Any) -> "Layer":
        """An attention layer as vLLM makes it for `--attention-backend`. `engine`: other arguments of the engine."""
        config = EngineArgs(
            model=str(MODEL),
            dtype=str(self.dtype).removeprefix("torch."),
            kv_cache_dtype=self.cache_dtype,
            block_size=self.page,
            max_model_len=512,
            attention_backend=backend,
            **{"enforce_eager": True, **engine},
        ).create_engine_config()
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with set_current_vllm_config(config):
                return Layer(self.attention(config), config, torch.device(self.device))
        finally:
            torch.set_default_dtype(before)

    def attention(self, config: Any) -> Any:
        """The layer itself, of the name NAME."""
        extra = (
            {"sinks": torch.linspace(-1.0, 4.0, self.heads).to(self.dtype)} if self.sinks else {}
        )
        slopes = [2.0**-n for n in range(1, self.heads + 1)] if self.alibi else None
        return Attention(
            *(self.heads, self.dim, self.dim**-0.5, self.kv_heads, slopes),
            cache_config=config.cache_config,
            logits_soft_cap=self.soft_cap,
            per_layer_sliding_window=self.window,
            prefix=NAME,
            **extra,
        )


class Layer:
    """A layer with its builder, to run batches through."""

    def __init__(self, module: Any, config: Any, device: torch.device) -> None:
        self.module, spec = module, module.get_kv_cache_spec(config)
        self.config = config
        made = module.attn_backend.get_builder_cls()
        self.builder = made(spec, [NAME], config, device)

    def forward(self, batch: "Batch") -> torch.Tensor:
        """Attention of a batch, `[token, heads, dim]`."""
        shape, module = batch.shape, self.module
        stored = torch.uint8 if shape.cache_dtype != "auto" else shape.dtype
        cache = torch.zeros(PAGES, shape.kv_heads, shape.page, 2 * shape.dim, dtype=stored)
        metadata = self.builder.build(0, batch.common())
        for row, tokens in enumerate(batch.tokens):
            kv = batch.kv[:, row, :tokens].unbind()
            module.impl.do_kv_cache_update(module, *kv, cache, batch.slots(row)[:tokens])
        output = torch.full_like(batch.query, torch.nan)
        new = (None, None) if shape.shared else batch.new_kv()
        module.impl.forward(*(module, batch.query, *new, cache, metadata), output=output)
        return output


class Batch:
    """Random requests of these new and total tokens, in pages that lie in no order."""

    def __init__(self, shape: Shape, requests: tuple[tuple[int, int], ...]) -> None:
        chance = torch.Generator().manual_seed(len(requests))
        self.shape = shape
        self.queries, self.tokens = zip(*requests, strict=True)
        most = -(-max(self.tokens) // shape.page)
        pages = torch.randperm(PAGES - 1, generator=chance) + 1
        self.table = torch.zeros(len(requests), most, dtype=torch.int32)
        for row, tokens in enumerate(self.tokens):
            used = -(-tokens // shape.page)
            self.table[row, :used], pages = pages[:used], pages[used:]

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, shape.dim, generator=chance).to(shape.dtype)

        self.kv = random(2, len(requests), max(self.tokens), shape.kv_heads)
        self.query = random(sum(self.queries), shape.heads)

    def slots(self, row: int) -> torch.Tensor:
        page = self.shape.page
        pages = self.table[row].long().repeat_interleave(page)
        return pages * page + torch.arange(len(pages)) % page

    def new(self, of_row: Callable[[int], torch.Tensor], axis: int) -> torch.Tensor:
        """The new tokens' part of what each row has for all of its tokens."""
        rows = []
        for row, (queries, tokens) in enumerate(zip(self.queries, self.tokens, strict=True)):
            rows.append(of_row(row).narrow(axis, tokens - queries, queries))
        return torch.cat(rows, axis)

    def new_kv(self) -> tuple[torch.Tensor, ...]:
        return self.new(lambda row: self.kv[:, row], 1).unbind()

    def common(self) -> CommonAttentionMetadata:
        starts, device = torch.tensor([0, *self.queries]).cumsum(0).int(), self.shape.device
        return CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(self.tokens, dtype=torch.int32).to(device),
            seq_lens_cpu_upper_bound=torch.tensor(self.tokens, dtype=torch.int32),
            num_reqs=len(self.queries),
            num_actual_tokens=len(self.query),
            max_query_len=max(self.queries),
            max_seq_len=max(self.tokens),
            block_table_tensor=self.table.to(device),
            slot_mapping=self.new(self.slots, 0).to(device),
        )
