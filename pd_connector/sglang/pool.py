# SPDX-License-Identifier: Apache-2.0
"""SGLang's door to the KV pool: an external linker of SGLang's radix cache, which saves computed chunks and loads stored ones.

Arrival    `arrived` (hook): chunks of a prompt are looked up, read and verified (`pool_prompts.py`, `pool_chunks.py`)
Scheduling `scheduling` (hook): the ranks agree how many chunks all of them hold; `lookup` names these lengths
Load       `load` takes the chunks, `start_layer_wise_loading` copies them layer by layer while the first layers compute
Save `inserting` (hook) notes whose KV enters the cache; `offload` has new chunks copied (`pool_thread.py`)

SGLang aborts requests whose load fails once it has started. So everything that can fail happens before: from
`start_layer_wise_loading` on bytes are copied from this rank's memory into its pages, nothing else.
"""

import logging
import threading
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)

from pd_connector.agent.pending_outcomes import Outcome
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.pool.copy_plan import LoadPiece
from pd_connector.pool.jobs import Fill, PromptChunk, Save, Saved
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.protocol.consuming.incoming import Finished
from pd_connector.sglang.hooks import manager_of
from pd_connector.sglang.pool_chunks import HeldChunk, planned
from pd_connector.sglang.pool_prompts import Apart, PoolPrompt, chunks_of, salt_of
from pd_connector.sglang.pool_rank import PoolRank
from pd_connector.sglang.pool_settings import check_linker, pool_config

logger = logging.getLogger("pd_connector.sglang")

MOST_SAVES = 64
"""Chunks whose pages are kept for saves at a time. More are not saved: their pages would be missed."""
_MOST_BEGUN = 1 << 16
"""Chunks of nodes that are saved in several turns, of which it is known that they had theirs."""
_IDLE_S = 0.002
"""Longest pause of an idle scheduler while requests wait for chunks, in seconds."""


@dataclass(eq=False)
class _Offload:
    """A node of SGLang's cache that stays locked until its chunks are copied.

    Attributes:
        jobs: names of saves and comparisons under way.
        stored: the final report to SGLang: whether it need not offer this node again.
        parent: a lock of the node before it, whose window has the beginning of this node's first chunk.
    """

    jobs: set[str] = field(default_factory=set)
    stored: bool = True
    parent: Any = None


class _Node(NamedTuple):
    """A node of SGLang's cache.

    Attributes:
        before: tokens before it.
        slots: slots of all tokens up to its end.
        parent: id of the node before it.
    """

    before: int
    slots: torch.Tensor
    parent: Any


class _Copy(NamedTuple):
    """Bytes of a held chunk on their way into pages."""

    piece: LoadPiece
    payload: memoryview


class _Load(NamedTuple):
    """A request's load, until it is copied."""

    copies: list[_Copy]
    held: list[HeldChunk]


