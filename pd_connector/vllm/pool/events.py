# SPDX-License-Identifier: Apache-2.0
"""Reports to other routers which blocks of this engine's prompts the host's pool has: vLLM's KV events, of medium CPU or
STORAGE.

The names of blocks are vLLM's own, so a router that knows a block in the engine's cache knows it in the pool. An engine
reports the prompts that it has served itself. Our router asks for the whole journal instead (`GET /pd/pool`).
"""

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from pd_connector.errors import PoolError
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.store.base import MEMORY, Store
from pd_connector.vllm.pool.prompt import PoolPrompt

logger = logging.getLogger("pd_connector.vllm")

_LOOKS_EVERY_S = 0.5
_MOST_CHUNKS = 1 << 14
"""Most chunks that an engine has advertised. The least recently served chunk is forgotten first, and reported as removed."""

_ANEW = b"", ""
"""The journal was rebuilt: what is gone is not in it."""


class _Chunk(NamedTuple):
    """An advertised chunk.

    Attributes:
        stored: the event of its blocks, for any medium.
        tier: the tier that routers know; empty for none.
    """

    stored: BlockStored
    tier: str


class PoolEvents:
    """Used by the scheduler's thread, except for `_follow` and `_look`.

    Args:
        page_size: tokens of a block.
    """

    def __init__(self, store: Store, page_size: int) -> None:
        self._store = store
        self._page_size = page_size
        self._advertised: OrderedDict[bytes, _Chunk] = OrderedDict()
        self._queries: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._places: queue.SimpleQueue[tuple[bytes, str]] = queue.SimpleQueue()  # key, tier
        self._events: list[KVCacheEvent] = []
        self._open_queries: list[bytes] = []  # asked for, and still to be found
        self._after, self._began = 0, False  # the place in the journal
        self._ends = threading.Event()
        threading.Thread(target=self._follow, name="pd-pool-events", daemon=True).start()

    @property
    def pending(self) -> bool:
        """Whether `take` may return events."""
        return bool(self._events) or not self._places.empty()

    def served(self, prompt: PoolPrompt, chunks: range) -> None:
        """The engine has the KV of these chunks of a prompt; they are in the pool, or may come there."""
        for number in chunks:
            key = prompt.keys[number + 1]
            if key in self._advertised:
                self._advertised.move_to_end(key)
            elif stored := self._stored(prompt, number):
                self._advertised[key] = _Chunk(stored, "")
                self._queries.put(key)
        while len(self._advertised) > _MOST_CHUNKS:
            _, forgotten = self._advertised.popitem(last=False)
            self._move(forgotten, "")

    def take(self) -> Iterator[KVCacheEvent]:
        """What has changed since the last call."""
        while not self._places.empty():
            key, tier = place = self._places.get()
            if place == _ANEW:
                for listed in self._advertised:
                    self._queries.put(listed)
            elif (chunk := self._advertised.get(key)) and chunk.tier != tier:
                self._move(chunk, tier)
                self._advertised[key] = chunk._replace(tier=tier)
        events, self._events = self._events, []
        yield from events

    def close(self) -> None:
        """End the thread."""
        self._ends.set()

    def _move(self, chunk: _Chunk, tier: str) -> None:
        stored = chunk.stored
        if chunk.tier:
            self._events.append(
                BlockRemoved(
                    block_hashes=stored.block_hashes,
                    medium=_medium(chunk.tier),
                    group_idx=stored.group_idx,
                    locality=stored.locality,
                    ownership=stored.ownership,
                )
            )
        if tier:
            fields = {name: getattr(stored, name) for name in stored.__struct_fields__}
            self._events.append(BlockStored(**{**fields, "medium": _medium(tier)}))

    def _stored(self, prompt: PoolPrompt, number: int) -> BlockStored | None:
        """The blocks that end in a chunk; None if there are none."""
        request, size = prompt.request, self._page_size
        first, stop = number * CHUNK_TOKENS // size, (number + 1) * CHUNK_TOKENS // size
        if first == stop or stop > len(request.block_hashes):
            return None
        names = [maybe_convert_block_hash(name) for name in request.block_hashes[first:stop]]
        parent = maybe_convert_block_hash(request.block_hashes[first - 1]) if first else None
        extra, inputs = [], 0
        for block in range(first, stop):
            keys, inputs = generate_block_hash_extra_keys(
                request, block * size, (block + 1) * size, inputs
            )
            extra.append(keys)
        adapter = request.lora_request
        return BlockStored(
            block_hashes=names,
            parent_block_hash=parent,
            token_ids=list(request.all_token_ids[first * size : stop * size]),
            block_size=size,
            lora_id=adapter.adapter_id if adapter else None,
            medium=None,
            lora_name=adapter.name if adapter else None,
            extra_keys=to_event_extra_keys(extra),
            group_idx=0,
            locality="LOCAL",
            ownership=f"pd_connector {self._store.id}",
        )

    def _follow(self) -> None:
        """In a thread of its own: hear where chunks are."""
        while not self._ends.wait(_LOOKS_EVERY_S):
            try:
                self._look()
            except PoolError:
                continue  # the catalog cannot be read at the moment
            except Exception:
                logger.exception("pool: KV events end")
                return

    def _look(self) -> None:
        """Read new events of the journal, and find the tier of every queued chunk. A chunk is in the journal a moment
        before a look-up finds it, so new journal events count, too. Routers chain blocks by their parents. So a parent
        chunk that came during the search for its children is reported before them."""
        while not self._queries.empty():
            self._open_queries.append(self._queries.get())
        heard = dict.fromkeys(self._open_queries, "")
        more = True
        while more:
            page = self._store.journal(self._after)
            self._after, more = page.next, page.more
            if self._began and page.whole:
                self._places.put(_ANEW)
            for event in page.events:
                if event.key in heard:
                    heard[event.key] = event.tier
                if self._began:  # what was there before is found when it is asked for
                    self._places.put((event.key, event.tier))
        self._began = True
        tiers = {key: self._tier(key) for key in heard}
        for key in self._open_queries:
            self._places.put((key, tiers[key] or self._tier(key) or heard[key]))
        self._open_queries.clear()

    def _tier(self, key: bytes) -> str:
        """Where this host has a chunk; empty if only a far store has it."""
        return next((chunk.tier for chunk in self._store.chunks([key])), "")


def _medium(tier: str) -> str:
    return str(MEDIUM_CPU if tier == MEMORY else MEDIUM_STORAGE)
