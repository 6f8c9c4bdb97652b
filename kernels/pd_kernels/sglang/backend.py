# SPDX-License-Identifier: Apache-2.0
"""Decodes and verifies drafts with `paged_decode` and `mla_decode`, on SGLang's cache.

SGLang pairs a backend for prompts with a backend for decodes (`HybridAttnBackend`). It calls these
backends only for decodes and, with `--speculative-attention-mode decode`, for verifying drafts. On a
CPU they compute with the references in torch.
"""

import functools
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.runtime_context import get_spec

from pd_kernels.attention import DecodePlan, Mod, paged_decode, plan_paged_decode, soft_cap
from pd_kernels.attention.mla import mla_decode, plan_mla_decode
from pd_kernels.attention.mla_call import LATENT, ROPE
from pd_kernels.attention.paged_call import DIMS, FP8
from pd_kernels.sglang.draft_tree import DraftTree
from pd_kernels.sglang.refusals import (
    SPARSE,
    draft_refusals,
    engine_refusals,
    gpu_refusals,
    layer_refusals,
    refuse,
    sink_refusals,
    verify_refusals,
)


class PageTables(NamedTuple):
    """The places of the KV of a step's requests.

    Attributes:
        table: int32 `[requests, pages]`.
        lengths: `[requests]`, tokens of KV, the new one included.
    """

    table: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(
        cls, forward_batch: Any, req_to_token: torch.Tensor, page_size: int, drafts: int = 0
    ) -> "PageTables":
        """The tables of a batch of decodes.

        Args:
            forward_batch: SGLang's `ForwardBatch`.
            req_to_token: `[request rows, tokens]`, the slot of each token.
            drafts: tokens of each request that SGLang does not count in its lengths.
        """
        rows = forward_batch.batch_size
        lengths = forward_batch.seq_lens[:rows]
        host_lengths = forward_batch.seq_lens_cpu
        longest = (
            req_to_token.shape[1] if host_lengths is None else int(host_lengths.max()) + drafts
        )
        slots = req_to_token[forward_batch.req_pool_indices[:rows], :longest:page_size]
        return cls((slots // page_size).to(torch.int32), lengths + drafts if drafts else lengths)


class FixedTables:
    """Tables that stay at one address, for CUDA graphs of decodes.

    Args:
        requests: requests of the largest captured batch.
        tokens: tokens of the longest sequence.
    """

    def __init__(self, requests: int, tokens: int, page_size: int, device: Any) -> None:
        pages = -(-tokens // page_size)
        self._page_size = page_size
        self._table = torch.zeros(requests, pages, dtype=torch.int32, device=device)
        self._lengths = torch.ones(requests, dtype=torch.int32, device=device)

    def fill(self, forward_batch: Any, req_to_token: torch.Tensor, drafts: int = 0) -> PageTables:
        """Write the tables of a batch, and return views of the batch's size. `drafts` is as in `PageTables.of`."""
        count = forward_batch.batch_size
        slots = req_to_token[forward_batch.req_pool_indices[:count], :: self._page_size]
        self._table[:count, : slots.shape[1]] = slots // self._page_size
        lengths = forward_batch.seq_lens[:count]
        self._lengths[:count] = lengths + drafts if drafts else lengths
        return PageTables(self._table[:count], self._lengths[:count])


class Plans(NamedTuple):
    """The plans of steps with one number of queries: that of each layer, and each plan once."""

    of_layer: dict[Any, DecodePlan]
    every: list[DecodePlan]


_KERNEL_DTYPES = (torch.float16, torch.bfloat16)

soft_cap_of = functools.cache(soft_cap)
"""The score mod of a cap. It is made once, because every mod stays registered."""


class DecodeBackend(AttentionBackend):
    """The common part of both backends: page tables and plans of a step.

    Attributes:
        model: SGLang's model, loaded.
        layers: the model's layers on this rank.
        chunk_tokens: tokens of an attention chunk, whose tokens see only each other (Llama 4), if
            the model has such chunks.
    """

    def __init__(self, runner: Any) -> None:
        """`runner`: SGLang's `ModelRunner`, with its model and cache already made.

        Raises:
            NotImplementedError: the engine or a layer needs something that the kernels do not
                support.
        """
        super().__init__()
        self.pool = runner.token_to_kv_pool
        self.page_size: int = runner.page_size
        self.device = runner.device
        self.dtype: torch.dtype = runner.dtype
        self.model: torch.nn.Module = runner.model
        self.layers = [each for each in self.model.modules() if isinstance(each, RadixAttention)]
        self._req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        # With data-parallel attention SGLang pads batches to a multiple of ranks.
        self._most_requests = len(self._req_to_token) + runner.server_args.tp_size
        self.chunk_tokens: int | None = runner.attention_chunk_size
        spec = None if runner.spec_algorithm.is_none() else get_spec()
        reasons = engine_refusals(runner.server_args, runner.prefill_attention_backend_str)
        self._drafts, self._branches = 0, False  # those that are verified
        if spec is not None and runner.is_draft_worker:
            reasons += draft_refusals(spec)
        elif spec is not None:
            reasons += verify_refusals(spec)
            self._drafts = spec.speculative_num_draft_tokens
            self._branches = spec.speculative_eagle_topk > 1
        refuse([*reasons, *self.refusals(on_gpu=self._on_gpu)])
        self._tree = self._make_tree()
        self._fixed: FixedTables | None = None
        self._tables: PageTables | None = None
        self._queries = 1
        self._plans: dict[int, Plans] = {}  # by the number of queries
        self._views: dict[int, torch.Tensor] = {}

    @property
    def _on_gpu(self) -> bool:
        return bool(torch.device(self.device).type == "cuda")

    def refusals(self, *, on_gpu: bool) -> list[str]:
        """The reasons why the kernels (without a GPU: the references) cannot decode this model."""
        raise NotImplementedError

    def plan_key(self, layer: Any) -> Any:
        """Layers with equal keys share a plan."""
        raise NotImplementedError

    def make_plan(self, layer: Any, queries: int = 1) -> DecodePlan:
        """An empty plan for up to `_most_requests` requests with this many queries each."""
        raise NotImplementedError

    def attend(self, query: torch.Tensor, layer: Any, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attend with the queries of a step, `[requests, heads, dim]`, or `[requests, queries, heads, dim]`."""
        raise NotImplementedError

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any) -> None:
        """Write the KV of a step's tokens into the cache."""
        raise NotImplementedError

    def by_page(self, name: int, rows: torch.Tensor, axes: int) -> torch.Tensor:
        """A view `[page, token, ...]` of one of the pool's tensors, with the last `axes` of its axes. It is kept under `name`,
        because a view takes the host a microsecond. While it is kept, no other tensor can have its address."""
        if torch.compiler.is_compiling():  # addresses cannot be compared there
            return rows.view(-1, self.page_size, *rows.shape[-axes:])
        view = self._views.get(name)
        if view is None or view.data_ptr() != rows.data_ptr():
            view = rows.view(-1, self.page_size, *rows.shape[-axes:])
            self._views[name] = view
        return view

    def _make_tree(self) -> DraftTree | None:
        if not self._drafts:
            return None
        windows = {window_of(layer) for layer in self.layers}
        return DraftTree(self._most_requests, self._drafts, self._branches, self.device, windows)

    def tree_of(self, queries: int) -> DraftTree | None:
        """The tree of a step with this many queries of a request; None if it has no branches."""
        return self._tree if self._branches and queries > 1 else None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Called when a step begins that no CUDA graph replays."""
        if (drafts := self._unseen(forward_batch)) is not None:
            tables = PageTables.of(forward_batch, self._req_to_token, self.page_size, drafts)
            self._start(tables, forward_batch, drafts)

    def make_room(self, requests: int) -> None:
        """Make plans for at least this many requests from now on."""
        if requests > self._most_requests:
            self._most_requests = requests
            self._tree = self._make_tree()
            self._plans.clear()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.make_room(max_bs)
        self._fixed = FixedTables(max_bs, self._req_to_token.shape[1], self.page_size, self.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Called for a step that is captured or replayed. Tables and plans keep their addresses."""
        assert self._fixed is not None, "SGLang calls init_cuda_graph_state first"
        drafts = self._unseen(forward_batch) or 0
        self._start(
            self._fixed.fill(forward_batch, self._req_to_token, drafts), forward_batch, drafts
        )

    def _unseen(self, forward_batch: Any) -> int | None:
        """Tokens of each request that are beyond SGLang's lengths; None if the step is not for this backend."""
        if forward_batch.forward_mode.is_target_verify():
            return self._drafts
        return 0 if forward_batch.forward_mode.is_decode() else None

    def _start(self, tables: PageTables, forward_batch: Any, drafts: int) -> None:
        if drafts and self._tree is not None:
            self._tree.begin(tables.lengths, forward_batch.spec_info)
        self.begin(tables, drafts or 1)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """Where SGLang writes which drafts a draft sees."""
        return self._tree.mask if self._tree else None

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Called when drafts came after the step was planned."""
        if self._tree is not None:
            self._tree.take(spec_info)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return self._on_gpu

    @property
    def tables(self) -> PageTables:
        """The page tables of the current step."""
        assert self._tables is not None, "SGLang calls init_forward_metadata first"
        return self._tables

    def plan(self, layer: Any) -> DecodePlan | None:
        """The plan of a layer in this step; None on a CPU."""
        plans = self._plans.get(self._queries)
        return plans.of_layer.get(layer) if plans else None

    def begin(self, tables: PageTables, queries: int = 1) -> None:
        """Begin a step in which each request has this many queries, its last tokens."""
        self._tables, self._queries = tables, queries
        if not self._on_gpu:
            return
        if queries not in self._plans:
            self._plans[queries] = self._make_plans(queries)
        for plan in self._plans[queries].every:
            plan.fill(tables.lengths)

    def _make_plans(self, queries: int) -> Plans:
        made: dict[Any, DecodePlan] = {}
        for layer in self.layers:
            if (key := self.plan_key(layer)) not in made:
                made[key] = self.make_plan(layer, queries)
        of_layer = {layer: made[self.plan_key(layer)] for layer in self.layers}
        return Plans(of_layer, [*made.values()])

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> torch.Tensor:
        """Attend with the tokens of a step, `[tokens, heads * dim]`. Arguments are SGLang's.

        Raises:
            NotImplementedError: the model passes other arguments.
        """
        if unknown:
            refuse([name for name, value in unknown.items() if value is not None])
        if save_kv_cache and k is not None:
            assert v is not None
            self.write(k, v, layer, forward_batch)
        heads, dim = layer.tp_q_head_num, layer.qk_head_dim
        # Queries are often a part of a wider tensor. The kernels take any stride of tokens, so they are not copied. Kernels are
        # compiled for the stride of heads, which must not depend on the batch.
        query = q.reshape(-1, heads, dim)
        if not query.is_contiguous() and query.stride()[1:] != (dim, 1):
            query = query.contiguous()
        # SGLang may pad the tokens after it has planned the step (`prepare_mlp_sync_batch`). Nobody reads these rows.
        tokens, rows = query.shape[0], self.tables.lengths.shape[0] * self._queries
        if tokens != rows:
            query = query[:rows]
        if self._queries > 1:
            query = query.unflatten(0, (-1, self._queries))
        attended = self.attend(query, layer, sinks).view(rows, heads * layer.v_head_dim)
        padding = 0, 0, 0, tokens - rows
        return attended if tokens == rows else torch.nn.functional.pad(attended, padding)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As `forward_decode`, for verifying drafts.

        Raises:
            NotImplementedError: it is a prompt, or the model passes other arguments.
        """
        if not forward_batch.forward_mode.is_target_verify():
            raise NotImplementedError("pd_kernels decodes; prompts are for --attention-backend")
        return self.forward_decode(q, k, v, layer, forward_batch, *args, **kwargs)


class PagedBackend(DecodeBackend):
    """Attention with keys and values."""

    def refusals(self, *, on_gpu: bool) -> list[str]:
        reasons = []
        if type(self.pool) is not MHATokenToKVPool or self.pool.is_quantized_kv_cache:
            reasons.append(
                f"a KV cache of kind {type(self.pool).__name__}"
            )  # some pools keep scales beside it
        elif self.pool.kv_cache_layout != "nhd":
            reasons.append(f"a KV cache in layout {self.pool.kv_cache_layout}: must be nhd")
        elif self.pool.dtype not in (self.dtype, FP8):
            reasons.append(
                f"--kv-cache-dtype {self.pool.dtype}: must be that of the model, or fp8_e4m3"
            )
        dims, dtypes = (DIMS, _KERNEL_DTYPES) if on_gpu else ((), ())
        if on_gpu:
            sizes = {dim for layer in self.layers for dim in (layer.qk_head_dim, layer.v_head_dim)}
            large = [f"head size {dim}" for dim in sorted(sizes) if dim > 256]
            reasons += gpu_refusals(self.device, large, self.pool.dtype == FP8)
        for layer in self.layers:
            reasons += layer_refusals(layer, dims, self.dtype, dtypes)
            if layer.use_irope and self.chunk_tokens is not None:
                reasons.append(f"attention in chunks of {self.chunk_tokens} tokens")
        return reasons

    def plan_key(self, layer: Any) -> Any:
        return (
            window_of(layer),
            layer.tp_q_head_num,
            layer.tp_k_head_num,
            layer.qk_head_dim,
            layer.v_head_dim,
        )

    def make_plan(self, layer: Any, queries: int = 1) -> DecodePlan:
        keys, values = self.pages(layer)
        query = torch.empty((), dtype=self.dtype, device=self.device)
        window, tree = window_of(layer), self.tree_of(queries)
        return plan_paged_decode(
            query.expand(1, queries, layer.tp_q_head_num, layer.qk_head_dim),
            keys,
            values,
            window=tree.reach(window) if tree else window,
            max_batch=self._most_requests,
        )

    def pages(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's keys and values, `[page, token, kv head, dim]` each."""
        number = layer.layer_id  # SGLang's calls wait for a layer that is being loaded
        keys = self.by_page(2 * number, self.pool.get_key_buffer(number), 2)
        return keys, self.by_page(2 * number + 1, self.pool.get_value_buffer(number), 2)

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any) -> None:
        where = KVWriteLoc.for_batch(forward_batch)
        self.pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)

    def attend(self, query: torch.Tensor, layer: Any, sinks: torch.Tensor | None) -> torch.Tensor:
        keys, values = self.pages(layer)
        coded = keys.dtype == FP8
        window, tree = window_of(layer), self.tree_of(self._queries)
        out: torch.Tensor = paged_decode(
            query,
            keys,
            values,
            *self.tables,
            scale=layer.scaling,
            window=tree.reach(window) if tree else window,
            score_mod=cap_of(layer),
            mask_mod=tree.mod(window) if tree else None,
            sinks=sinks,
            k_scale=(layer.k_scale_float or 1.0) if coded else 1.0,
            v_scale=(layer.v_scale_float or 1.0) if coded else 1.0,
            plan=self.plan(layer),
        )
        return out


class MlaBackend(DecodeBackend):
    """MLA, after weight absorption."""

    def refusals(self, *, on_gpu: bool) -> list[str]:
        reasons = []
        pool, dims = self.pool, (LATENT, ROPE)
        if getattr(pool, "use_dsa", False):
            reasons.append(SPARSE)
        elif type(pool) is not MLATokenToKVPool:
            reasons.append(f"a KV cache of kind {type(pool).__name__}")
        elif (pool.kv_lora_rank, pool.qk_rope_head_dim) != dims:
            reasons.append(
                f"latents of {pool.kv_lora_rank} and {pool.qk_rope_head_dim} elements: must be {dims}"
            )
        elif pool.dtype not in (self.dtype, FP8):
            reasons.append(f"--kv-cache-dtype {pool.dtype}: must be that of the model, or fp8_e4m3")
        if on_gpu:
            reasons += gpu_refusals(self.device, ["MLA"], pool.dtype == FP8)
        if on_gpu and self.dtype not in _KERNEL_DTYPES:
            reasons.append(f"dtype {self.dtype}: must be one of {list(_KERNEL_DTYPES)}")
        # SGLang's own backend for prompts divides latents by these scales with any cache dtype.
        scales = {layer.k_scale_float or 1.0 for layer in self.layers} - {1.0}
        reasons += [f"a checkpoint with KV scales ({scale:g})" for scale in sorted(scales)]
        for layer in self.layers:
            reasons += layer_refusals(layer, (), self.dtype, ())
            if window_of(layer):
                reasons.append(f"a sliding window of {window_of(layer)} tokens with MLA")
            if layer.logit_cap:
                reasons.append(f"a soft cap of {layer.logit_cap:g} with MLA")
            if layer.use_irope and self.chunk_tokens is not None:
                reasons.append(f"attention in chunks of {self.chunk_tokens} tokens")
        return reasons + sink_refusals(self.model, RadixAttention)

    def plan_key(self, layer: Any) -> Any:
        return layer.tp_q_head_num

    def make_plan(self, layer: Any, queries: int = 1) -> DecodePlan:
        query = torch.empty((), dtype=self.dtype, device=self.device)
        return plan_mla_decode(
            query.expand(1, queries, layer.tp_q_head_num, LATENT + ROPE),
            self.pages(layer),
            max_batch=self._most_requests,
        )

    def pages(self, layer: Any) -> torch.Tensor:
        """A view of a layer's latents, `[page, token, 576]`."""
        return self.by_page(layer.layer_id, self.pool.get_key_buffer(layer.layer_id), 1)

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any) -> None:
        self.pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)

    def attend(self, query: torch.Tensor, layer: Any, sinks: torch.Tensor | None) -> torch.Tensor:
        refuse([] if sinks is None else ["sinks"])
        tree = self.tree_of(self._queries)
        out: torch.Tensor = mla_decode(
            query,
            self.pages(layer),
            *self.tables,
            scale=layer.scaling,
            tree=tree.words[: len(query)] if tree else None,
            plan=self.plan(layer),
        )
        return out


def window_of(layer: Any) -> int:
    """Tokens that a query sees, its own included; 0 for all. SGLang does not count its own."""
    window = layer.sliding_window_size
    return 0 if window is None or window < 0 else int(window) + 1


def cap_of(layer: Any) -> Mod | None:
    """The layer's soft cap, if it has one."""
    return soft_cap_of(layer.logit_cap) if layer.logit_cap else None
