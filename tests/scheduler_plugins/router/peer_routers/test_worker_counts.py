# SPDX-License-Identifier: Apache-2.0
"""What processes share: counts of in-flight work, the index's tables, and metrics."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scheduler_plugins.router.index.table import HashTable
from scheduler_plugins.router.peer_routers.counts import SharedCounts, words_for
from scheduler_plugins.router.peer_routers.memory import SharedWords, attach
from scheduler_plugins.router.workers.merging import added, counters_only, families_of, merged
from scheduler_plugins.router.workers.messages import Engines
from scheduler_plugins.router.workers.tables import SharedPrefixes, SharedTable, TableMemory

from pd_connector.pool.keys import chain
from scheduler_plugins.router.engines.counted_load import EngineLoad
from scheduler_plugins.router.index.blocks import BlockIndex
from scheduler_plugins.router.index.hashes import token_bytes
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.prompt_keys import PromptKeys
from scheduler_plugins.router.index.stored import InStore, StorePlace
from scheduler_plugins.router.metrics import Metrics


def two_loads(slot: int = 3) -> tuple[EngineLoad, EngineLoad, SharedCounts]:
    """One engine, as two workers and their keeper count it."""
    memory = SharedWords(words_for(2))
    loads = []
    for row in (1, 2):
        counts = SharedCounts(attach(memory.ref, write=True), row).engine(slot)
        assert counts is not None
        loads.append(EngineLoad())
        loads[-1].others = counts
    return loads[0], loads[1], SharedCounts(memory.map, None)


def test_what_one_worker_sends_the_other_sees_at_once() -> None:
    one, other, _ = two_loads()
    one.prefill_sent("a", 100, 2.0, 10.0)
    one.decode_sent("a", 300, 1000)
    one.opened(1)
    assert (other.prefills, other.queued_tokens, other.batch, other.context) == (1, 100, 1, 300)
    assert (other.heavy, other.open_requests, other.open_exchanges) == (1, 2, 1)
    assert other.queued_s(10.5) == pytest.approx(1.5)
    other.prefill_sent("b", 50, 1.0, 11.0)
    assert one.queued_s(11.0) == other.queued_s(11.0) == pytest.approx(2.0), "one queue, not two"
    one.prefill_ended("a", 12.0)
    one.decode_ended("a")
    one.opened(-1)
    assert one.queued_s(12.5) == other.queued_s(12.5) == pytest.approx(0.5)
    other.prefill_ended("b", 13.0)
    assert (one.open_requests, other.open_requests, one.open_exchanges) == (0, 0, 0)


def test_two_workers_that_count_alone_see_half_of_the_work() -> None:
    one, other = EngineLoad(), EngineLoad()
    one.prefill_sent("a", 100, 2.0, 10.0)
    assert other.queued_s(10.0) == 0.0


def test_counts_of_a_worker_that_died_are_gone() -> None:
    one, other, keeper = two_loads()
    one.prefill_sent("a", 100, 2.0, 10.0)
    keeper.clear_row(1)
    assert (other.prefills, other.queued_s(10.0)) == (0, 0.0)


def test_an_engines_own_word_counts_for_all_workers_together() -> None:
    one, other, keeper = two_loads()
    for load, name in ((one, "a"), (other, "b")):
        load.decode_sent(name, 100, 10)
    watching = EngineLoad()
    counts = keeper.engine(3)
    assert counts is not None
    watching.others = counts
    watching.told(0.0, 3, 350, 20.0)
    assert watching.correction.batch == 1, "one sequence is another client's"
    one.correction = watching.correction
    assert (one.batch, one.context) == (3, 350)


def test_a_worker_reads_the_table_that_the_keeper_fills_and_lets_grow() -> None:
    memory, shared = TableMemory(), SharedTable()
    index, random = BlockIndex(memory), np.random.default_rng(0)
    for name in ("a", "b"):
        index.add(name)
    for _ in range(6):
        prompt = random.integers(1, 2**63, 300).astype(np.uint64)
        shared.use(memory.state(index))
        before = memory.state(index).memory
        index.store("a", prompt[:200])
        index.store("b", prompt[:7])
        if memory.state(index).memory == before:
            assert shared.reader.match(prompt, ["b", "a", "new"]) == [7, 200, 0], "no message"
        shared.use(memory.state(index))
        assert shared.reader.match(prompt, ["b", "a", "new"]) == [7, 200, 0]


def test_a_worker_keeps_the_old_table_while_it_cannot_have_the_new_one() -> None:
    memory, shared = TableMemory(), SharedTable()
    index = BlockIndex(memory)
    index.add("a")
    prompt = np.arange(1, 40, dtype=np.uint64)
    index.store("a", prompt)
    shared.use(memory.state(index))
    late = memory.state(index)
    HashTable(memory=memory)  # the memory that `late` names is closed
    another = SharedTable()
    another.use(late)
    assert another.reader.match(prompt, ["a"]) == [0]
    shared.use(late)
    assert shared.reader.match(prompt, ["a"]) == [39]


def test_a_worker_knows_the_chunks_of_the_pools_that_the_keeper_follows() -> None:
    held, recent = TableMemory(), TableMemory()
    index, worker = Prefixes(held, recent), SharedPrefixes()
    tokens, place = list(range(1000)), StorePlace("a" * 32, "6d" * 32, 128)
    keys = [key.hex() for key in chain(bytes.fromhex(place.model), tokens)]
    index.store_told(place.store, [(key, "memory") for key in keys[:5]], whole=True)
    tables = index.tables
    worker.use(Engines((), held.state(tables[0]), recent.state(tables[1]), {}))
    prompt = PromptKeys((), token_bytes(tokens), (), "")
    assert worker.reader.in_store(prompt, place) == InStore(5, 5)


def sampled(text: bytes, name: str) -> float:
    families = text_string_to_metric_families(text.decode())
    return sum(s.value for family in families for s in family.samples if s.name == name)


def test_metrics_of_all_are_one_sum_and_counters_do_not_fall_when_a_worker_dies() -> None:
    workers = [Metrics(), Metrics()]
    for n, known in enumerate(workers, 1):
        known.requests.labels("/v1/completions", "ok").inc(n)
        known.first_token_s.labels("disaggregated").observe(0.1)
        known.engine_up.labels("http://e", "decode").set(1)
        known.in_flight.set(n)
    keeper = Metrics()
    keeper.engine_up.labels("http://e", "decode").set(1)
    parts = [families_of(known.registry) for known in (*workers, keeper)]
    text = merged(parts)
    assert sampled(text, "pd_router:requests_total") == 3
    assert sampled(text, "pd_router:requests_in_flight") == 3
    assert sampled(text, "pd_router:time_to_first_token_seconds_count") == 2
    assert sampled(text, "pd_router:engine_up") == 1, "the keeper knows it"
    gone = added((), counters_only(parts[0]))
    text = merged([gone, *parts[1:]])
    assert sampled(text, "pd_router:requests_total") == 3
    assert sampled(text, "pd_router:requests_in_flight") == 2
