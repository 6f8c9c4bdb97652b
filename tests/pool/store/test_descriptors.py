# SPDX-License-Identifier: Apache-2.0
"""Descriptors that threads share. A file is closed once, also if two threads end it at once: its number may be another file's by
then. A folder's list is whole, also while another thread lists it."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from chunks import begin, chain, save
from support.pool_stores import patient, store

from pd_connector.pool.store import parts
from pd_connector.pool.store.base import Refusal
from pd_connector.pool.store.local import LocalStore

__all__ = ["patient", "store"]


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_file_that_another_thread_ends_at_the_same_time_is_closed_once(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    (key,) = chain("a", 1)
    opened: Any
    if what == "read":
        assert save(store, [key]) == 1
        opened = store.read(key, "r0")
        end = opened.close
    else:
        opened = begin(store, key)
        assert not isinstance(opened, Refusal)
        end = opened.cancel
    closed, close = list[int](), os.close

    def closes(descriptor: int) -> None:
        closed.append(descriptor)
        if len(closed) == 1:
            end()  # the other thread
        close(descriptor)

    monkeypatch.setattr(parts.os, "close", closes)
    end()
    monkeypatch.undo()
    assert len(closed) == len(set(closed))


def test_threads_that_list_a_folder_at_the_same_time_find_every_name(store: LocalStore) -> None:
    """A list is read from the descriptor's position, which all threads share. A process that missed its own name did not find what
    it advertised; reconciled with half a list, the catalog would lose chunks."""
    save(store, chain("a", 3))
    storage = store._tier_storage
    memory = storage.folders[0]
    lists: tuple[Callable[[], int], ...] = (
        lambda: len(storage.alive.names()),
        lambda: len(memory.entered()),
        lambda: sum(1 for _ in memory.names(memory.index, memory.data)),
    )
    with ThreadPoolExecutor(4) as threads:
        for count in lists:
            whole = count()
            assert whole
            assert set(threads.map(lambda _, count=count: count(), range(4000))) == {whole}
