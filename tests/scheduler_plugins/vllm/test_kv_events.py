# SPDX-License-Identifier: Apache-2.0
"""KV events as vLLM's own publisher sends them, over real sockets, into the router's index."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq.asyncio
from support.free_ports import free_ports

kv_events = pytest.importorskip("vllm.distributed.kv_events")

from scheduler_plugins.router.engines.caches import EngineCaches  # noqa: E402
from scheduler_plugins.router.engines.engine import BackendEngine, Role  # noqa: E402
from scheduler_plugins.router.index.follower import EventFollower  # noqa: E402
from scheduler_plugins.router.index.hashes import token_bytes  # noqa: E402
from scheduler_plugins.router.index.prefixes import Prefixes  # noqa: E402
from scheduler_plugins.router.index.prompt_keys import PromptKeys  # noqa: E402
from scheduler_plugins.router.metrics import Metrics  # noqa: E402

SIZE = 4
TOKENS = list(range(40))
PROMPT = PromptKeys((), token_bytes(TOKENS))
_TIMES = count()


class Engine(NamedTuple):
    name: str = "a"
    block_tokens: int = SIZE


def batch(first: int, blocks: int) -> Any:
    """Blocks of the prompt; the engine names them as vLLM does."""
    names = [bytes([n]) * 32 for n in range(1, 11)]
    event = kv_events.BlockStored(
        block_hashes=names[first : first + blocks],
        parent_block_hash=names[first - 1] if first else None,
        token_ids=TOKENS[first * SIZE : (first + blocks) * SIZE],
        block_size=SIZE,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
    )
    return kv_events.KVEventBatch(ts=time.time() + next(_TIMES) / 1e3, events=[event])


def publisher(folder: Path, *, replay: bool = True, **more: Any) -> Any:
    return kv_events.ZmqEventPublisher(
        0,
        endpoint=f"ipc://{folder}/events",
        replay_endpoint=f"ipc://{folder}/replay" if replay else None,
        **more,
    )


class Following:
    """A follower of the publisher in a folder."""

    def __init__(self, folder: Path, *, replay: bool = True, live: bool = True) -> None:
        """`live`: whether it listens; if not, a test gives it the batches one by one."""
        self._live = live
        self.prefixes = Prefixes()
        self._context = zmq.asyncio.Context()
        self.follower = EventFollower(
            "a",
            f"ipc://{folder}/events",
            f"ipc://{folder}/replay" if replay else None,
            self.prefixes,
            self._context,
        )

    async def __aenter__(self) -> Following:
        self._task = asyncio.create_task(self.follower.run() if self._live else asyncio.sleep(0))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    @property
    def blocks(self) -> int:
        return self.prefixes.match(PROMPT, [Engine()], 64, 0.0)[0]

    async def hears(self, *frames: bytes) -> None:
        """A message of the publisher's."""
        await self.follower._received(frames)

    async def has(self, blocks: int) -> None:
        await until(lambda: self.blocks == blocks)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_events_fill_the_index_and_those_before_the_router_came_are_replayed(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        engine = publisher(tmp_path)
        engine.publish(batch(0, 2))
        try:
            async with Following(tmp_path) as following:
                await following.has(2)
                engine.publish(batch(2, 3))
                await following.has(5)
                removed = kv_events.BlockRemoved([bytes([5]) * 32], "GPU", 0)
                engine.publish(kv_events.KVEventBatch(ts=time.time() + 9, events=[removed]))
                await following.has(4)
                assert following.follower.describe() == {"source": "events", "blocks": 4}
                cleared = kv_events.AllBlocksCleared()
                engine.publish(kv_events.KVEventBatch(ts=time.time() + 10, events=[cleared]))
                await following.has(0)
        finally:
            engine.shutdown()

    run(scenario())


async def received(following: Following, number: int, what: Any) -> None:
    """A live batch with that number, whatever came before it."""
    payload = kv_events.msgspec.msgpack.encode(what)
    await following.hears(b"", number.to_bytes(8, "big"), payload)


def test_a_gap_is_filled_by_a_replay(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = publisher(tmp_path)
        several = [batch(n, 1) for n in range(4)]
        for one in several:
            engine.publish(one)
        try:
            async with Following(tmp_path, live=False) as following:
                await received(following, 0, several[0])
                assert following.blocks == 1
                await until(lambda: len(engine._buffer) == 4)
                await received(following, 3, several[3])
                assert following.blocks == 4
                assert following.follower.dropped == 0
                await received(following, 2, several[2])  # an old one again
                assert following.blocks == 4
        finally:
            engine.shutdown()

    run(scenario())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - another thread changes it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("replay", [True, False])
def test_what_cannot_be_replayed_drops_the_engines_part(tmp_path: Path, replay: bool) -> None:
    """With a replay buffer of one batch, and with none at all."""

    async def scenario() -> None:
        engine = publisher(tmp_path, replay=replay, buffer_steps=1)
        several = [batch(0, 3), batch(3, 1), batch(4, 1), batch(0, 2)]
        for one in several:
            engine.publish(one)
        try:
            async with Following(tmp_path, replay=replay, live=False) as following:
                await received(following, 0, several[0])
                assert following.blocks == 3
                await until(lambda: [seq for seq, _ in engine._buffer] == [3])
                await received(following, 3, several[3])
                # The last batch's blocks are known; nobody believes the first ones any more.
                assert following.blocks == 2
                assert following.follower.dropped == 1
                assert "no snapshot" in following.follower.describe()["note"]
        finally:
            engine.shutdown()

    run(scenario())


def test_an_engine_that_restarts_begins_with_an_empty_cache(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Following(tmp_path, replay=False, live=False) as following:
            for number in range(3):
                await received(following, number, batch(number, 1))
            assert following.blocks == 3
            await received(following, 0, batch(0, 1))
            assert following.blocks == 1
            await received(following, 1, batch(1, 1))
            assert following.blocks == 2

    run(scenario())


def test_messages_that_are_no_events_cost_the_engines_part_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Following(tmp_path, replay=False, live=False) as following:
            await received(following, 0, batch(0, 3))
            await following.hears(b"x")
            await following.hears(b"", b"short", b"")
            assert following.blocks == 3
            await following.hears(b"", (1).to_bytes(8, "big"), b"\xc1")
            assert following.blocks == 0
            await received(following, 2, batch(0, 1))
            assert following.blocks == 1

    run(scenario())


@pytest.mark.parametrize("ranks", [(0, 1), (0,)])
def test_ranks_are_followed_at_their_ports_and_the_best_one_counts(ranks: tuple[int, ...]) -> None:
    """vLLM's publishers of two data-parallel ranks. Where rank 1 is not followed, its blocks stay unknown."""

    async def scenario() -> None:
        first = free_ports(4)[0]
        publishers = [
            kv_events.ZmqEventPublisher(
                rank,
                endpoint=f"tcp://*:{first}",
                replay_endpoint=f"tcp://127.0.0.1:{first + 2}",
            )
            for rank in (0, 1)
        ]
        engine, caches = BackendEngine("http://e", Role.DECODE, Metrics()), EngineCaches()

        def blocks() -> int:
            return caches.prefixes.match(PROMPT, [engine], 64, 0.0)[0]

        try:
            for one, several in zip(publishers, (2, 5), strict=True):
                one.publish(batch(0, several))
            events, replay = f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{first + 2}"
            caches.follow(engine, events, replay, ranks)
            await until(lambda: blocks() == (5 if 1 in ranks else 2))
            assert engine.block_tokens == SIZE
            if 1 in ranks:
                await until(lambda: set(caches.prefixes._held["http://e"]) == {0, 1})
                assert caches.prefixes.rank_with_most(PROMPT, engine, 3 * SIZE) == 1
                assert caches.prefixes.rank_with_most(PROMPT, engine, 3 * SIZE + 1) is None
                publishers[0].publish(batch(2, 1))
                await until(lambda: caches.prefixes.state("http://e").blocks == 8)
                told = caches.describe(engine)["ranks"]
                assert {rank: one["blocks"] for rank, one in told.items()} == {"0": 3, "1": 5}
                # Only what rank 1 had is gone with it.
                caches.follow(engine, events, replay, (0,))
                assert blocks() == 3
            assert caches.prefixes.rank_with_most(PROMPT, engine, 1) is None
        finally:
            await caches.close()
            for one in publishers:
                one.shutdown()

    run(scenario())
