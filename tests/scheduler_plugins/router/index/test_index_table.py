# SPDX-License-Identifier: Apache-2.0
"""The hash table and the index against plain dictionaries and sets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler_plugins.router.index import table as growing
from scheduler_plugins.router.index.blocks import BlockIndex
from scheduler_plugins.router.index.hashes import Hashes
from scheduler_plugins.router.index.table import HashTable

KEYS = st.integers(1, 40)
HUGE = st.integers(1, 2**64 - 1)


def keys_of(values: list[int]) -> Hashes:
    return np.array(values, np.uint64)


@pytest.fixture(params=["whole", "pieces"], scope="module")
def copied(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small tables are copied as a whole, or piece by piece as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pieces":
            patch.setattr(growing, "_SMALL", 0)
            patch.setattr(growing, "_PIECE", 8)
        yield


shared = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.usefixtures("copied")
@shared
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "zero"]),
            st.lists(KEYS | HUGE.filter(lambda key: key > 1_000_000), max_size=30),
        ),
        max_size=40,
    )
)
def test_a_table_is_a_dictionary(operations: list[tuple[str, list[int]]]) -> None:
    table, model = HashTable(), dict[int, int]()
    for value, (what, keys) in enumerate(operations, 1):
        if what == "put":
            if value % 2:  # so that the table grows; and so that few keys are put, too
                keys = keys + [key + 1000 * value for key in range(1, 20)]
            table.put(keys_of(keys), value)
            model.update(dict.fromkeys(keys, value))
        else:
            slots = table.find(keys_of(keys))
            table.clear(slots[slots >= 0])
            for key in keys:
                model.pop(key, None)
        wanted = sorted({*model, *keys, 7})
        slots = table.find(keys_of(wanted))
        found = [int(table.rows[slot, 0]) if slot >= 0 else 0 for slot in slots]
        assert found == [model.get(key, 0) for key in wanted]


class PlainIndex:
    """What `BlockIndex` should do, in the simplest way."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {}

    def match(self, hashes: list[int], engine: str) -> int:
        count = 0
        while count < len(hashes) and hashes[count] in self.held.get(engine, ()):
            count += 1
        return count


ENGINES = [f"engine{n}" for n in range(70)]  # more than fit into one word
OPERATION = st.tuples(
    st.sampled_from(["store", "store", "store", "remove", "clear", "drop"]),
    st.sampled_from(ENGINES[:3] + ENGINES[-3:]),
    st.lists(KEYS, max_size=30),
)


@pytest.mark.usefixtures("copied")
@shared
@given(st.lists(OPERATION, max_size=30), st.lists(KEYS, max_size=40), st.integers(0, 200))
def test_an_index_is_a_set_for_each_engine(
    operations: list[tuple[str, str, list[int]]], prompt: list[int], longer: int
) -> None:
    index, model = BlockIndex(), PlainIndex()
    for engine in ENGINES:
        index.add(engine)
        model.held[engine] = set()
    prompt = prompt + list(range(1, longer))  # long prompts are looked up in parts
    for what, engine, blocks in operations:
        index.add(engine)
        held = model.held.setdefault(engine, set())
        if what == "store":
            index.store(engine, keys_of(blocks))
            held |= {*blocks}
        elif what == "remove":
            index.remove(engine, keys_of(blocks))
            held -= {*blocks}
        elif what == "clear":
            index.clear(engine)
            held.clear()
        else:
            index.drop(engine)
            del model.held[engine]
        found = index.match(keys_of(prompt), ENGINES)
        assert found == [model.match(prompt, e) for e in ENGINES]
        assert all(index.blocks(e) == len(model.held[e]) for e in model.held)


def test_an_engine_that_takes_the_place_of_another_inherits_nothing() -> None:
    index = BlockIndex()
    index.add("old")
    index.store("old", keys_of([1, 2]))
    index.drop("old")
    index.add("new")
    assert index.match(keys_of([1, 2]), ["new", "old"]) == [0, 0]


@settings(deadline=None)
@given(
    st.integers(256, 3000),
    st.dictionaries(st.sampled_from(ENGINES), st.floats(0, 1)),
    st.lists(st.integers(0, 2999), max_size=5),
)
def test_a_long_prompt_is_matched_by_a_few_looks(
    length: int, shares: dict[str, float], holes: list[int]
) -> None:
    """Exact for what a cache that evicts ends first can hold; never too small for any other."""
    index, model = BlockIndex(), PlainIndex()
    prompt = [*range(1, length + 1)]
    for engine, share in shares.items():
        index.add(engine)
        model.held[engine] = {*prompt[: round(share * length)]}
        index.store(engine, keys_of(prompt[: round(share * length)]))
    found = index.match(keys_of(prompt), ENGINES)
    assert found == [model.match(prompt, e) for e in ENGINES]
    evicted = [prompt[hole] for hole in holes if hole < length]
    for engine in shares:
        index.remove(engine, keys_of(evicted))
        model.held[engine] -= {*evicted}
    for engine, blocks in zip(ENGINES, index.match(keys_of(prompt), ENGINES), strict=True):
        assert blocks >= model.match(prompt, engine)
        assert blocks == length or prompt[blocks] not in model.held.get(engine, ())


