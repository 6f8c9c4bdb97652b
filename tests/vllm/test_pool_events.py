# SPDX-License-Identifier: Apache-2.0
"""What KV events tell other routers of the pool, and that our router takes no block of it for one of the engine's cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from support.vllm_computing import ComputingEngine, until_over, window
from support.vllm_pooled import CHUNKS, Make, keys_of, make, run
from support.vllm_steps import PAGE
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.request import Request

from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.store.base import DISK, FAR, MEMORY, Found
from pd_connector.pool.store.folder import Folder
from pd_connector.vllm.pool import events as pool_events
from scheduler_plugins.router.index.events import decode
from scheduler_plugins.router.index.hashes import prompt_extras, token_bytes
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.prompt_keys import PromptKeys

__all__ = ["make"]
BLOCKS = CHUNKS * CHUNK_TOKENS // PAGE


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_events, "_LOOKS_EVERY_S", 0.02)


def telling(make: Make, name: str) -> ComputingEngine:
    """An engine that keeps what vLLM takes with its steps."""
    engine: Any = make(name)
    engine.side.pool.publish_events()
    take, engine.taken = engine.scheduler.connector.take_events, []

    def takes() -> list[Any]:
        engine.taken += (events := list(take()))
        return events

    engine.scheduler.connector.take_events = takes
    return engine  # type: ignore[no-any-return]


def events(of: Any, wanted: int) -> list[Any]:
    """What has been told since the last call."""
    until_over([of], lambda: len(of.taken) >= wanted)
    time.sleep(0.1)
    of.step()
    taken, of.taken = of.taken, []
    return list(taken)


def prompt_of(engine: ComputingEngine) -> Request:
    """The prompt of `run`, as a request that is not served."""
    request = engine.add("like it", CHUNKS * CHUNK_TOKENS + 30)
    engine.abort("like it")
    return request


def test_blocks_are_told_by_vllms_own_names_once_their_chunk_is_there_and_once_it_is_gone(
    make: Make,
) -> None:
    engine = telling(make, "a")
    run(engine, "a")
    found = events(engine, CHUNKS)
    request = prompt_of(engine)
    assert all(isinstance(event, BlockStored) for event in found)
    names = [maybe_convert_block_hash(name) for name in request.block_hashes]
    assert [name for event in found for name in event.block_hashes] == names[:BLOCKS]
    parents = [None, *(names[n * CHUNK_TOKENS // PAGE - 1] for n in range(1, CHUNKS))]
    assert [event.parent_block_hash for event in found] == parents
    tokens = [token for event in found for token in event.token_ids]
    assert tokens == list(request.prompt_token_ids or ())[: CHUNKS * CHUNK_TOKENS]
    assert {event.medium for event in found} == {"CPU"}
    store = engine.store
    assert {event.ownership for event in found} == {f"pd_connector {store.id}"}
    store.remove(keys_of(engine)[-1:])
    (gone,) = events(engine, 1)
    assert isinstance(gone, BlockRemoved)
    assert gone.medium == "CPU"
    assert gone.block_hashes == found[-1].block_hashes


def test_what_another_engine_has_saved_is_told_by_the_one_that_serves_it(make: Make) -> None:
    writer = make("writer")
    run(writer, "a")
    keys_of(writer)
    reader = telling(make, "reader")
    run(reader, "b")
    assert len(events(reader, CHUNKS)) == CHUNKS
    assert list(writer.scheduler.connector.take_events()) == [], "vLLM publishes none there"


def test_a_chunk_that_comes_while_later_ones_are_looked_for_is_told_before_them(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = telling(make, "a")
    run(engine, "a")
    events(engine, CHUNKS)
    told = engine.side.pool.events
    told.close()
    keys, chunks, late = list(told._advertised), engine.store.chunks, [True]

    def finds(asked: Sequence[bytes]) -> Any:
        if list(asked) == keys[:1] and late:
            late.clear()
            return iter(())
        return chunks(asked)

    monkeypatch.setattr(engine.store, "chunks", finds)
    for key in keys:
        told._queries.put(key)
    told._look()
    assert [told._places.get() for _ in keys] == [(key, MEMORY) for key in keys]


def test_a_chunk_that_only_a_far_store_has_is_not_told_as_this_hosts(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = telling(make, "a")
    run(engine, "a")
    events(engine, CHUNKS)
    told = engine.side.pool.events
    told.close()
    far = b"f" * 32
    monkeypatch.setattr(engine.store, "find", lambda keys: [Found(FAR, (), 9) for _ in keys])
    told._queries.put(far)
    told._look()
    assert told._places.get() == (far, "")


def test_a_chunk_is_told_that_was_looked_for_just_before_it_could_be_found(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the journal, and its entry is not made yet."""
    engine, enter = telling(make, "a"), Folder.enter
    told = engine.side.pool.events
    told.close()

    def enters(*arguments: Any) -> None:
        told._look()
        enter(*arguments)

    monkeypatch.setattr(Folder, "enter", enters)
    run(engine, "a")
    assert [type(one) for one in events(engine, CHUNKS)] == [BlockStored] * CHUNKS


