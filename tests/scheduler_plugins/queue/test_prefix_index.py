# SPDX-License-Identifier: Apache-2.0
"""How much of each prompt is cached is what walking every prompt from its start would find."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_plugins.order.request import Waiting
from scheduler_plugins.queue.class_queue import QueueEntry
from scheduler_plugins.queue.prefix_index import PrefixIndex

Path = tuple[int, ...]
# Long stretches in common, then a fork: what users who share a document look like.
paths = st.tuples(st.integers(0, 12), st.integers(0, 1), st.integers(0, 8)).map(
    lambda shape: (7,) * shape[0] + (shape[1],) * shape[2]
)


def chained(path: Path) -> list[Path]:
    return [path[: n + 1] for n in range(len(path))]


def place(path: Path) -> QueueEntry:
    request = Waiting(id="", tokens=len(path) + 1, block_hashes=chained(path), arrival_s=0.0)
    made = QueueEntry(request, 1)
    made.key_node = 1
    return made


def walked(path: Path, cached: set[Path]) -> int:
    return next((n for n, block in enumerate(chained(path)) if block not in cached), len(path))


@settings(deadline=None, max_examples=200)
@given(
    waiting=st.lists(paths, min_size=1, max_size=8),
    changes=st.lists(st.tuples(st.booleans(), paths), max_size=12),
)
def test_what_gained_is_stale_and_is_looked_up_right(
    waiting: list[Path], changes: list[tuple[bool, Path]]
) -> None:
    cached: set[Path] = set()
    prefixes, places = PrefixIndex(cached), [place(path) for path in waiting]
    for one in places:
        prefixes.look_up(one)
    for store, path in changes:
        before = [one.cached for one in places]
        if store:
            cached.update(chained(path))
            prefixes.added(chained(path))
        else:
            cached.discard(path)
            prefixes.removed()
        stale = list(prefixes.drain(100))
        for one, known, content in zip(places, before, waiting, strict=True):
            if walked(content, cached) > known:
                assert one in stale
        for one in stale:
            prefixes.look_up(one)
        for one, content in zip(places, waiting, strict=True):
            true = walked(content, cached)
            assert prefixes.count(chained(content), len(content)) == true
            assert one.cached >= true, "what is remembered may be too much, never too little"
            if one in stale:
                assert one.cached == true


def test_many_blocks_in_a_row_cost_a_waiter_one_look() -> None:
    cached: set[Path] = set()
    prefixes, waiter = PrefixIndex(cached), place((7,) * 100)
    prefixes.look_up(waiter)
    for block in chained((7,) * 100):
        cached.add(block)
        prefixes.added([block])
    assert list(prefixes.drain(1000)) == [waiter]


def test_who_left_is_not_looked_up() -> None:
    prefixes, waiter = PrefixIndex(set()), place((7,))
    prefixes.look_up(waiter)
    prefixes.added([(7,)])
    waiter.key_node = 0
    assert list(prefixes.drain(10)) == []