def test_a_prompt_longer_than_any_look_is_matched_whole() -> None:
    index = BlockIndex()
    for engine in ("all", "most", "none"):
        index.add(engine)
    prompt = keys_of([*range(1, 5001)])
    index.store("all", prompt)
    index.store("most", prompt[:4321])
    assert index.match(prompt, ["none", "most", "all", "unknown"]) == [0, 4321, 5000, 0]


def test_blocks_that_come_and_go_for_ever_take_no_more_room() -> None:
    index = BlockIndex()
    index.add("engine")
    sizes = []
    for turn in range(200):
        fresh = keys_of([*range(turn * 500 + 1, turn * 500 + 501)])
        index.store("engine", fresh)
        index.remove("engine", fresh - np.uint64(500) if turn else fresh[:0])
        sizes.append(index.nbytes)
    assert index.blocks("engine") == 500
    assert sizes[-1] <= 2 * max(sizes[:10])
    assert index.nbytes < 100 * 1500


def test_a_large_table_grows_piece_by_piece_while_it_is_written_and_read() -> None:
    """No call copies more than a few slots for each key it brings, and nothing is lost or comes back."""
    table, random = growing.HashTable(), np.random.default_rng(1)
    keys = random.integers(1, 2**63, 120_000).astype(np.uint64)
    model = np.zeros(len(keys), np.uint64)
    steps, sizes = [], set[int]()
    for turn, first in enumerate(range(0, len(keys), 300), 1):
        part = slice(first, first + 300)
        sizes.add(table.capacity)
        before = table._copied if table.grows else 0
        table.put(keys[part], turn)
        model[part] = turn
        if table.grows and table.capacity > growing._SMALL:
            steps.append(table._copied - before)
        some = random.integers(0, part.stop, 40)
        gone = some[:10]
        slots = table.find(keys[gone])
        table.clear(slots[slots >= 0])  # one that was cleared before may be gone altogether
        model[gone] = 0
        again = some[10:]
        table.put(keys[again], turn + 1000)
        model[again] = turn + 1000
    slots = table.find(keys)
    found = np.where(slots >= 0, table.rows[slots, 0], 0)
    assert (found == model).all()
    assert len(sizes) > 8
    assert len(steps) > 20
    assert max(steps) <= growing._COPIED * 330 + growing._PIECE


def test_a_table_of_which_hardly_anything_is_left_grows_to_one_with_room_for_what_comes() -> None:
    """What comes while it is copied has room in the new one, which is small."""
    table, first = growing.HashTable(), 1

    def put(count: int) -> Hashes:
        nonlocal first
        keys = np.arange(first, first + count).astype(np.uint64)
        first += count
        table.put(keys, 2)
        return keys

    put(100_000)
    while table.grows or table.used < 0.59 * table.capacity:
        put(100)
    large = table.capacity
    table.clear(table.find(np.arange(1, first).astype(np.uint64)))
    kept = [put(round(0.02 * large))]
    assert table.grows
    while table.grows:
        kept.append(put(300))
    assert table.capacity < large
    found = table.find(np.concatenate(kept))
    assert (found >= 0).all()
    assert (table.rows[found, 0] == 2).all()


def test_what_is_written_to_a_copied_row_reaches_the_larger_table_only_if_it_is_told() -> None:
    """The negative control: `changed` is what keeps the two tables alike."""

    def lost(tell: bool) -> bool:
        table = growing.HashTable()
        keys = np.arange(1, 60_001).astype(np.uint64)
        first = 0
        while not (table.grows and table._copied > 0.9 * table.capacity):
            table.put(keys[first : first + 100], 1)
            first += 100
        slots = table.find(keys[:first])
        table.rows[slots, 0] = 2
        if tell:
            table.changed(slots)
        table.finish()
        return not (table.rows[table.find(keys[:first]), 0] == 2).all()

    assert lost(tell=False)
    assert not lost(tell=True)


def test_numbers_of_cleared_engines_are_used_again_and_mean_nothing_of_before() -> None:
    index = BlockIndex()
    for n in range(60):
        index.add(f"engine{n}")
    prompt = keys_of([*range(1, 400)])
    for _ in range(300):
        index.store("engine0", prompt)
        assert index.match(prompt, ["engine0", "engine1"]) == [len(prompt), 0]
        index.clear("engine0")
        assert index.match(prompt, ["engine0", "engine1"]) == [0, 0]
        assert index.blocks("engine0") == 0
    assert index.table.words == 1, "60 engines, and 4 numbers that are cleared in turn"
