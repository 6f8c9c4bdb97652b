# SPDX-License-Identifier: Apache-2.0
"""What is shorter than the rest of a prefill under way starts beside it, in the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sched_connectors import Loads
from sched_rig import BLOCK, Rig, words

from scheduler_plugins.vllm.overtaking import StepShape, largest_share

BUDGET = 64
CLASSES = """scheduler:
  qos_classes:
    - {name: premium, reserved_fraction: 0.5, priority: 9}
    - {name: free, reserved_fraction: 0.5, priority: 1}
"""


def under_way(tmp_path: Path, settings: str = "scheduler: {}", qos: str = "", **more: Any) -> Rig:
    """A rig in the middle of a prompt of 300 tokens."""
    path = tmp_path / "scheduler.yaml"
    path.write_text(settings)
    rig = Rig(budget=BUDGET, additional={"pd_scheduler": str(path)}, **more)
    rig.add("long", words(1, 300), qos=qos)
    assert rig.step() == {"long": BUDGET}
    return rig


def served(rig: Rig) -> None:
    rig.run()
    rig.assert_served()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_shorter_one_shares_the_step(tmp_path: Path, depth: int) -> None:
    rig = under_way(tmp_path, depth=depth)
    rig.add("short", words(2, 10))
    assert rig.step() == {"long": BUDGET - 10, "short": 10}
    assert rig.step() == {"long": BUDGET}
    served(rig)
    assert rig.ended == ["short", "long"]


@pytest.mark.parametrize("policy", ["fcfs", "srjf", "longest_prefix", "length_grouped"])
def test_orders_that_do_not_overtake_what_runs(tmp_path: Path, policy: str) -> None:
    rig = under_way(tmp_path, f"scheduler: {{policy: {policy}}}")
    rig.add("short", words(2, 10))
    assert rig.step() == {"long": BUDGET}
    served(rig)


def test_a_longer_one_waits(tmp_path: Path) -> None:
    rig = under_way(tmp_path)
    for _ in range(3):
        rig.step()
    rig.add("longer", words(2, 45))  # 44 tokens are left of the other
    assert rig.step() == {"long": 44, "longer": 20}
    served(rig)
    assert rig.ended == ["long", "longer"]


def test_half_a_step_is_shared_at_most(tmp_path: Path) -> None:
    rig = under_way(tmp_path)
    for n in range(5):
        rig.add(f"short {n}", words(2 + n, 12))
    assert rig.step() == {"long": BUDGET - 24, "short 0": 12, "short 1": 12}
    assert rig.step() == {"long": BUDGET - 24, "short 2": 12, "short 3": 12}
    served(rig)
    assert rig.ended[-1] == "long"


def test_a_cached_prefix_makes_it_shorter(tmp_path: Path) -> None:
    rig = Rig(budget=BUDGET)
    profile = words(3, 6 * BLOCK)
    rig.add("first", [*profile, 1])
    rig.run()
    rig.add("long", words(1, 300))
    rig.step()
    rig.add("short", [*profile, 2, 3])
    assert rig.step() == {"long": BUDGET - 2, "short": 2}
    served(rig)


def test_what_follows_the_prompt_under_way_waits_for_it(tmp_path: Path) -> None:
    rig = under_way(tmp_path)
    rig.add("next", [*words(1, 300), 7])
    while not rig.ended:
        step = rig.step()
        assert "next" not in step or "long" in rig.ended
    served(rig)
    assert rig.ended == ["long", "next"]


def test_a_class_of_lower_priority_shares_no_step(tmp_path: Path) -> None:
    rig = under_way(tmp_path, CLASSES, "premium")
    rig.set_balances({"premium": 0.0, "free": 1.0})
    rig.add("short", words(2, 10), qos="free")
    assert rig.step() == {"long": BUDGET}
    served(rig)


def test_no_step_is_shared_with_what_did_not_fit_before(tmp_path: Path) -> None:
    rig = under_way(tmp_path)
    rig.add("short", words(2, 10))
    rig.order.turned_back.add("short")
    assert rig.step() == {"long": BUDGET}
    served(rig)


def test_what_decodes_keeps_its_part(tmp_path: Path) -> None:
    rig = Rig(budget=BUDGET)
    for n in range(3):
        rig.add(f"decodes {n}", words(10 + n, 8), 20)
    rig.step()
    rig.add("long", words(1, 300))
    rig.step()
    rig.add("short", words(2, 10))
    step = rig.step()
    assert (step.pop("long"), step.pop("short")) == (BUDGET - 13, 10)
    assert sorted(step.values()) == [1, 1, 1]
    served(rig)


@pytest.mark.parametrize("depth", [1, 2])
def test_who_started_beside_a_prefill_decodes_beside_it(tmp_path: Path, depth: int) -> None:
    """vLLM gives what started first all that it wants; the rest of the prefill is 5 steps."""
    rig = under_way(tmp_path, depth=depth)
    rig.add("short", words(2, 10), 9)
    assert rig.step() == {"long": BUDGET - 10, "short": 10}
    while "long" in (step := rig.step()):
        assert step["short"] == 1
    served(rig)


def test_who_decodes_beside_a_prefill_does_so_when_another_one_starts(tmp_path: Path) -> None:
    rig = under_way(tmp_path)
    rig.add("short", words(2, 10), 9)
    rig.step()
    rig.add("next", words(3, 30), 2)
    assert rig.step() == {"long": BUDGET - 31, "short": 1, "next": 30}
    served(rig)


@pytest.mark.parametrize(
    ("own", "step_tokens", "long"),
    [
        (0, 24, 14),
        (4, BUDGET, 32),  # raised to half of the step, as there are two
        (4, 24, 14),
    ],
)
def test_vllms_adaptive_limit_raises_its_own_only(
    tmp_path: Path, own: int, step_tokens: int, long: int
) -> None:
    rig = under_way(tmp_path)
    scheduler, config = rig.scheduler, rig.scheduler.scheduler_config
    scheduler.adaptive_long_prefill_threshold = True
    config.long_prefill_token_threshold = own
    shape = scheduler._shape = StepShape(scheduler, scheduler.waiting, scheduler._order)
    shape._step_tokens = lambda _: step_tokens
    rig.add("short", words(2, 10))
    assert rig.step() == {"long": long, "short": 10}
    assert scheduler.adaptive_long_prefill_threshold
    assert config.long_prefill_token_threshold == own
    served(rig)


def test_no_room_is_made_in_every_step_for_whom_vllm_passes_by(tmp_path: Path) -> None:
    rig = under_way(tmp_path)
    Loads(rig)  # its answer is "ask again"
    rig.add("blocked", words(2, 30), kv={"anything": True})
    steps = [rig.step()["long"] for _ in range(4)]
    assert steps == [BUDGET - 30, BUDGET - 30, BUDGET, BUDGET]


def test_a_connector_that_does_not_know_at_once_costs_one_step(tmp_path: Path) -> None:
    """A look-up begins with the request, so the first scan comes too early for it."""
    rig = under_way(tmp_path)
    loads = Loads(rig)  # its answer is "ask again"
    rig.add("short", words(2, 10), kv={"anything": True})
    assert rig.step() == {"long": BUDGET - 10}
    loads.ready = True
    assert rig.step() == {"long": BUDGET - 10}
    assert "short" in loads._loading
    rig.step(loads.arrive("short"))
    served(rig)
    assert rig.ended == ["short", "long"]


def test_vllms_own_limit_stays(tmp_path: Path) -> None:
    rig = under_way(tmp_path)
    config = rig.scheduler.scheduler_config
    rig.scheduler._shape._chunk = config.long_prefill_token_threshold = 20
    rig.add("short", words(2, 10))
    assert rig.step() == {"long": 20, "short": 10}
    assert config.long_prefill_token_threshold == 20
    served(rig)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.integers(1, 1000))
def test_the_largest_share_is_the_largest(wants: list[int], budget: int) -> None:
    wants.sort()
    share = largest_share(wants, budget)

    def used(limit: int) -> int:
        return sum(min(want, limit) for want in wants)

    assert used(share) <= max(budget, len(wants))
    assert share >= wants[-1] or used(share + 1) > budget
