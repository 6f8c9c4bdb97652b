# SPDX-License-Identifier: Apache-2.0
"""Engines that compute, with one pool."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_connector.agent import pool_saves
from pd_connector.pool import host
from pd_connector.pool.jobs import Fill, Save
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.vllm.pool import lookups as pool_looks
from support.pool_stores import wait_for_books
from support.vllm_computing import ComputingEngine, answered, until_over

Make = Callable[..., ComputingEngine]
CHUNKS = 4


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes engines with a pool that they share. No engine has computed anything wrong at the end."""
    folder = Path(tempfile.mkdtemp(prefix="pd-test-", dir="/dev/shm"))
    monkeypatch.setenv("PD_CONNECTOR_SHM", str(folder))
    monkeypatch.setattr(host, "_stores", {})
    monkeypatch.setattr(pool_looks, "LOOK_S", 60.0)  # on a busy machine, too
    monkeypatch.setattr(pool_looks, "_SLOW_S", 60.0)
    monkeypatch.setattr(pool_saves, "_WAITS_S", 60.0)
    wait_for_books(monkeypatch)
    made: list[ComputingEngine] = []

    def engine(
        name: str, kind: type[ComputingEngine] = ComputingEngine, **more: Any
    ) -> ComputingEngine:
        more.setdefault("pool", {"memory": "64MiB"})
        made.append(kind(name, budget=256, **more))
        return made[-1]

    yield engine
    assert [wrong for one in made for wrong in one.wrong] == []
    for one in made:
        one.close()
    for store in host._stores.values():
        store.close()
    shutil.rmtree(folder)


def run(of: ComputingEngine, name: str) -> list[Fill]:
    """A prompt of whole chunks and a few tokens is answered; returns the loads for it."""
    until_over([of], lambda: bool(of.side.pool.model))
    request = of.add(name, CHUNKS * CHUNK_TOKENS + 30, max_tokens=4)
    until_over([of], lambda: name in of.ended)
    assert list(request.output_token_ids) == answered(request)
    return [one for one in of.commands if isinstance(one, Fill) and one.request == name]


def saved(of: ComputingEngine) -> set[bytes]:
    """Keys of the chunks that the engine has been told to save."""
    return {one.chunk.key for one in of.commands if isinstance(one, Save)}


def until_saved(of: ComputingEngine) -> None:
    """Step until the chunks that the engine saves are in the store; it keeps their pages only until they are copied."""
    until_over(
        [of], lambda: not of.side.saving and {one.key for one in of.store.chunks()} >= saved(of)
    )


def keys_of(of: ComputingEngine) -> list[bytes]:
    """Keys of the prompt's chunks, once all are there."""
    store = of.store

    def there() -> bool:
        return sum(1 for _ in store.chunks()) >= CHUNKS

    until_over([of], there)
    by_parent = {chunk.parent: chunk.key for chunk in store.chunks()}
    (parent,) = set(by_parent) - set(by_parent.values())
    keys = []
    while parent in by_parent:
        keys.append(parent := by_parent[parent])
    return keys
