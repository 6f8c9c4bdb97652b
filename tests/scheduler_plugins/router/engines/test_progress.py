# SPDX-License-Identifier: Apache-2.0
"""The pace of answers, and which silence it explains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugins.router.engines.progress import FEWEST, LEAST_S, PACES, Progress, Signs


def moving(signs: Signs, pauses: list[float], first_s: float = 0.0) -> tuple[Progress, float]:
    """An answer whose bytes came after these pauses, and when the last came."""
    progress, now_s = Progress(signs), first_s
    progress.came(7.0, now_s)  # the time to the first byte is not a pace
    for pause_s in pauses:
        now_s += pause_s
        progress.came(pause_s, now_s)
    return progress, now_s


@given(st.floats(0.0, 60.0))
def test_an_answer_is_late_after_a_few_of_its_own_pauses(pace_s: float) -> None:
    progress, last_s = moving(Signs(), [pace_s] * 8)
    patience_s = max(LEAST_S, PACES * pace_s)
    assert progress.has_pace
    assert not progress.is_late(0.99 * patience_s, last_s + 0.99 * patience_s)
    assert progress.is_late(1.01 * patience_s, last_s + 1.01 * patience_s)


def test_an_answer_without_a_few_pauses_has_no_pace() -> None:
    progress, _ = moving(Signs(), [0.0] * (FEWEST - 1))
    assert not progress.has_pace


def test_one_long_pause_is_forgotten() -> None:
    progress, last_s = moving(Signs(), [0.05] * 4 + [10.0])
    assert not progress.is_late(29.0, last_s + 29.0)
    progress, last_s = moving(Signs(), [0.05] * 4 + [10.0] + [0.05] * 40)
    assert progress.is_late(LEAST_S, last_s + LEAST_S)


def test_a_silent_answer_is_not_late_while_another_one_of_its_engine_moves() -> None:
    """The engine has put it aside, or computes its prompt."""
    signs = Signs()
    fast, last_s = moving(signs, [0.05] * 8)
    waits = Progress(signs)
    moving(signs, [2.0] * 4, last_s)
    now_s = last_s + 8.0
    assert not fast.is_late(8.0, now_s + 5.9)
    assert not waits.is_late(20.0, now_s + 5.9)
    assert fast.is_late(14.0, now_s + 6.1)
    assert waits.is_late(20.0, now_s + 6.1)


@pytest.mark.parametrize("expected_s", [0.0, 10.0])
def test_the_first_byte_is_awaited_for_as_long_as_was_predicted(expected_s: float) -> None:
    progress = Progress(Signs(), expected_s)
    patience_s = max(LEAST_S, PACES * expected_s)
    assert not progress.is_late(patience_s - 0.1, 100.0)
    assert progress.is_late(patience_s, 100.0)
