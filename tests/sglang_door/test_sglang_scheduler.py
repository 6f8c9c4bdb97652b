# SPDX-License-Identifier: Apache-2.0
"""Which waiting requests of SGLang start, and in which order, with SGLang's own cache and adder."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang.srt")

from sglang_door.sglang_rig import STEP_TOKENS, Rig, prompt, request

CLASSES = """
scheduler:
  qos_classes:
    - {name: premium, reserved_fraction: 0.5, priority: 100}
    - {name: free, reserved_fraction: 0.5, priority: 10}
"""


def test_the_shortest_goes_first() -> None:
    rig = Rig()
    rig.waiting = [request("long", prompt(400, 1)), request("short", prompt(40, 2))]
    assert rig.order() == ["short", "long"]
    assert [req.rid for req in rig.waiting] == ["short", "long"]


def test_what_is_cached_does_not_count() -> None:
    rig = Rig()
    known = prompt(400, 1)
    rig.cache(known[:384])
    rig.waiting = [request("short", prompt(60, 2)), request("cached", known)]
    assert rig.order() == ["cached", "short"]


def test_a_prefix_that_a_step_has_stored_counts_in_the_next() -> None:
    rig = Rig()
    shared = prompt(320, 1)
    rig.waiting = [request("first", shared)]
    assert rig.step() == ["first"]
    rig.waiting = [request("other", prompt(100, 2)), request("second", [*shared, 7, 7, 7])]
    assert rig.order() == ["second", "other"]


def test_an_evicted_prefix_counts_no_more() -> None:
    rig = Rig()
    known = prompt(400, 1)
    rig.cache(known)
    rig.waiting = [request("short", prompt(60, 2)), request("cached", known)]
    assert rig.order()[0] == "cached"
    rig.tree.reset()
    assert rig.order()[0] == "short"


def test_of_two_with_one_prefix_one_computes_it_and_the_other_finds_it() -> None:
    rig = Rig()
    shared = prompt(128, 1)
    rig.waiting = [
        request("a", [*shared, 5]),
        request("b", [*shared, 6]),
        request("c", prompt(9, 3)),
    ]
    assert sorted(rig.step()) == ["a", "c"]
    assert [req.rid for req in rig.waiting] == ["b"]
    assert rig.step() == ["b"]
    assert rig.tree.total_size() == 128 + 2 + 9


def test_an_adapter_or_a_salt_shares_no_prefix() -> None:
    rig = Rig()
    shared = prompt(128, 1)
    salted = request("salted", [*shared, 6])
    salted.cache_salt = "other"
    rig.waiting = [request("plain", [*shared, 5]), salted]
    assert sorted(rig.order()) == ["plain", "salted"]


def test_waiting_makes_up_for_length() -> None:
    rig = Rig("scheduler: {lambda: 0.02}")
    rig.waiting = [request("new", prompt(40, 2), at_s=5000.0), request("old", prompt(400, 1))]
    assert rig.order() == ["old", "new"]


def test_nobody_is_overtaken_more_often_than_is_allowed() -> None:
    rig = Rig("scheduler: {policy: srjf, max_overtaken: 3}")
    rig.waiting = [request("long", prompt(STEP_TOKENS + 100, 99))]
    started: list[str] = []
    for n in range(5):
        rig.waiting.append(request(f"short{n}", prompt(STEP_TOKENS, n)))  # fills a step
        started += rig.step()
    assert started[:4] == ["short0", "short1", "short2", "long"]


def test_priorities_are_as_sglang_reads_them() -> None:
    rig = Rig("scheduler: {policy: priority}")
    rig.waiting = [
        request("low", prompt(20, 1), priority=1),
        request("high", prompt(400, 2), priority=9),
    ]
    assert rig.order() == ["high", "low"]


def test_a_class_that_is_owed_goes_first_by_priority() -> None:
    rig = Rig(CLASSES)
    rig.waiting = [
        request("free", prompt(40, 1), qos="free"),
        request("premium", prompt(400, 2), qos="premium"),
        request("nobody", prompt(50, 3)),
    ]
    started = rig.step()
    assert started[0] == "premium"
    assert {*started, *rig.step()} == {"free", "premium", "nobody"}


def test_a_class_does_not_pay_for_what_did_not_start() -> None:
    rig = Rig(CLASSES)
    rig.waiting = [
        request("a", prompt(300, 1), qos="free"),
        request("b", prompt(300, 2), qos="premium"),
    ]
    queue = rig.policy.decider.queue  # type: ignore[union-attr]
    rig.order()
    before = [queue.fair_share.balance_s(name) for name in ("free", "premium")]
    for _ in range(20):  # no adder: nothing starts
        rig.order()
    assert [queue.fair_share.balance_s(name) for name in ("free", "premium")] == pytest.approx(
        before
    )


def test_a_shorter_prompt_starts_beside_a_long_prefill_and_does_not_wait_for_it() -> None:
    rig = Rig()
    rig.waiting = [request("huge", prompt(5 * STEP_TOKENS, 1))]
    assert rig.step() == ["huge"]
    rig.waiting = [request("short", prompt(60, 2))]
    assert rig.step() == ["huge", "short"]


def test_a_longer_prompt_waits_for_a_prefill_under_way() -> None:
    rig = Rig()
    rig.waiting = [request("huge", prompt(5 * STEP_TOKENS, 1))]
    rig.step()
    rig.waiting = [request("huger", prompt(9 * STEP_TOKENS, 2))]
    assert rig.step() == ["huge"]


def test_an_owed_class_gets_room_beside_a_prefill_of_lower_priority() -> None:
    rig = Rig(CLASSES)
    rig.waiting = [request("huge", prompt(2 * STEP_TOKENS - 100, 1), qos="free")]
    rig.step()
    # Longer than what is left of the prefill would be put off, were its class not owed.
    rig.waiting = [
        request("premium", prompt(400, 2), qos="premium"),
        request("f", prompt(30, 3), qos="free"),
    ]
    assert "premium" in rig.step()


def test_a_request_that_wants_a_batch_of_its_own_gets_it() -> None:
    rig = Rig("scheduler: {policy: prefill_only}")
    rig.waiting = [request(str(n), prompt(20 + n, n), max_tokens=1) for n in range(3)]
    assert [rig.step(), rig.step(), rig.step()] == [["0"], ["1"], ["2"]]


def test_what_does_not_fit_into_the_cache_is_not_passed_for_ever() -> None:
    rig = Rig("scheduler: {policy: srjf, max_overtaken: 2}", pool_tokens=1100)
    held = rig.allocator.alloc(700)
    rig.waiting = [request("big", prompt(450, 50), max_tokens=1)]
    assert rig.step() == []
    started = []
    for n in range(4):
        rig.waiting.append(request(f"s{n}", prompt(40, n), max_tokens=1))
        started += rig.step()
    assert len(started) == 2, started
    rig.allocator.free(held)
    assert rig.step()[0] == "big"


def test_a_request_that_is_aborted_while_it_waits_is_forgotten() -> None:
    rig = Rig()
    rig.waiting = [request("gone", prompt(40, 1)), request("stays", prompt(50, 2))]
    rig.order()
    rig.waiting = [req for req in rig.waiting if req.rid == "stays"]
    assert rig.step() == ["stays"]
    assert len(rig.policy.decider.queue) == 0  # type: ignore[union-attr]


def test_a_request_whose_pages_were_taken_back_goes_first() -> None:
    rig = Rig()
    rig.waiting = [request("ran", prompt(400, 1))]
    rig.step()
    back = request("ran", prompt(400, 1))
    back.retracted_stain = True
    rig.tree.reset()
    rig.waiting = [request("short", prompt(30, 2)), back]
    assert rig.order() == ["ran", "short"]


def test_with_the_prefix_cache_off_the_order_goes_by_length() -> None:
    rig = Rig(cached=False)
    rig.waiting = [request("long", prompt(400, 1)), request("short", prompt(40, 2))]
    assert rig.order() == ["short", "long"]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_request_starts_once_whatever_the_page_size(page_size: int) -> None:
    rig = Rig(CLASSES, page_size=page_size, pool_tokens=1 << 16)
    shared = prompt(200, 77)
    rig.waiting = [
        request(
            str(n),
            [*(shared if n % 3 == 0 else []), *prompt(17 + 61 * (n % 13), n)],
            qos=("free", "premium")[n % 2],
            at_s=float(n),
        )
        for n in range(40)
    ]
    started: list[str] = []
    for _ in range(200):
        chunked = rig.scheduler.chunked_req
        started += [rid for rid in rig.step() if chunked is None or rid != chunked.rid]
        if not rig.waiting and rig.scheduler.chunked_req is None:
            break
    assert sorted(started, key=int) == [str(n) for n in range(40)]