def test_a_chunk_that_moves_to_the_disk_is_told_as_gone_and_as_stored(make: Make) -> None:
    engine = telling(make, "a")
    run(engine, "a")
    (first, *_) = events(engine, CHUNKS)
    told = engine.side.pool.events
    key = next(iter(told._advertised))
    told._places.put((key, DISK))
    gone, stored = told.take()
    assert (gone.medium, stored.medium) == ("CPU", "STORAGE")
    assert stored.block_hashes == gone.block_hashes == first.block_hashes
    told._places.put((key, DISK))
    assert list(told.take()) == [], "told once"
    told._places.put((key, MEMORY))
    assert [event.medium for event in told.take()] == ["STORAGE", "CPU"]


def test_what_an_engine_no_longer_follows_is_told_as_gone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = telling(make, "a")
    run(engine, "a")
    found = events(engine, CHUNKS)
    monkeypatch.setattr(pool_events, "_MOST_CHUNKS", CHUNKS)
    engine.add("other", CHUNK_TOKENS + 30, 2, seed=5)
    gone, *_ = events(engine, 1)
    assert isinstance(gone, BlockRemoved)
    assert gone.block_hashes == found[0].block_hashes


def test_a_cache_with_windows_tells_nothing(make: Make) -> None:
    engine = make("a", specs=(window(64),))
    engine.side.pool.publish_events()
    assert engine.side.pool.events is None


def test_our_router_takes_no_block_of_a_pool_for_one_of_the_engines_cache(make: Make) -> None:
    engine = telling(make, "a")
    run(engine, "a")
    found = events(engine, CHUNKS)
    request = prompt_of(engine)
    asked = PromptKeys((), token_bytes(list(request.prompt_token_ids or ())), prompt_extras("", ""))

    class Engine:
        name, block_tokens = "a", PAGE

    def cached(prefixes: Prefixes) -> int:
        (blocks,) = prefixes.match(asked, (Engine(),), BLOCKS, 0.0)
        return int(blocks)

    def told(prefixes: Prefixes, *some: Any) -> None:
        raw = msgspec.msgpack.encode(KVEventBatch(0.0, list(some)))
        prefixes.apply_events("a", decode(raw))

    prefixes = Prefixes()
    told(prefixes, *found)
    assert cached(prefixes) == 0
    for event in found:
        event.medium = "GPU"
    told(prefixes, *found)
    assert cached(prefixes) == BLOCKS, "the same blocks in the engine's cache count"
    gone = BlockRemoved(found[-1].block_hashes, "CPU", found[-1].group_idx)
    told(prefixes, gone)
    assert cached(prefixes) == BLOCKS, "they have left the pool, not the engine's cache"
