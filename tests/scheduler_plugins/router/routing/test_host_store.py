# SPDX-License-Identifier: Apache-2.0
"""How long an engine would load a prefix from the KV pool of a host."""

from __future__ import annotations

from math import inf

import pytest
from policy_engines import Known

from pd_connector.pool.keys import chain
from scheduler_plugins.router.index.hashes import token_bytes
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.prompt_keys import PromptKeys
from scheduler_plugins.router.index.stored import StorePlace, far_store
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.routing.view import LiveView

FAR = "f" * 32
MODEL, OTHER_MODEL = b"m" * 32, b"o" * 32
CHUNK_BYTES = 1_000_000
TOKENS = list(range(1000))
PROMPT = PromptKeys((), token_bytes(TOKENS), (), "")
A, B = Known("a"), Known("b")


def place(store: str = "a" * 32, model: bytes = MODEL, **speeds: float) -> StorePlace:
    return StorePlace(store, model.hex(), 128, CHUNK_BYTES, speeds)


def view(in_memory: int = 7, on_disk: int = 0, **places: StorePlace) -> LiveView:
    index = Prefixes()
    keys = [key.hex() for key in chain(MODEL, TOKENS)][: in_memory + on_disk]
    tiers = ["memory"] * in_memory + ["disk"] * on_disk
    index.apply_journal("a" * 32, zip(keys, tiers, strict=True), whole=True)
    return LiveView({Role.PREFILL: [A, B]}, index, 0.0, places)


def load_s(seen: LiveView, engine: Known, tokens: int = 7 * 128) -> float:
    pool = seen.pools()[0]
    seen.match(PROMPT, [pool])
    return seen.transfer_s(pool, engine, tokens)


def test_engines_of_a_host_are_as_fast_as_they_have_told_and_all_others_never_get_it() -> None:
    seen = view(a=place(memory=1e9))
    assert load_s(seen, A) == 7 * CHUNK_BYTES / 1e9
    assert load_s(seen, A, tokens=129) == 2 * CHUNK_BYTES / 1e9
    assert load_s(seen, B) == inf


def test_chunks_on_the_disk_count_by_its_speed() -> None:
    seen = view(3, 4, a=place(memory=1e9, disk=1e8))
    assert load_s(seen, A) == 3 * CHUNK_BYTES / 1e9 + 4 * CHUNK_BYTES / 1e8
    assert load_s(seen, A, tokens=2 * 128) == 2 * CHUNK_BYTES / 1e8, "the last ones"


def test_an_unknown_speed_is_that_of_another_engine_of_the_host_or_fast() -> None:
    seen = view(a=place(), b=place(memory=1e9))
    assert load_s(seen, A) == load_s(seen, B) == 7 * CHUNK_BYTES / 1e9
    assert load_s(view(a=place()), A) == 0.0


def test_each_host_is_a_source_and_each_model_in_it() -> None:
    seen = view(a=place(), b=place("b" * 32))
    assert [pool.name for pool in seen.pools()] == ["pool aaaaaaaaaaaa", "pool bbbbbbbbbbbb"]
    assert list(seen.match(PROMPT, seen.pools())) == [7, 0]
    two = view(a=place(), b=place(model=OTHER_MODEL))
    assert [pool.name for pool in two.pools()] == [
        "pool aaaaaaaaaaaa 6d6d6d6d",
        "pool aaaaaaaaaaaa 6f6f6f6f",
    ]
    assert list(two.match(PROMPT, two.pools())) == [7, 0]
    assert two.transfer_s(two.pools()[0], B, 128) == inf
    assert view().pools() == ()


def far_view(far: int, here: int = 0, **places: StorePlace) -> LiveView:
    index = Prefixes()
    keys = [key.hex() for key in chain(MODEL, TOKENS)]
    index.apply_journal(far_store(FAR), [(key, "far") for key in keys[:far]], whole=True)
    index.apply_journal("a" * 32, [(key, "memory") for key in keys[:here]], whole=True)
    return LiveView({Role.PREFILL: [A, B]}, index, 0.0, places)


def far_place(store: str = "a", reaches: str = FAR, **speeds: float) -> StorePlace:
    return StorePlace(store * 32, MODEL.hex(), 128, CHUNK_BYTES, speeds, reaches)


def far_s(seen: LiveView, engine: Known, tokens: int = 7 * 128) -> float:
    (pool,) = [pool for pool in seen.pools() if pool.name.startswith("far")]
    assert list(seen.match(PROMPT, [pool])) == [7]
    return seen.transfer_s(pool, engine, tokens)


def test_a_far_store_costs_each_engine_that_reaches_it_its_own_speed() -> None:
    seen = far_view(7, a=far_place(memory=1e9, disk=1e3, far=1e7), b=far_place("b", far=1e8))
    assert [pool.name for pool in seen.pools()] == [
        "pool aaaaaaaaaaaa",
        "pool bbbbbbbbbbbb",
        "far ffffffffffff",
    ]
    assert far_s(seen, A) == pytest.approx(7 * CHUNK_BYTES / 1e7)
    assert far_s(seen, B) == pytest.approx(7 * CHUNK_BYTES / 1e8)
    without = far_view(7, a=far_place(reaches=""), b=far_place("b"))
    assert far_s(without, A) == inf
    assert far_s(without, B) == 0.0, "nothing was measured yet"


def test_a_far_store_that_was_not_measured_is_as_slow_as_the_slowest_tier_that_was() -> None:
    seen = far_view(7, a=far_place(memory=1e9, disk=1e7), b=far_place("b", memory=1e8))
    assert far_s(seen, A) == pytest.approx(7 * CHUNK_BYTES / 1e7)
    assert far_s(seen, B) == pytest.approx(7 * CHUNK_BYTES / 1e8)
    seen = far_view(7, a=far_place(memory=1e9, disk=1e7), b=far_place("b", far=2e8))
    assert far_s(seen, A) == pytest.approx(7 * CHUNK_BYTES / 2e8), "control: another one's loads"


def test_what_the_host_has_itself_is_not_brought() -> None:
    seen = far_view(7, 5, a=far_place(memory=1e9, far=1e7))
    assert far_s(seen, A) == pytest.approx(5 * CHUNK_BYTES / 1e9 + 2 * CHUNK_BYTES / 1e7)
    assert far_s(seen, A, tokens=2 * 128) == pytest.approx(2 * CHUNK_BYTES / 1e7)
    assert far_s(seen, A, tokens=3 * 128) == pytest.approx(
        CHUNK_BYTES / 1e9 + 2 * CHUNK_BYTES / 1e7
    )


def test_the_speed_of_the_far_store_is_not_that_of_the_disk() -> None:
    seen = view(0, 7, a=place(far=1e3, disk=1e8))
    assert load_s(seen, A) == pytest.approx(7 * CHUNK_BYTES / 1e8)
