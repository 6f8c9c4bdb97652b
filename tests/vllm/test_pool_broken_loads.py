# SPDX-License-Identifier: Apache-2.0
"""Engines that compute, with one pool: what a chunk that is damaged, gone or late costs, or a store that is slow or silent,
and that no answer is wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.vllm_computing import ComputingEngine, answered, full, until_over, window
from support.vllm_pooled import CHUNKS, Make, keys_of, make, run
from vllm.v1.engine import FinishReason

from pd_bench.pool.faulty_store import FaultyStore
from pd_connector.agent import pool_loads
from pd_connector.errors import Cause, Miss, PoolError
from pd_connector.pool.jobs import Fill, Save
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.store.base import FAR
from pd_connector.protocol.consuming.incoming import Finished
from pd_connector.vllm.pool import lookups as pool_looks
from pd_connector.vllm.pool.fills import PoolFills

__all__ = ["make"]


@pytest.mark.parametrize("bad", range(CHUNKS))
@pytest.mark.parametrize(
    ("on_failure", "harm"),
    [("recompute", "flipped"), ("recompute", "gone"), ("recompute", "late"), ("fail", "flipped")],
)
def test_what_comes_before_a_bad_chunk_is_not_computed_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, on_failure: str, harm: str, bad: int
) -> None:
    """`on_failure` is about handoffs: no load from the pool fails a request."""
    writer = make("writer")
    run(writer, "a")
    key = keys_of(writer)[bad]
    reader = make("reader", on_failure=on_failure)
    computed: list[int] = []
    compute = reader._compute

    def computes(number: int, request: str, first: int, count: int) -> None:
        computed.append(first)
        compute(number, request, first, count)

    monkeypatch.setattr(reader, "_compute", computes)
    _harm(reader, harm, key, monkeypatch)
    (load,) = run(reader, "b")
    assert load.stop_token == CHUNKS * CHUNK_TOKENS
    assert min(computed) == bad * CHUNK_TOKENS


def _harm(reader: ComputingEngine, harm: str, key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the look-up, nothing is left of a chunk but its entry, or it does not come."""
    read = pool_loads.Loader.read

    def reads(loader: Any, chunk: Any, *args: Any) -> Any:
        if chunk.key == key:
            if harm == "late":
                time.sleep(4.0)
            elif harm == "gone":
                loader._store.remove([key])
            else:
                (path,) = Path(loader._store.status().tiers[0].path).rglob(f"data/{key.hex()}*")
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
        return read(loader, chunk, *args)

    monkeypatch.setattr(pool_loads, "_STALL_S", 2.0 if harm == "late" else 60.0)
    monkeypatch.setattr(pool_loads.Loader, "read", reads)


