# SPDX-License-Identifier: Apache-2.0
"""Open requests are not looked through for garbage again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from scheduler_plugins.middleware.middleware import OLDEST_EVERY, collect_less

OPEN, OBJECTS = 1500, 300


@pytest.fixture(autouse=True)
def _as_python_starts() -> Iterator[None]:
    """The collector's defaults, and nothing old that it would weigh new objects against. What is frozen stays so: with it goes
    what tests/conftest.py has frozen."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    gc.collect()
    gc.freeze()
    yield
    gc.set_threshold(*before)


def looked_through() -> int:
    """How often the oldest generation is collected while requests come and stay."""
    before = gc.get_stats()[2]["collections"]
    requests = [[[n] for _ in range(OBJECTS)] for n in range(OPEN)]
    assert len(requests) == OPEN
    return gc.get_stats()[2]["collections"] - before


def test_requests_that_stay_are_let_alone() -> None:
    assert looked_through() > 0, "as Python is set"
    collect_less()
    assert looked_through() == 0


def test_what_was_set_higher_stays() -> None:
    gc.set_threshold(5, 6, 10 * OLDEST_EVERY)
    collect_less()
    assert gc.get_threshold() == (5, 6, 10 * OLDEST_EVERY)
