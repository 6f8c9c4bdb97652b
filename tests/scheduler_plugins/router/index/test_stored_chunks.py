# SPDX-License-Identifier: Apache-2.0
"""The index of chunks in the stores of hosts."""

from __future__ import annotations

import pytest

from pd_connector.pool.keys import chain
from scheduler_plugins.router.index import stored
from scheduler_plugins.router.index.hashes import token_bytes
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.prompt_keys import PromptKeys
from scheduler_plugins.router.index.stored import InStore, StorePlace

MODEL = b"m" * 32
TOKENS = [place % 251 for place in range(1000)]
KEYS = [key.hex() for key in chain(MODEL, TOKENS)]
HOST, OTHER = (StorePlace(name * 32, MODEL.hex(), 128) for name in "ab")


def prompt(salt: str | None = "", tokens: list[int] = TOKENS) -> PromptKeys:
    return PromptKeys((), token_bytes(tokens), (), salt)


def having(*changes: tuple[str, str]) -> Prefixes:
    index = Prefixes()
    index.apply_journal(HOST.store, changes, whole=True)
    return index


def test_leading_chunks_are_counted_with_those_in_memory_apart() -> None:
    index = having(*((key, "memory") for key in KEYS[:3]), *((key, "disk") for key in KEYS[3:5]))
    assert index.in_store(prompt(), HOST) == InStore(5, 3)
    assert index.in_store(prompt(), OTHER) == InStore(0, 0)
    index.apply_journal(HOST.store, [(KEYS[1], "disk"), (KEYS[4], "")], whole=False)
    assert index.in_store(prompt(), HOST) == InStore(4, 1)
    index.apply_journal(HOST.store, [(KEYS[0], "")], whole=False)
    assert index.in_store(prompt(), HOST) == InStore(0, 0)


def test_of_several_changes_of_one_chunk_the_last_counts() -> None:
    index = having((KEYS[0], "memory"), (KEYS[0], ""), (KEYS[1], "memory"), (KEYS[0], "disk"))
    assert index.in_store(prompt(), HOST) == InStore(2, 0)


def test_a_prompt_without_tokens_or_of_an_adapter_is_in_no_store() -> None:
    index = having(*((key, "memory") for key in KEYS))
    assert index.in_store(PromptKeys((), None, (), ""), HOST) == InStore(0, 0)
    assert index.in_store(prompt(None), HOST) == InStore(0, 0)
    assert index.in_store(prompt("salt"), HOST) == InStore(0, 0)
    assert index.in_store(prompt(), StorePlace(HOST.store, MODEL.hex(), 64)) == InStore(0, 0)
    assert index.in_store(prompt(tokens=[2**32 - 1] * 200), HOST) == InStore(0, 0)


def test_no_more_chunks_are_noted_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MOST_CHUNKS", 100)
    index = having(*((f"{n:064x}"[::-1], "memory") for n in range(1, 500)))
    for page in range(20):
        changes = [(f"{n:064x}"[::-1], "memory") for n in range(500 * page, 500 * page + 500)]
        index.apply_journal(HOST.store, changes, whole=False)
    assert index.store_chunks(HOST.store) == 100
    index.forget_store(HOST.store)
    assert index.store_chunks(HOST.store) == 0


def test_of_a_far_store_the_chunks_that_were_noted_longest_ago_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored, "MOST_CHUNKS", 160)
    far = stored.far_store("f" * 32)
    place = StorePlace(far, MODEL.hex(), 128)
    index = Prefixes()
    index.apply_journal(far, [(key, "far") for key in KEYS], whole=True)
    for page in range(20):
        new = [(f"{n:064x}"[::-1], "far") for n in range(30 * page + 1, 30 * page + 31)]
        index.apply_journal(far, [*new, (KEYS[0], "far")], whole=False)
        assert index.store_chunks(far) <= 160
    assert index.store_chunks(far) > 100
    assert index.in_store(prompt(), place) == InStore(1, 0), "told of again"
    index.apply_journal(far, [(key, "far") for key in KEYS], whole=False)
    assert index.in_store(prompt(), place) == InStore(7, 0)
    index.apply_journal(far, [(KEYS[1], "")], whole=False)
    assert index.in_store(prompt(), place) == InStore(1, 0)
    index.apply_journal(far, [(KEYS[0], "far")], whole=True)
    assert index.store_chunks(far) == 1


def test_chunks_that_prompts_have_stay_in_the_index_of_a_full_far_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored, "MOST_CHUNKS", 160)
    far = stored.far_store("f" * 32)
    place = StorePlace(far, MODEL.hex(), 128)
    for is_asked_for in (True, False):
        index = Prefixes()
        index.apply_journal(far, [(key, "far") for key in KEYS], whole=True)
        for page in range(20):
            new = [(f"{n:064x}"[::-1], "far") for n in range(30 * page + 1, 30 * page + 31)]
            index.apply_journal(far, new, whole=False)
            if is_asked_for:
                assert index.in_store(prompt(), place) == InStore(7, 0)
    assert index.in_store(prompt(), place) == InStore(0, 0), "control"


def test_the_index_does_not_grow_while_chunks_come_and_go() -> None:
    index, sizes = Prefixes(), []
    for page in range(60):
        new = [(f"{n:064x}"[::-1], "memory") for n in range(1000 * page, 1000 * page + 1000)]
        old = [(f"{n:064x}"[::-1], "") for n in range(1000 * page - 1000, 1000 * page)]
        index.apply_journal(HOST.store, new + (old if page else []), whole=False)
        sizes.append(index.nbytes)
    assert index.store_chunks(HOST.store) == 1000
    assert max(sizes[30:]) <= 2 * max(sizes[5:30])
