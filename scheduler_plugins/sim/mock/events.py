# SPDX-License-Identifier: Apache-2.0
"""KV events in vLLM's form: the changes of an engine's cache."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from scheduler_plugins.order.request import BlockHash
from scheduler_plugins.sim.cache import LruBlocks

KEPT_BATCHES = 10_000
_END = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Consecutive blocks were computed. Fields are as in `vllm/distributed/kv_events.py` (0.32)."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks were evicted."""

    block_hashes: list[int]
    medium: str | None


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """A batch of events, published together."""

    ts: float
    events: list[BlockStored | BlockRemoved]
    data_parallel_rank: int | None = None


class KnownBlock(msgspec.Struct):
    """The data of a block for an event."""

    parent: int | None
    token_ids: Sequence[int]


class WatchedBlocks(LruBlocks):
    """A prefix cache that reports every change when its blocks are computed."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        super().__init__(capacity)
        self._block_tokens = block_tokens
        self._contents: dict[BlockHash, KnownBlock] = {}
        self._published: set[BlockHash] = set()
        self._gone: list[int] = []
        self._notes_evictions = True
        self.publish: Callable[[list[BlockStored | BlockRemoved]], None] = lambda events: None
        """Called with the changes."""

    def know(self, hashes: Sequence[int], ids: Sequence[int]) -> None:
        """Note a prompt whose blocks may be computed."""
        size, parent = self._block_tokens, None
        for n, block in enumerate(hashes):
            if block not in self._contents:
                self._contents[block] = KnownBlock(parent, ids[n * size : (n + 1) * size])
            parent = block

    def computed(self, now_s: float) -> None:
        added = list(reversed(self._computing))
        super().computed(now_s)
        events: list[BlockStored | BlockRemoved] = []
        if self._gone:
            events.append(BlockRemoved(self._gone, "GPU"))
            self._gone = []
        for block in added:
            if block not in self._published and self._blocks.get(block, inf) < inf:
                self._published.add(block)
                self._add(events, block)
        if len(self._contents) > 4 * self._capacity:
            self._contents = {
                name: content for name, content in self._contents.items() if name in self._blocks
            }
        if events:
            self.publish(events)

    def _evict(self, block: BlockHash, since_s: float, now_s: float) -> None:
        if block in self._published and isinstance(block, int):
            self._published.discard(block)
            self._gone.append(block)

    def _add(self, events: list[BlockStored | BlockRemoved], block: BlockHash) -> None:
        """A block joins its parent's event if that is the last event. Otherwise it begins a new event."""
        content = self._contents.get(block)
        if content is None or not isinstance(block, int):
            return
        last = events[-1] if events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == content.parent:
            last.block_hashes.append(block)
            last.token_ids.extend(content.token_ids)
        else:
            ids = list(content.token_ids)
            events.append(
                BlockStored([block], content.parent, ids, self._block_tokens, None, "GPU", None)
            )


class Publisher:
    """Publishes batches like vLLM's `ZmqEventPublisher`: topic, number, msgpack. Replays the last batches."""

    def __init__(self, endpoint: str, replay_endpoint: str = "", topic: str = "") -> None:
        """Bind both endpoints. `replay_endpoint` empty: no replay. Raises OSError: an endpoint cannot be bound."""
        self._topic = topic.encode()
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(100_000)
        self._replay = self._context.socket(zmq.ROUTER) if replay_endpoint else None
        try:
            self._pub.bind(endpoint)
            if self._replay is not None:
                self._replay.bind(replay_endpoint)
        except zmq.ZMQError as error:
            # If the garbage collector destroyed the context with open sockets, it would wait for ever.
            self.close()
            raise OSError(
                f"KV events at {endpoint}, {replay_endpoint or 'no replay'}: {error}"
            ) from None
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = (
            self._replay.getsockopt_string(zmq.LAST_ENDPOINT) if self._replay is not None else ""
        )
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._seq = 0
        self._tasks: set[asyncio.Future[Any]] = set()

    def publish(self, events: list[BlockStored | BlockRemoved]) -> None:
        """Send one batch. Needs a running event loop."""
        payload = msgspec.msgpack.encode(EventBatch(time.time(), events, 0))
        seq, self._seq = self._seq, self._seq + 1
        self._batches.append((seq, payload))
        sent = asyncio.ensure_future(
            self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))
        )
        self._tasks.add(sent)
        sent.add_done_callback(self._tasks.discard)

    async def serve_replay(self) -> None:
        """Answer replay requests until cancelled."""
        while self._replay is not None:
            client, _, start = (await self._replay.recv_multipart())[:3]
            first = int.from_bytes(start, "big")
            for seq, payload in list(self._batches):
                if seq >= first:
                    number = seq.to_bytes(8, "big")
                    await self._replay.send_multipart((client, b"", self._topic, number, payload))
            await self._replay.send_multipart((client, b"", b"", _END, b""))

    def close(self) -> None:
        self._context.destroy(linger=0)
