# SPDX-License-Identifier: Apache-2.0
"""Ranks of SGLang engines with a KV pool, without scheduler and model: SGLang's own radix cache and pool of KV, our linker."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt")

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import unified_radix_cache
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper
from sglang.srt.sampling.sampling_params import SamplingParams
from support.pool_stores import wait_for_books
from support.waits import until

from pd_connector.agent.commands import ChangeModel
from pd_connector.config import CONFIG_VARIABLE, Config
from pd_connector.kv.geometry import Shard
from pd_connector.kv.model import ModelFacts
from pd_connector.pool.settings import PoolSettings
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space
from pd_connector.sglang import pool_hooks, pool_prompts
from pd_connector.sglang.cache import describe_cache
from pd_connector.sglang.pool import PoolLinker
from pd_connector.sglang.pool_rank import PoolRank, RankCache

LAYERS, HEADS, DIM, SLOTS = 3, 4, 8, 2048
WINDOWED = [0, 2]
"""Layers with a sliding window, of an engine with windows."""
FACTS = ModelFacts(b"config", b"weights")


class Watch:
    """What `SGLangWeights` says."""

    def __init__(self, facts: ModelFacts) -> None:
        self.facts, self.withdrawn, self.changes = facts, False, 0
        self.submit: Callable[[Any], None] = lambda command: None

    def made(self, submit: Callable[[Any], None]) -> Watch:
        self.submit = submit
        return self

    def step(self) -> None: ...
    def close(self) -> None: ...

    def change(self, facts: ModelFacts) -> None:
        """Other weights, whose cache was flushed."""
        self.facts, self.changes = facts, self.changes + 1
        self.submit(ChangeModel(facts))


def kv_of(tokens: Sequence[int], noise: float = 0.0) -> torch.Tensor:
    """What every engine computes for a sequence: `[token, layer, K and V, head, dim]`. A token's KV depends on those before."""
    return _kv_of(tuple(tokens)) * (1 + noise)


@lru_cache(64)
def _kv_of(tokens: tuple[int, ...]) -> torch.Tensor:
    rows, seed = [], 0
    for token in tokens:
        seed = hash((seed, token)) & 0x7FFFFFFF
        made = torch.Generator().manual_seed(seed)
        rows.append(torch.randn((LAYERS, 2, HEADS, DIM), generator=made))
    return torch.stack(rows)


