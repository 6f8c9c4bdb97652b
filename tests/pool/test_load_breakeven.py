# SPDX-License-Identifier: Apache-2.0
"""A pool is never much slower than no pool: chunks are loaded only as far as that is faster than computing them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.load_breakeven import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Answers,
    LoadBreakeven,
    _Tier,
)
from pd_connector.pool.store.base import FAR

CHUNK = 4 << 20
_speeds = st.floats(1e6, 1e10)


def worth(token_s: float = 1e-3, **tiers: float) -> LoadBreakeven:
    """Tiers by name: bytes a second."""
    found = LoadBreakeven()
    found.computed(1000, 1000 * token_s)
    for name, bytes_per_s in tiers.items():
        found.loaded(name, CHUNK, CHUNK / bytes_per_s)
    return found


def hit(chunks: int, tier: str = "memory") -> list[tuple[str, int]]:
    return [(tier, CHUNK)] * chunks


@given(
    st.floats(1e-6, 1e-2),
    _speeds,
    _speeds,
    st.lists(st.sampled_from(["memory", "disk"]), max_size=12),
)
def test_as_many_chunks_are_loaded_as_save_most_time(
    token_s: float, memory: float, disk: float, tiers: list[str]
) -> None:
    speeds = {"memory": memory, "disk": disk}
    found = [(tier, CHUNK) for tier in tiers]

    def seconds(loaded: int) -> float:
        """Until the whole hit is in the cache, in one way or the other."""
        moved = sum(CHUNK / speeds[tier] for tier in tiers[:loaded])
        return moved + (len(tiers) - loaded) * CHUNK_TOKENS * token_s

    chosen = seconds(worth(token_s, **speeds).chunks(found, 0.0))
    assert chosen <= min(map(seconds, range(len(tiers) + 1))) * (1 + 1e-9) + 1e-9


def test_what_was_not_measured_is_loaded() -> None:
    assert LoadBreakeven().chunks(hit(9), 0.0) == 9
    assert worth().chunks(hit(9), 0.0) == 9


def test_an_engine_that_only_loads_computes_a_chunk_to_know_how_long_that_takes() -> None:
    store = LoadBreakeven()
    assert store.chunks(hit(9), 0.0) == 9
    store.loaded("memory", 9 * CHUNK, 9 * CHUNK / 20e6)
    assert store.chunks(hit(9), 0.0) == 8
    store.computed(CHUNK_TOKENS, CHUNK_TOKENS * 1e-3)
    assert store.chunks(hit(9), 0.0) == 0, "it would not have learnt this otherwise"


def test_one_load_from_a_slow_store_suffices_to_leave_it() -> None:
    assert worth(token_s=1e-3, memory=20e6).chunks(hit(3), 0.0) == 0


def test_a_fast_tier_is_used_up_to_the_first_chunk_of_a_slow_one() -> None:
    both = worth(memory=1e10, disk=20e6)
    assert both.chunks([*hit(3), *hit(4, "disk"), *hit(1)], 0.0) == 3
    assert both.chunks([*hit(3), *hit(1, "disk"), *hit(9)], 0.0) == 13, (
        "one slow chunk before many fast ones"
    )


def test_a_slow_store_is_probed_now_and_then_and_no_request_loads_of_it() -> None:
    slow = worth(memory=20e6)
    tried = []
    for now in range(300):
        assert slow.chunks(hit(3), float(now)) == 0
        if slow.probe(hit(3), float(now)) is not None:
            tried.append(now)
            slow.probed("memory", CHUNK, CHUNK / 20e6)
    assert tried[0] == FIRST_PAUSE_S
    pauses = [b - a for a, b in itertools.pairwise(tried)]
    assert pauses[:2] == [10, 20]
    assert set(pauses[2:]) == {LONGEST_PAUSE_S}


def test_a_store_that_has_become_fast_is_used_again() -> None:
    store = worth(memory=20e6)
    assert store.chunks(hit(3), 0.0) == 0
    assert store.probe(hit(3), 4.9) is None
    assert store.probe(hit(3), 5.0) == 0
    assert store.chunks(hit(3), 5.1) == 0, "the probe is under way"
    store.probed("memory", CHUNK, CHUNK / 1e9)
    assert store.chunks(hit(3), 5.2) == 3


def test_what_only_probes_find_fast_is_tried_ever_more_rarely() -> None:
    """Reading is fast, but placing what was read is slow."""
    store, tried = worth(memory=20e6), []
    for now in range(100):
        if store.chunks(hit(3), float(now)):
            tried.append(now)
            store.loaded("memory", CHUNK, CHUNK / 20e6)
        if store.probe(hit(3), float(now)) is not None:
            store.probed("memory", CHUNK, CHUNK / 1e9)
    assert [b - a for a, b in itertools.pairwise(tried)] == [10, 20, 30, 30]


def test_a_store_that_does_not_answer_is_left_alone_for_5_to_30_seconds() -> None:
    store = worth(memory=1e10)
    store.silent("memory", 0.0)
    probed = []
    for now in range(100):
        assert store.chunks(hit(3), float(now)) == 0, "no request waits for it"
        if store.probe(hit(3), float(now)) is not None:
            probed.append(now)
    assert probed == [5, 15, 35, 65, 95]
    store.probed("memory", CHUNK, CHUNK / 1e10)
    assert store.chunks(hit(3), 96.0) == 3
    store.silent("memory", 100.0)
    assert store.probe(hit(3), 105.0) == 0, "it has answered since"


def test_a_late_store_is_not_asked_and_then_asked_without_anybody_waiting() -> None:
    answers = Answers()
    assert answers.asks(0.0)
    assert answers.waited_for
    answers.late(0.0)
    asked = [now for now in range(100) if answers.asks(float(now))]
    assert asked == [5, 15, 35, 65, 95]
    assert not answers.waited_for
    answers.late(95.0)
    assert not answers.asks(96.0), "each pause is as long as it was meant to be"
    answers.in_time()
    assert answers.asks(96.0)
    assert answers.waited_for


def test_chunks_behind_one_in_a_silent_tier_are_not_loaded() -> None:
    store = worth(memory=1e10, disk=1e10)
    store.silent("disk", 0.0)
    assert store.chunks([*hit(2), *hit(1, "disk"), *hit(2)], 1.0) == 2


def test_speeds_are_told_while_another_thread_meets_a_new_tier() -> None:
    speeds = worth(memory=1e9, disk=1e9)

    class Interrupted(_Tier):
        """Another thread runs whenever its speed is read."""

        @property
        def byte_s(self) -> float:
            speeds.probed("far", CHUNK, 1.0)
            return 1e-9

        @byte_s.setter
        def byte_s(self, _value: float) -> None: ...

    speeds._tiers["memory"] = Interrupted()
    assert speeds.bytes_per_s().keys() >= {"memory", "disk"}


def test_a_load_that_would_wait_for_longer_than_computing_takes_is_not_begun() -> None:
    store = worth(token_s=1e-3, far=100e6, memory=1e10)
    far = hit(9, FAR)
    saved = 9 * (CHUNK_TOKENS * 1e-3 - CHUNK / 100e6)
    assert store.chunks(far, 0.0, saved * 0.99) == 9
    assert store.chunks(far, 0.0, saved * 1.01) == 0
    assert store.chunks([*hit(3), *far], 0.0, saved * 1.01) == 3, (
        "chunks of this host wait for none"
    )
    assert store.chunks(hit(3), 0.0, 1e9) == 3
    assert store.probe(far, 1e9) is None, "the tier is not slow"
    assert store.chunks(far, 0.0) == 9


def test_waiting_for_others_is_not_the_tiers_speed() -> None:
    store, seconds = worth(far=100e6), CHUNK / 100e6
    for wait_s in (0.5 * seconds, seconds, 100 * seconds):
        store.loaded(FAR, CHUNK, seconds + wait_s, wait_s)
        store.probed(FAR, CHUNK, seconds + wait_s, wait_s)
    assert store.bytes_per_s()[FAR] == pytest.approx(100e6)
    store.silent(FAR, 0.0)
    store.loaded(FAR, CHUNK, 101 * seconds, 100 * seconds)
    assert store.chunks(hit(3, FAR), 0.0) == 3, "it answers"
