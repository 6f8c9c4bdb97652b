# SPDX-License-Identifier: Apache-2.0
"""Negative controls: compiled kernels with one instruction damaged. Some damages of each kind; `python -m
tests.emulator --damage barrier` (or `wait`, `bound`, `order`) takes all."""

import pytest
from executed import executed


def found(name: str, kind: str, every: int) -> tuple[int, int]:
    """How many damages are found, and of how many."""
    problems = executed(name, arguments=[f"--damage={kind}", f"--every={every}"])[name]
    return sum(map(bool, problems.values())), len(problems)


@pytest.mark.parametrize(
    ("name", "every"), [("paged", 4), ("transfer raw, sums", 6), ("mla, 16 heads", 5)]
)
def test_a_removed_barrier_is_found(name: str, every: int) -> None:
    hits, count = found(name, "barrier", every)
    assert hits == count > 2


@pytest.mark.parametrize(("name", "every"), [("paged", 1), ("mla, 16 heads", 1)])
def test_a_wait_that_lets_one_more_be_under_way_is_found(name: str, every: int) -> None:
    hits, count = found(name, "wait", every)
    assert hits == count > 1


def test_a_fence_that_is_missing_or_an_atomic_without_order_is_found() -> None:
    hits, count = found("paged, many workers", "order", 1)
    assert hits == count > 1


@pytest.mark.parametrize("name", ["transfer raw", "paged", "plan"])
def test_most_bounds_that_are_off_by_one_are_found(name: str) -> None:
    """Not all: a comparison with a number that never occurs is the same."""
    hits, count = found(name, "bound", 5)
    assert hits > count / 3
