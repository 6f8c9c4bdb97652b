# SPDX-License-Identifier: Apache-2.0
"""The heap yields the smallest live entry, and does not grow with the dead."""

from __future__ import annotations

from operator import attrgetter
from random import Random

from scheduler_plugins.order.request import Waiting
from scheduler_plugins.queue.class_queue import LazyHeap, QueueEntry

KEY_NODE = attrgetter("key_node")


def place() -> QueueEntry:
    return QueueEntry(Waiting(id="", tokens=1, block_hashes=(), arrival_s=0.0), 16)


def test_it_agrees_with_sorting() -> None:
    random = Random(1)
    places = [place() for _ in range(30)]
    heap, keys = LazyHeap(KEY_NODE), dict[int, int]()
    for number in range(1, 2000):
        which, key = random.randrange(30), random.randrange(1000)
        keys[which] = key
        places[which].key_node = number
        heap.push((key, which, number, places[which]), len(keys))
        first = heap.first()
        assert first is not None
        assert first[:2] == min((key, which) for which, key in keys.items())
        assert sorted(entry[1] for entry in heap) == sorted(keys)
        assert [entry[:2] for entry in heap.in_order()] == sorted(
            (key, which) for which, key in keys.items()
        )


def test_dead_entries_are_dropped_even_where_they_never_surface() -> None:
    heap, moving, still = LazyHeap(KEY_NODE), place(), place()
    still.key_node = 1
    heap.push((0.0, 0, 1, still), 1)
    for number in range(2, 5000):
        moving.key_node = number
        heap.push((float(number), 1, number, moving), 2)
        assert len(heap._fresh) + len(heap._old) < 200
    assert len(list(heap)) == 2
