# SPDX-License-Identifier: Apache-2.0
"""A file is closed once, also if two threads end it at once: its number may be another file's by then."""

import os
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
