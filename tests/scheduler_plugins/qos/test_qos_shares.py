# SPDX-License-Identifier: Apache-2.0
"""Reserved fractions are guarantees; what is not used is lent, and taken back at once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugins.qos.classes import QosClass
from scheduler_plugins.qos.shares import BURST_S, DeficitShares

CLASSES = (
    QosClass(name="premium", reserved_fraction=0.1, priority=100),
    QosClass(name="standard", reserved_fraction=0.3, priority=50),
    QosClass(name="free", reserved_fraction=0.6, priority=10),
)
ALL = [one.name for one in CLASSES]
PIECE_S = 0.05


def serve(shares: DeficitShares, waiting: list[str], pieces: int) -> Counter[str]:
    """Seconds that each class gets while the same classes have requests."""
    got: Counter[str] = Counter()
    for _ in range(pieces):
        name = shares.choose(waiting)
        shares.charge(name, PIECE_S, waiting)
        got[name] += PIECE_S  # type: ignore[assignment]
    return got


def test_all_get_their_fractions_when_all_ask() -> None:
    got = serve(DeficitShares(CLASSES), ALL, 2000)
    for one in CLASSES:
        assert got[one.name] / 100.0 == pytest.approx(one.reserved_fraction, abs=0.01)


@pytest.mark.parametrize("alone", ALL)
def test_one_that_is_alone_gets_everything(alone: str) -> None:
    assert set(serve(DeficitShares(CLASSES), [alone], 100)) == {alone}


def test_an_unused_reserve_is_lent_by_priority() -> None:
    got = serve(DeficitShares(CLASSES), ["standard", "free"], 2000)
    assert got["free"] == pytest.approx(60.0, abs=1.0)
    assert got["standard"] == pytest.approx(40.0, abs=1.0)


def test_a_loan_is_taken_back_at_once() -> None:
    shares = DeficitShares(CLASSES)
    serve(shares, ["free"], 1000)
    assert shares.choose(ALL) == "premium"
    shares.charge("premium", PIECE_S, ALL)
    assert shares.choose(["standard", "free"]) == "standard"


def test_an_idle_hour_gives_no_right_to_a_busy_one() -> None:
    shares = DeficitShares(CLASSES)
    serve(shares, ["free"], 100_000)
    assert shares.balance_s("premium") == pytest.approx(BURST_S)
    got = serve(shares, ["premium", "free"], 600)
    # Its tenth, what it had kept, and the 0.3 that `standard` does not use and has kept.
    assert got["premium"] <= (0.1 + 0.3) * 30 + 2 * BURST_S + 2 * PIECE_S


def test_what_was_borrowed_is_not_held_against_the_borrower() -> None:
    shares = DeficitShares(CLASSES)
    serve(shares, ["standard"], 10_000)
    got = serve(shares, ALL, 600)
    assert got["standard"] >= 0.3 * 30 - 2 * BURST_S - PIECE_S


def test_what_a_class_did_on_an_idle_engine_does_not_count() -> None:
    shares = DeficitShares(CLASSES)
    for _ in range(1000):
        shares.charge("premium", PIECE_S, [])
    assert [shares.balance_s(name) for name in ALL] == [BURST_S] * 3


def test_what_is_owed_to_a_queue_is_not_forgotten_while_it_is_served_alone() -> None:
    shares = DeficitShares(CLASSES)
    shares.charge("premium", 10.0, ["free"])
    owed_s = shares.balance_s("free")
    shares.charge("free", PIECE_S, ["free"])
    assert shares.balance_s("free") >= owed_s - PIECE_S


def test_what_a_class_cannot_keep_goes_to_the_highest_priority_that_has_room() -> None:
    shares = DeficitShares(CLASSES)
    shares.charge("free", PIECE_S, [])
    shares.charge("premium", 1.0, ["free"])
    # It has paid 1 s, and earned its tenth and the 0.3 of `standard`.
    assert shares.balance_s("premium") == pytest.approx(BURST_S - 1.0 + 0.1 + 0.3)
    assert shares.balance_s("standard") == BURST_S
    shares.charge("free", 5.0, ["free"])
    assert shares.balance_s("premium") == BURST_S, "the rest is nobody's"


def test_a_refund_restores_the_balances() -> None:
    shares = DeficitShares(CLASSES)
    serve(shares, ALL, 17)
    before = [shares.balance_s(name) for name in ALL]
    for name in ALL:
        shares.refund(shares.charge(name, 0.2, ALL))
    assert [shares.balance_s(name) for name in ALL] == pytest.approx(before)


@given(
    costs=st.lists(st.floats(0.001, 0.3), min_size=200, max_size=400),
    idle=st.lists(st.sampled_from(["standard", "free", ""]), min_size=200, max_size=400),
)
def test_who_always_asks_gets_its_fraction_of_any_stretch(
    costs: list[float], idle: list[str]
) -> None:
    """Whatever the others do, and wherever the stretch begins."""
    shares, behind = DeficitShares(CLASSES), 0.0
    for cost_s, away in zip(costs, idle, strict=False):
        waiting = [name for name in ALL if name != away]
        name = shares.choose(waiting)
        shares.charge(name, cost_s, waiting)
        behind += 0.1 * cost_s - (cost_s if name == "premium" else 0.0)
        behind = max(behind, 0.0)
        assert behind <= 0.3 + 0.1 * 0.3


def test_classes_can_be_replaced_and_keep_what_they_earned() -> None:
    shares = DeficitShares(CLASSES)
    serve(shares, ["free"], 100)
    kept_s = shares.balance_s("premium")
    shares.update(CLASSES[:2])
    assert shares.balance_s("premium") == kept_s
    assert shares.choose(["standard"]) == "standard"