class PoolLinker(UnifiedCacheLinker):
    """Used by the scheduler's thread, in the terms of `UnifiedCacheLinker`. It saves and loads from `attach` on."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Any,
        forward_stream: Any = None,
    ) -> None:
        self._config = pool_config()
        check_linker(server_args, params, components)
        self._params = params
        self._pool = params.token_to_kv_pool_allocator.get_kvcache()
        self._page_size: int = params.page_size
        self.forward_stream = forward_stream
        self.pools = {PoolName.KV: self._pool}
        self._window = 0
        """Tokens before a token that layers with a sliding window see, in whole pages; 0: there are no such layers."""
        if len(components) > 1:
            self.pools[PoolName.SWA] = self._pool.swa_kv_pool
            self._window = -(-params.swa_retain_window // self._page_size) * self._page_size
        self.layer_done_counter = LayerWiseLoadCounter(self._pool.layer_num)
        self._rank: PoolRank | None = None
        self._cache: Any = None  # SGLang's radix cache
        self._inserting: Any = None  # the request whose KV enters the cache now
        self._node: _Node | None = None  # which SGLang offloads now
        self._offloads: deque[_Offload] = deque()
        self._jobs: dict[str, _Offload] = {}
        self._lock = threading.Lock()  # of `_jobs` and what they change
        self._numbered = 0
        self._begun: OrderedDict[bytes, None] = OrderedDict()  # of nodes with too many chunks
        self._queued: dict[str, _Load] = {}
        self._copier = ThreadPoolExecutor(1, "pd-pool-copy")

    # What SGLang's functions tell (`pool_hooks.py`)

    def attach(self, scheduler: Any) -> None:
        """SGLang's scheduler has been made: open the pool.

        Raises:
            PDConnectorError: the engine is set up for what the pool cannot keep; it does not start then.
        """
        self._cache = scheduler.tree_cache
        self._rank = PoolRank.of(
            scheduler, self._pool, self._config, self._ended, manager_of(scheduler)
        )

    def arrived(self, req: Any) -> None:
        """A request enters a queue."""
        try:
            self._arrived(req)
        except Exception:  # the same on all ranks; SGLang would end the engine
            logger.exception("request %s: the pool is not used for it", req.rid)

    def _arrived(self, req: Any) -> None:
        rank = self._rank
        if rank is None or not rank.reads(req):
            return
        tokens = array("q", req.origin_input_ids)
        tokens.extend(req.output_ids)
        usable = tokens[: req._compute_max_prefix_len(len(tokens))]
        if len(usable) < CHUNK_TOKENS:
            return
        computed = self._computed(usable, req)
        # This rank alone may not know the adapter. The ranks wait for each other in `scheduling`.
        apart = rank.apart(req)
        model = b"" if apart is None else rank.model
        rank.prompts.begin(req.rid, usable, apart or Apart(""), computed, model, rank.facts)

    def _computed(self, tokens: "array[int]", req: Any) -> int:
        """Tokens that SGLang's cache has already."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt)
        match = self._cache.tree_core.match_prefix(MatchPrefixParams(key=key))
        self._cache._apply_cache_actions(match.cache_actions)
        return int(match.device_prefix_len)

    @contextmanager
    def scheduling(self, scheduler: Any) -> Iterator[None]:
        """A context in which SGLang makes a batch of waiting requests. Requests that still wait for chunks are hidden
        from it."""
        rank = self._rank
        if rank is None or not rank.prompts:
            yield
            return
        queue = list(scheduler.waiting_queue)
        bootstrapping = scheduler.disagg_prefill_bootstrap_queue
        comes = bootstrapping.queue if bootstrapping is not None else ()
        rank.prompts.keep_only([req.rid for req in (*queue, *comes)])
        waiting = rank.prompts.settle([req.rid for req in queue], self._agree)
        scheduler.waiting_queue = [req for req in queue if req.rid not in waiting]
        try:
            yield
        finally:
            if waiting:
                places = {id(req): place for place, req in enumerate(queue)}
                left = [*scheduler.waiting_queue, *(r for r in queue if r.rid in waiting)]
                left.sort(key=lambda req: places.get(id(req), len(places)))
                scheduler.waiting_queue = left

    def idle(self) -> None:
        """Pause, because SGLang has nothing to compute and would call again without pause."""
        rank = self._rank
        if rank is None:
            return
        rank.stepped(0)
        if rank.prompts:
            rank.prompts.progress.wait(_IDLE_S)
            rank.prompts.progress.clear()

    def step(self, batch: Any) -> None:
        """SGLang computes a batch."""
        if self._rank is None:
            return
        extends = batch.forward_mode.is_extend()
        self._rank.stepped(int(batch.extend_num_tokens or 0) if extends else 0)

    def matching(self, key: Any, req: Any, result: Any) -> None:
        """SGLang looks for a request's prefix in its cache, and calls `lookup` next for the tokens that it lacks."""
        prompt = self._rank.prompts.get(req.rid) if self._rank else None
        if prompt is None:
            return
        named = (prompt.settled or 0) * CHUNK_TOKENS
        same = (
            salt_of(key.cache_salt, key.extra_key, req.lora_id) == prompt.apart.salt
            and key.raw_token_ids()[:named] == prompt.tokens[:named]
        )
        prompt.matched = result.device_prefix_len if same else -1

    @contextmanager
    def inserting(self, req: Any) -> Iterator[None]:
        """A context in which SGLang puts a request's KV into its cache, and offloads its nodes."""
        self._inserting = req
        try:
            yield
        finally:
            self._inserting = None
        try:
            if self._rank is not None and req.finished():
                self._rank.over(req)
        except Exception:  # SGLang would end the engine
            logger.exception("request %s: its prompt is not kept", req.rid)

    @contextmanager
    def offloading(self, wrapper: Any, node_id: Any, transfers: Sequence[Any]) -> Iterator[None]:
        """Within, SGLang offloads one node of its cache."""
        req = self._inserting
        try:
            if req is not None and self._rank is not None and transfers:
                core = wrapper.cache.tree_core
                root = wrapper.cache.root_node_handle(req.extra_key)
                slots = core.collect_full_device_indices(node_id, root)
                before = len(slots) - len(transfers[0].device_indices)
                ((*_, own),) = core.collect_path_info([node_id])
                self._node = _Node(before, slots, own.parent_id)
        except Exception:
            logger.exception("request %s: its chunks are not saved", req.rid)
        try:
            yield
        finally:
            self._node = None

    @property
    def weights(self) -> Any:
        """What watches the weights; None before `attach`."""
        return self._rank.watch if self._rank else None

    # `UnifiedCacheLinker`: loads

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        prompt = self._rank.prompts.get(rid) if self._rank else None
        if prompt is None or not self._usable(prompt):
            return []
        most = min(prompt.matched + len(transfers[0].keys) * self._page_size, len(prompt.tokens))
        held = {each.chunk.number: each for each in prompt.held}
        lengths, number = [], prompt.matched // CHUNK_TOKENS
        windows_from = prompt.matched  # the token from which on windows are whole
        while number in held and number < (prompt.settled or 0):
            ready = held[number].ready
            if ready is not None and ready.window_from:
                windows_from = max(windows_from, number * CHUNK_TOKENS + ready.window_from)
            number += 1
            stop = number * CHUNK_TOKENS
            if stop > most:
                break
            if windows_from <= max(prompt.matched, stop - self._window):
                lengths.append((stop - prompt.matched) // self._page_size)
        return lengths

    def _usable(self, prompt: PoolPrompt) -> bool:
        """Whether this prompt's chunks can be loaded that follow its prefix in the radix cache."""
        assert self._rank is not None
        model = self._rank.model
        return bool(
            prompt.settled is not None
            and model
            and prompt.model == model
            and prompt.matched >= prompt.first * CHUNK_TOKENS
            and prompt.matched % self._page_size == 0
        )

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """The ranks agree: if one of them cannot load, none does."""
        prompt = self._rank.prompts.get(rid) if self._rank else None
        load = None
        try:
            if prompt is not None:
                load = self._planned(prompt, [each.device_indices for each in transfers])
        except Exception:
            logger.exception("request %s: its chunks cannot be loaded; it is computed", rid)
        ((agreed, _),) = self._agree([(int(load is not None), 0)])
        if load is None or not agreed:
            return False
        assert prompt is not None
        assert self._rank is not None
        self._rank.prompts.take(prompt, load.held)
        self._rank.holds(load.held)
        self._queued[rid] = load
        return True

    def _planned(self, prompt: PoolPrompt, slots: Sequence[torch.Tensor]) -> _Load | None:
        """The plan which chunks are copied into which slots; None if SGLang requests a length that `lookup` did not
        name.

        Args:
            slots: slots for the tokens behind the prompt's cached prefix. Second, if layers have a sliding window: their slots
                for the last tokens.
        """
        assert self._rank is not None
        first, stop = prompt.matched, prompt.matched + len(slots[0])
        last = stop // CHUNK_TOKENS
        if not self._usable(prompt) or stop % CHUNK_TOKENS or last > (prompt.settled or 0):
            return None
        tables = [
            [-1] * ((stop - len(each)) // self._page_size) + self._pages(each) for each in slots
        ]
        numbers = range(first // CHUNK_TOKENS, last)
        held = [each for each in prompt.held if each.chunk.number in numbers]
        if [each.chunk.number for each in held] != list(numbers):
            return None  # SGLang has loaded some of them before
        copies: list[_Copy] = []
        own = self._rank.loads.geometry
        for each in held:
            ready, number = each.ready, each.chunk.number
            if ready is None:
                return None
            pieces = planned(ready.read, own, tables, number, first, stop)
            copies += map(_Copy, pieces, ready.payloads_of(pieces))
        return _Load(copies, held)

    def _pages(self, slots: torch.Tensor) -> list[int]:
        """The pages of slots that fill pages."""
        return (slots[:: self._page_size] // self._page_size).tolist()  # type: ignore[no-any-return]

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        assert self._rank is not None
        loads, self._queued = list(self._queued.values()), {}
        index: int = self.layer_done_counter.update_producer()
        self._copier.submit(self._copy, index, loads, self._rank.loads, self._fence())
        return index

    def _copy(self, index: int, loads: list[_Load], cache: PagedCache, fence: Any) -> None:
        """Copy the chunks, the first layers first. The copying thread calls it."""
        rank, counter = self._rank, self.layer_done_counter
        assert rank is not None
        try:
            copies = [copy for load in loads for copy in load.copies]
            layers = [copy.piece.chunk.layers(copy.piece.route) for copy in copies]
            left = Counter(layer for each in layers for layer in each)
            first, done = cache.geometry.shard.first_layer, 0
            for place in sorted(range(len(copies)), key=lambda place: max(layers[place])):
                piece, payload = copies[place]
                cache.scatter(piece.route, piece.chunk, piece.pages, payload, fence)
                left.subtract(layers[place])
                while done < counter.num_layers and not left[first + done]:
                    counter.complete(index, done)
                    done += 1
            for layer in range(done, counter.num_layers):
                counter.complete(index, layer)
            rank.loaded([held.hit for load in loads for held in load.held])
        except BaseException as error:
            logger.exception("pool: chunks could not be copied into pages")
            counter.fail(index, error)
        finally:
            for load in loads:
                for held in load.held:
                    rank.prompts.held.release(held)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return bool(self.layer_done_counter.finish(counter_index))

    def cancel_queued_load(self, rid: str) -> bool:
        load = self._queued.pop(rid, None)
        if load is None:
            return False
        assert self._rank is not None
        for held in load.held:
            self._rank.prompts.held.release(held)
        return True

    # `UnifiedCacheLinker`: saves

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """The answer is the same on all ranks, which lock their nodes alike."""
        offload = _Offload()
        self._offloads.append(offload)
        if self._rank is None or self._node is None:
            offload.stored = False
            return True
        try:
            fence = self._fence()
            for job in self._new_jobs(offload, self._node):
                self._rank.thread.execute(job, fence)
        except Exception:
            logger.exception("chunks are not saved")
            offload.stored = False
        return True

    def _new_jobs(self, offload: _Offload, node: _Node) -> list[Save | Fill]:
        """The saves and comparisons of the chunks that end in a node."""
        rank, req = self._rank, self._inserting
        assert rank is not None
        model = rank.model
        numbers = range(node.before // CHUNK_TOKENS, len(node.slots) // CHUNK_TOKENS)
        if not numbers:
            return []
        tables = self._tables(offload, node)  # on all ranks: it locks a node
        apart = rank.apart(req) if rank.takes(req) else None
        if not model or apart is None:
            offload.stored = False
            return []
        tokens = req.full_untruncated_fill_ids[: numbers.stop * CHUNK_TOKENS]
        try:
            chunks = chunks_of(model, tokens, apart, first=numbers.start)
        except OverflowError:
            return []
        jobs: list[Save | Fill] = []
        begun: list[bytes] = []
        for chunk in chunks:
            first, stop = (
                token // self._page_size for token in (chunk.first_token, chunk.stop_token)
            )
            # What a window has passed cannot be compared.
            gone = any(table[stop - 1] < 0 for table in tables)
            compares = chunk.key in rank.prompts.audit and not gone
            if chunk.key in self._begun and not compares:
                continue
            name = self._name(offload)
            if name is None:  # when SGLang offers the node again, the other chunks have their turn
                offload.stored = False
                self._begun.update(dict.fromkeys(begun))
                while len(self._begun) > _MOST_BEGUN:
                    self._begun.popitem(last=False)
                break
            begun.append(chunk.key)
            if compares:
                rank.prompts.audit.pop(chunk.key, None)
                pages = tuple([-1] * first + table[first:stop] for table in tables)
                jobs.append(_comparison(name, model, chunk, pages))
            elif rank.writes(req):
                pages = tuple(table[first:stop] for table in tables)
                jobs.append(Save(name, model, chunk, pages, rank.tenant(req)))
            else:
                begun.pop()
                self._ended(Saved(name))
                if rank.saves:  # another request with this prompt may want it saved
                    offload.stored = False
        else:
            for chunk in chunks:
                self._begun.pop(chunk.key, None)
        return jobs

    def _tables(self, offload: _Offload, node: _Node) -> list[list[int]]:
        """The pages of a node's path, by page table; -1 for pages of a window that SGLang has freed, or may free before they are
        copied: its lock of the node does not keep the windows of the nodes before. -1, too, for windows that were handed over:
        a handoff fills the first page of a window only as far as the next token sees it."""
        tables = [self._pages(node.slots)]
        if not self._window:
            return tables
        if node.before % CHUNK_TOKENS:  # the first chunk begins before the node
            result = self._cache.inc_lock_ref(node.parent)
            offload.parent = node.parent, result.to_dec_params()
        allocator = self._params.token_to_kv_pool_allocator
        windowed = self._pages(allocator.translate_swa_indices_for_transfer(node.slots))
        free = max(0, node.before - self._window) // self._page_size
        if self._rank is not None and self._rank.consumes:
            req = self._inserting  # once retracted, its answer was handed over again, too
            given = len(node.slots) if req.retraction_count else len(req.origin_input_ids)
            free = min(max(free, -(-given // self._page_size)), len(windowed))
        tables.append([-1] * free + [page if page > 0 else -1 for page in windowed[free:]])
        return tables

    def _unlock(self, offload: _Offload) -> None:
        if offload.parent is not None:
            self._cache.dec_lock_ref(*offload.parent)
            offload.parent = None

    def _name(self, offload: _Offload) -> str | None:
        """A unique name for a job; None if too many jobs are under way."""
        with self._lock:
            if len(self._jobs) >= MOST_SAVES:
                return None
            self._numbered += 1
            name = f"pool {self._numbered}"
            self._jobs[name] = offload
            offload.jobs.add(name)
            return name

    def _ended(self, outcome: Outcome) -> None:
        """Pages of a job are no longer read. Any thread calls it."""
        assert isinstance(outcome, Saved | Finished)
        with self._lock:
            offload = self._jobs.pop(outcome.request, None)
            if offload is not None:
                offload.jobs.discard(outcome.request)

    def num_completed_offloads(self) -> int:
        with self._lock:
            count = 0
            for offload in self._offloads:
                if offload.jobs:
                    break
                count += 1
            return count

    def pop_completed_offload(self) -> bool:
        offload = self._offloads.popleft()
        self._unlock(offload)
        return offload.stored

    # `UnifiedCacheLinker`: its end

    def reset(self) -> None:
        """SGLang empties its cache: no page is read or written any more."""
        with self._lock:
            names = list(self._jobs)
        if self._rank is not None:
            self._rank.thread.take_back(names)
            self._rank.prompts.clear()
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self._copier.submit(lambda: None).result()
        while self._offloads:
            self._unlock(self._offloads.popleft())
        self._begun.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        self.reset()
        self._copier.shutdown()
        if self._rank is not None:
            self._rank.close()

    def _fence(self) -> Any:
        """An event on the device, after the work that writes the pages computed so far; None on a CPU."""
        stream = self.forward_stream
        if not isinstance(stream, torch.cuda.Stream):
            return self._rank.loads.fence() if self._rank else None
        stream.wait_stream(torch.cuda.current_stream())
        return stream.record_event()

    def _agree(self, own: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The smallest numbers of all ranks, place by place."""
        numbers = torch.tensor(own, dtype=torch.int64)
        self._cache._all_reduce_attn_groups(numbers, torch.distributed.ReduceOp.MIN)
        return [(int(ready), int(chunks)) for ready, chunks in numbers.tolist()]


def _comparison(
    name: str, model: bytes, chunk: PromptChunk, pages: tuple[Sequence[int], ...]
) -> Fill:
    """Compare a chunk of the pool with the pages in which it was computed here."""
    span = chunk.first_token, chunk.stop_token
    return Fill(name, model, (chunk,), *span, pages, compares=True)
