# SPDX-License-Identifier: Apache-2.0
"""Negative controls: compiled kernels with one instruction damaged, here some of each kind.

`python -m tests.emulator --damage barrier` (or another kind, or `any`) takes all. What is not found of
barriers and waits orders nothing, and docs/kernels.md says which these are.
"""

import pytest
from executed import executed

SAMPLES = {
    "barrier": {
        4: ("paged", "transfer raw, sums", "mla, 16 heads", "swapped"),
        24: ("transfer fp8, sums", "transfer int8, sums"),
    },
    "wait": {1: ("paged", "mla, 16 heads", "swapped")},
    "order": {1: ("paged, many workers", "paged, 8 queries", "swapped")},
    "bound": {
        2: (
            *("transfer raw, sums", "transfer fp8, edges", "transfer fp8, scale given"),
            *("transfer int8, sums", "paged"),
        ),
    },
    "any": {60: ("mixed, split", "gluon, split", "mla, 40 heads, split")},
}
"""Cases of each kind, by how many damages one is taken of."""
LEFT = {
    ("order", "paged, 8 queries"): 1,
    ("order", "swapped"): 2,
    ("wait", "swapped"): 3,
    ("any", "mixed, split"): 1,
    ("any", "gluon, split"): 1,
    ("any", "mla, 40 heads, split"): 1,
}
"""Damages that are not found: one fence of two, the other covers the same copies; of three products with the same
weights, the fences of the second and the third, and the waits of the first two, which the third one's wait covers;
and a wait between two products that add to the same registers, which are executed in order. Also a commit,
because a later one before the same wait takes its copies or products along, and whether an empty row has a tile,
because that tile would weigh nothing."""


def found(kind: str) -> dict[str, tuple[int, int]]:
    """For each case: how many damages are found, and of how many."""
    shares = {}
    for every, names in SAMPLES[kind].items():
        problems = executed(*names, arguments=[f"--damage={kind}", f"--every={every}"])
        for name, each in problems.items():
            shares[name] = sum(map(bool, each.values())), len(each)
    return shares


@pytest.mark.parametrize("kind", ["barrier", "wait", "order", "any"])
def test_a_missing_barrier_wait_or_order_is_found(kind: str) -> None:
    for name, (hits, count) in found(kind).items():
        assert hits + LEFT.get((kind, name), 0) >= count > 1, name


def test_bounds_that_are_off_by_one_are_found() -> None:
    """Not all: a comparison with a number that never occurs is the same, and so is one with another behind it."""
    for name, (hits, count) in found("bound").items():
        assert hits >= (count if "fp8" in name else count / 2), name


def test_a_gather_of_fp8_has_no_order_to_damage() -> None:
    """No program waits for another."""
    name = "transfer fp8, sums"
    assert executed(name, arguments=["--damage=order"]) == {name: {}}


def test_an_access_to_memory_of_another_tensor_or_of_no_token_is_found() -> None:
    """Threads behind the last token would read page 0, which is not the chunk's; what they read goes nowhere."""
    name = "transfer raw"
    found = executed(name, arguments=["--damage=guard"])[name]
    assert all(found.values()), found
    assert any("in no tensor that its address is of" in problem for problem in found.values())
