# SPDX-License-Identifier: Apache-2.0
"""The index of blocks against plain sets."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_plugins.router.index.blocks import BlockIndex

KEYS = st.integers(1, 40)


class PlainIndex:
    """What `BlockIndex` should do, in the simplest way."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {}

    def match(self, hashes: list[int], engine: str) -> int:
        count = 0
        while count < len(hashes) and hashes[count] in self.held.get(engine, ()):
            count += 1
        return count


ENGINES = [f"engine{n}" for n in range(70)]
OPERATION = st.tuples(
    st.sampled_from(["store", "store", "store", "remove", "clear", "drop"]),
    st.sampled_from(ENGINES[:3] + ENGINES[-3:]),
    st.lists(KEYS, max_size=30),
)


@settings(deadline=None)
@given(st.lists(OPERATION, max_size=30), st.lists(KEYS, max_size=40), st.integers(0, 20))
def test_an_index_is_a_set_for_each_engine(
    operations: list[tuple[str, str, list[int]]], prompt: list[int], longer: int
) -> None:
    index, model = BlockIndex(), PlainIndex()
    for engine in ENGINES:
        index.add(engine)
        model.held[engine] = set()
    prompt = prompt + list(range(1, longer))
    for what, engine, blocks in operations:
        index.add(engine)
        held = model.held.setdefault(engine, set())
        if what == "store":
            index.store(engine, (blocks))
            held |= {*blocks}
        elif what == "remove":
            index.remove(engine, (blocks))
            held -= {*blocks}
        elif what == "clear":
            index.clear(engine)
            held.clear()
        else:
            index.drop(engine)
            del model.held[engine]
        found = index.match((prompt), ENGINES)
        assert found == [model.match(prompt, e) for e in ENGINES]
        assert all(index.blocks(e) == len(model.held[e]) for e in model.held)


def test_an_engine_that_takes_the_place_of_another_inherits_nothing() -> None:
    index = BlockIndex()
    index.add("old")
    index.store("old", ([1, 2]))
    index.drop("old")
    index.add("new")
    assert index.match(([1, 2]), ["new", "old"]) == [0, 0]


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
        index.store(engine, (prompt[: round(share * length)]))
    found = index.match((prompt), ENGINES)
    assert found == [model.match(prompt, e) for e in ENGINES]
    evicted = [prompt[hole] for hole in holes if hole < length]
    for engine in shares:
        index.remove(engine, (evicted))
        model.held[engine] -= {*evicted}
    for engine, blocks in zip(ENGINES, index.match((prompt), ENGINES), strict=True):
        assert blocks >= model.match(prompt, engine)
        assert blocks == length or prompt[blocks] not in model.held.get(engine, ())


def test_a_prompt_longer_than_any_look_is_matched_whole() -> None:
    index = BlockIndex()
    for engine in ("all", "most", "none"):
        index.add(engine)
    prompt = [*range(1, 5001)]
    index.store("all", prompt)
    index.store("most", prompt[:4321])
    assert index.match(prompt, ["none", "most", "all", "unknown"]) == [0, 4321, 5000, 0]


def test_blocks_that_come_and_go_for_ever_take_no_more_room() -> None:
    index = BlockIndex()
    index.add("engine")
    sizes = []
    for turn in range(200):
        fresh = [*range(turn * 500 + 1, turn * 500 + 501)]
        index.store("engine", fresh)
        index.remove("engine", [one - 500 for one in fresh] if turn else [])
        sizes.append(index.nbytes)
    assert index.blocks("engine") == 500
    assert sizes[-1] <= 2 * max(sizes[:10])
    assert index.nbytes < 150 * 1500
