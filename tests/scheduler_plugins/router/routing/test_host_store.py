# SPDX-License-Identifier: Apache-2.0
"""How long an engine would load a prefix from the KV pool of a host."""

from __future__ import annotations

from math import inf

from policy_engines import Known

from pd_connector.pool.keys import chain
from scheduler_plugins.router.index.hashes import token_bytes
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.prompt_keys import PromptKeys
from scheduler_plugins.router.index.stored import StorePlace
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.routing.view import LiveView

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