@pytest.mark.parametrize("specs", [(window(64),), (full(), window(64))], ids=["window", "both"])
@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_where_a_window_slides_what_comes_before_a_bad_chunk_is_loaded_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, on_failure: str, specs: Any
) -> None:
    writer = make("writer", specs=specs)
    run(writer, "a")
    key = keys_of(writer)[2]
    reader = make("reader", specs=specs, on_failure=on_failure)
    _harm(reader, "gone", key, monkeypatch)
    loads = run(reader, "b")
    assert [one.stop_token // CHUNK_TOKENS for one in loads] == [CHUNKS, 2]


@pytest.mark.parametrize("specs", [(full(),), (full(), window(64))], ids=["full", "both"])
@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_a_handoff_that_fails_beside_a_broken_load_fails_its_request_if_on_failure_says_so(
    make: Make, monkeypatch: pytest.MonkeyPatch, on_failure: str, specs: Any
) -> None:
    writer = make("writer", specs=specs)
    run(writer, "a")
    reader = make("reader", specs=specs, on_failure=on_failure)
    until_over([reader], lambda: bool(reader.side.pool.model))
    _harm(reader, "gone", keys_of(writer)[2], monkeypatch)
    held: list[set[str]] = [set(), set()]
    outcomes = reader._worker.outcomes

    def both_at_once() -> tuple[set[str], set[str], set[str]]:
        """The ends of the first two loads come with one step."""
        sent, *ended = outcomes()
        if not held:
            return sent, *ended
        held[:] = [before | now for before, now in zip(held, ended, strict=True)]
        if len(held[0]) < 2:
            return sent, set(), set()
        received, failed = held
        held.clear()
        return sent, received, failed

    monkeypatch.setattr(reader._worker, "outcomes", both_at_once)
    loaded = reader.add("loaded", CHUNKS * CHUNK_TOKENS + 30, max_tokens=4)
    reader.fetch("fetched", 200, 4, seed=7, remote_port=1)
    until_over([reader], lambda: "loaded" in reader.ended and "fetched" in reader.ended)
    assert list(loaded.output_token_ids) == answered(loaded)
    failed = reader.ended["fetched"] is FinishReason.ERROR
    assert failed == (on_failure == "fail")


@pytest.mark.parametrize(
    ("page", "first", "stop", "invalid"),
    [
        (16, 0, 256, {26, 27, 28}),
        (256, 0, 384, {11}),
        (16, 256, 384, {34, 35}),
        (16, 256, 256, None),
    ],
)
def test_vllm_is_told_of_the_pages_that_are_not_filled_as_a_whole(
    page: int, first: int, stop: int, invalid: set[int] | None
) -> None:
    """`invalid` is None if no page is filled."""
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=full(page))])
    fills, last = PoolFills(cache), 512 if page == 256 else stop + (48 if first == 0 else 32)
    table = [-1] * (first // page) + list(range(10 + first // page, 10 + -(-last // page)))
    fills.begin(Fill("a", b"", (), first, last, (table,)))
    kept = fills.ended(Finished("a", Cause.POOL, "why", stop_token=stop))
    assert kept == (invalid is not None)
    assert fills.take_invalid_pages() == (invalid or set())
    assert fills.take_invalid_pages() == set(), "told once"


@pytest.mark.parametrize(
    ("role", "codec", "saves"),
    [
        ("kv_both", "fp8_e4m3", False),
        ("kv_producer", "fp8_e4m3", True),  # it computes what it saves
        ("kv_both", "int8", True),
    ],
)
def test_an_engine_that_takes_kv_in_fp8_only_reads(
    make: Make, role: str, codec: str, saves: bool
) -> None:
    engine = make("engine", role=role, codec=codec)
    run(engine, "a")
    assert any(isinstance(one, Save) for one in engine.commands) == saves


Fault = Callable[[FaultyStore, threading.Event], None]
LEARNT_FROM = 4


def slow(store: FaultyStore, _: threading.Event) -> None:
    store.bytes_per_s = 8e3  # this engine's chunks have 8 KiB, and take it next to no time


def late(store: FaultyStore, _: threading.Event) -> None:
    store.call_s = 0.5


def silent(store: FaultyStore, answers: threading.Event) -> None:
    store.silent = answers


def unreachable(store: FaultyStore, _: threading.Event) -> None:
    """A far store that knows its chunks, and does not hand them out: the node that has them stands still."""

    def bring(_: bytes) -> None:
        raise PoolError(Miss.LATE, "the far store does not answer")

    find = store.find
    store.find = lambda keys: [hit and hit._replace(tier=FAR) for hit in find(keys)]
    store.bring, store.brings_at_once = bring, lambda _: False


@pytest.mark.parametrize("fault", [slow, late, silent, unreachable])
def test_from_the_fifth_request_on_nobody_waits_for_the_store(
    make: Make, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    for name, seconds in (("LOOK_S", 0.1), ("_SLOW_S", 0.25)):
        monkeypatch.setattr(pool_looks, name, seconds)
    monkeypatch.setattr(pool_loads, "_STALL_S", 60.0 if fault is slow else 1.0)
    writer = make("writer")
    reader = make("reader")
    for one in (writer, reader):
        until_over([one], lambda one=one: bool(one.side.pool.model))
    seeds = range(1, 9)
    for seed in seeds:
        writer.add(f"w{seed}", CHUNKS * CHUNK_TOKENS + 30, 2, seed)
        until_over([writer], lambda seed=seed: f"w{seed}" in writer.ended)
    until_over([writer], lambda: chunks(writer) == CHUNKS * len(seeds))
    answers = threading.Event()
    store: Any = FaultyStore(reader.store)
    fault(store, answers)
    reader.side.pool._looks._store = store
    reader.agent._loop.pool_side._loads._loader._store = store
    try:
        for number, seed in enumerate(seeds):
            name, before = f"r{seed}", len(reader.commands)
            request = reader.add(name, CHUNKS * CHUNK_TOKENS + 30, 2, seed)
            reader.step()
            if number >= LEARNT_FROM and fault not in (
                slow,
                unreachable,
            ):  # their look-ups are fast
                assert request.num_computed_tokens > 0, f"request {number} waits"
            until_over([reader], lambda name=name: name in reader.ended)
            assert list(request.output_token_ids) == answered(request)
            loads = [one for one in reader.commands[before:] if isinstance(one, Fill)]
            assert number < LEARNT_FROM or not loads
    finally:
        answers.set()


def chunks(of: Any) -> int:
    return int(of.store.status().tiers[0].chunks)