class Engine:
    """One rank of an SGLang engine: its cache and its pool of KV, without scheduler and model."""

    def __init__(
        self,
        store: LocalStore,
        *,
        page_size: int = 16,
        rank: tuple[int, int] = (0, 1),
        audit: str = "off",
        facts: ModelFacts = FACTS,
        engine_id: str = "",
        read: bool = True,
        write: bool = True,
        tree: str = "rust",
        reduce: Callable[[torch.Tensor, Any], None] | None = None,
        linker: type[PoolLinker] = PoolLinker,
        error: float = 0.0,
        latent: bool = False,
        window: int = 0,
        consumes: bool = False,
        adapters: Any = None,
        config: Config | None = None,
        handoffs: Any = None,
    ) -> None:
        self.page_size, self.error = page_size, error
        heads = HEADS // rank[1]
        self.heads = slice(rank[0] * heads, (rank[0] + 1) * heads)
        self.latent = latent
        kind = MLATokenToKVPool if latent else MHATokenToKVPool
        dims: dict[str, int] = {"head_num": heads, "head_dim": DIM}
        if latent:
            self.heads, dims = slice(0, 1), {"kv_lora_rank": DIM - 2, "qk_rope_head_dim": 2}
        self.window = window
        components = [ComponentType.FULL]
        self.pool: Any
        allocator: Any
        if window:
            components.append(ComponentType.SWA)
            self.pool = SWAKVPool(
                SLOTS,
                SLOTS,
                page_size,
                torch.float32,
                device="cpu",
                swa_attention_layer_ids=WINDOWED,
                full_attention_layer_ids=[n for n in range(LAYERS) if n not in WINDOWED],
                **dims,
            )
            allocator = SWATokenToKVPoolAllocator(
                SLOTS, SLOTS, page_size, torch.float32, "cpu", self.pool, False
            )
        else:
            self.pool = kind(
                size=SLOTS,
                page_size=page_size,
                dtype=torch.float32,
                layer_num=LAYERS,
                device="cpu",
                enable_memory_saver=False,
                start_layer=0,
                **dims,
            )
            plain = page_size == 1
            made = TokenToKVPoolAllocator if plain else PagedTokenToKVPoolAllocator
            size = () if plain else (page_size,)
            allocator = made(SLOTS, *size, torch.float32, "cpu", self.pool, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=SimpleNamespace(),
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
            tree_components=tuple(components),
            tree_core_backend=tree,
            sliding_window_size=window or None,
        )
        self.allocator = allocator
        self.tree = unified_radix_cache.UnifiedRadixCache(params)
        self.linker = linker(SimpleNamespace(), params, components=set(components), extra_config={})
        self.tree.init_cache_linker(self.linker)
        shard = Shard(0, LAYERS, *rank)
        named = {layer: {HEADS} for layer in range(LAYERS)}
        loading, saving = (
            describe_cache(self.pool, named, shard, sliding_window=window) for _ in range(2)
        )
        self.watch = Watch(facts)
        settings = PoolSettings(Space(Path("/unused"), 1), None, read, write)
        self.rank = PoolRank(
            RankCache(
                (loading, saving),
                engine_id or f"e{id(self)}",
                rank[1],
                leads=rank[0] == 0,
                consumes=consumes,
            ),
            config or Config(audit=audit, pool=True),  # type: ignore[arg-type]
            store,
            settings,
            facts,
            self.watch.made,  # type: ignore[arg-type]
            self.linker._ended,
            adapters=adapters,
            handoffs=handoffs,
        )
        self.linker._rank, self.linker._cache = self.rank, self.tree
        if reduce is not None:
            self.tree._all_reduce_attn_groups = reduce
        self.rank.prompts.breakeven.computed(128, 100.0)  # loading pays
        self.scheduler = SimpleNamespace(
            tree_cache=self.tree, waiting_queue=[], disagg_prefill_bootstrap_queue=None
        )

    def request(
        self,
        tokens: Sequence[int],
        *,
        salt: str | None = None,
        lora_id: str | None = None,
        **pool: Any,
    ) -> Req:
        custom = {"pool": pool} if pool else None
        sampling = SamplingParams(max_new_tokens=4, custom_params=custom)
        rid = f"r{random.random()}"
        req = Req(rid, "", array("q", tokens), sampling, cache_salt=salt, lora_id=lora_id)
        req.refresh_fill_ids()
        return req

    def arrive(self, req: Req) -> None:
        """The request enters the queue."""
        self.linker.arrived(req)
        self.scheduler.waiting_queue.append(req)

    def schedulable(self) -> list[Req]:
        """What SGLang may put into its next batch."""
        with self.linker.scheduling(self.scheduler):
            return list(self.scheduler.waiting_queue)

    def wait(self, req: Req) -> None:
        """Until the request waits for no chunk."""
        until(lambda: req in self.schedulable())

    def match(self, req: Req) -> Any:
        key = RadixKey(
            req.full_untruncated_fill_ids,
            req.extra_key,
            limit=len(req.full_untruncated_fill_ids) - 1,
            cache_salt=req.cache_salt,
        )
        return self.tree.match_prefix(MatchPrefixParams(key=key, req=req))

    def load(self, req: Req) -> torch.Tensor:
        """As SGLang does with the request at the head of its queue. Returns the slots of its prefix, all of them filled."""
        found = self.match(req)
        req.last_node = found.last_device_node
        req.pd_matched = found.device_prefix_len
        slots = self.tree.path_device_indices(found.last_device_node)
        if found.host_hit_length:
            count, _ = self.tree.init_load_back(
                InitLoadBackParams(
                    best_match_node=found.best_match_node,
                    host_hit_length=found.host_hit_length,
                    req=req,
                )
            )
            if count:
                slots = torch.cat([slots, self.tree.linker.private_load_indices[req.rid]])
        index = self.tree.ready_to_load_host_cache()
        self.linker.layer_done_counter.set_consumer(index)
        if index >= 0:
            self.linker.layer_done_counter.wait_until(0)
        assert self.tree.linker.finish_loads() == [], "SGLang aborts these requests"
        return slots

    def _allocate(self, count: int) -> torch.Tensor:
        if not self.window:
            return self.allocator.alloc(count)
        slots = self.allocator.full_attn_allocator.alloc(count)
        self.allocator.set_full_to_swa_mapping(
            slots, self.allocator.swa_attn_allocator.alloc(count)
        )
        return slots

    def rows(self, layer: int, part: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffer of K (0) or V (1) of a layer, and the slots in it of these slots of SGLang's."""
        pool, place = self.pool, layer
        if self.window:
            place, windowed = pool.layers_mapping[layer]
            if windowed:
                slots = self.allocator.translate_swa_indices_for_transfer(slots)
            pool = pool.swa_kv_pool if windowed else pool.full_kv_pool
        buffers = (pool.kv_buffer,) if self.latent else (pool.k_buffer, pool.v_buffer)
        return buffers[part][place], slots

    def compute(
        self, req: Req, prefix: torch.Tensor | None = None, *, windows_from: int = 0
    ) -> None:
        """Compute the rest of a prompt, and put all of it into the cache.

        Args:
            windows_from: SGLang has freed the windows before this token.
        """
        tokens = req.full_untruncated_fill_ids
        prefix = torch.empty(0, dtype=torch.int64) if prefix is None else prefix
        rest = len(tokens) - len(prefix)
        slots = self._allocate(-(-rest // self.page_size) * self.page_size)
        slots = torch.cat([prefix, slots[:rest]])
        kv = kv_of(tokens, self.error)
        for layer in range(LAYERS):
            for part in range(1 if self.latent else 2):
                buffer, new = self.rows(layer, part, slots[len(prefix) :])
                buffer[new] = kv[len(prefix) :, layer, part, self.heads]
        key = RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)
        whole = len(tokens) // self.page_size * self.page_size
        params = InsertParams(key=key.page_aligned(self.page_size), value=slots[:whole])
        if self.window:
            params.prev_prefix_len = req.pd_matched if hasattr(req, "pd_matched") else 0
            if windows_from:
                self.allocator.free_swa_segment(slots[:windows_from], start_pos=0)
            if req.kv is not None:
                windows_from = max(windows_from, req.kv.get_evicted_seqlen(ComponentType.SWA))
            params.set_evicted_seqlen(ComponentType.SWA, windows_from)
        with self.linker.inserting(req):
            self.tree.insert(params)
        self.scheduler.waiting_queue = [r for r in self.scheduler.waiting_queue if r is not req]
        self.settle()

    def settle(self) -> None:
        """Until no node is locked for a save."""

        def done() -> bool:
            self.tree.check_hicache_events()
            return not self.tree.linker.pending_offloads

        until(done)

    def ask(self, tokens: Sequence[int], **more: Any) -> int:
        """A whole request. Returns the tokens that were loaded; every token's KV is right then."""
        req = self.request(tokens, **more)
        self.arrive(req)
        self.wait(req)
        slots = self.load(req)
        self.check(tokens, slots)
        loaded = len(slots)
        self.compute(req, slots)
        return loaded

    def check(self, tokens: Sequence[int], slots: torch.Tensor) -> None:
        if not len(slots):
            return
        expected = kv_of(tokens[: len(slots)])
        for layer in range(LAYERS):
            windowed = self.window and layer in WINDOWED
            first = max(0, len(slots) - self.window) if windowed else 0
            for part in range(1 if self.latent else 2):
                buffer, own = self.rows(layer, part, slots[first:])
                assert torch.equal(buffer[own], expected[first:, layer, part, self.heads]), layer

    def flush(self) -> None:
        self.tree.reset()
        self.allocator.clear()

    def close(self) -> None:
        self.linker.close()


Make = Callable[..., Engine]


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's functions as the plugin wraps them."""
    for name, hook in (("match", pool_hooks.matches), ("_offload_node", pool_hooks.offloads_node)):
        original = getattr(UnifiedCacheLinkerWrapper, name)
        monkeypatch.setattr(
            UnifiedCacheLinkerWrapper,
            name,
            lambda self, *args, hook=hook, original=original: hook(original, self, *args),
        )
    monkeypatch.setenv(CONFIG_VARIABLE, '{"pool": true}')
    for name in ("LOOK_S", "_SLOW_S", "STALL_S"):  # a busy machine
        monkeypatch.setattr(pool_prompts, name, 60.0)
    alone = SimpleNamespace(disaggregation_mode="null")
    monkeypatch.setattr(unified_radix_cache, "get_disagg", lambda: alone)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStore]:
    wait_for_books(monkeypatch)
    made = LocalStore(Space(tmp_path / "pool", 64 << 20), None)
    yield made
    made.close()


@pytest.fixture
def make(store: LocalStore, hooked: None) -> Iterator[Make]:
    engines: list[Engine] = []

    def one(**options: Any) -> Engine:
        engines.append(Engine(store, **options))
        return engines[-1]

    yield one
    for engine in engines:
        engine.close()


def prompt(length: int, seed: int = 1) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(3, 250) for _ in range(length)]


def stored(store: LocalStore) -> int:
    return len(store.keys())


class Ranks:
    """Lets ranks agree as SGLang's do: each runs in a thread of its own."""

    def __init__(self, count: int = 2) -> None:
        self._barrier = threading.Barrier(count)
        self._said: dict[int, torch.Tensor] = {}

    def reduce(self, rank: int) -> Callable[[torch.Tensor, Any], None]:
        """SGLang's reduction of one rank: the smallest of all ranks, place by place."""

        def reduced(tensor: torch.Tensor, op: Any) -> None:
            self._said[rank] = tensor.clone()
            self._barrier.wait(60)
            tensor.copy_(torch.stack(list(self._said.values())).amin(0))
            self._barrier.wait(60)

        return reduced

    def abort(self) -> None:
        """A rank has failed: the others do not wait for it."""
        self._barrier.abort()
