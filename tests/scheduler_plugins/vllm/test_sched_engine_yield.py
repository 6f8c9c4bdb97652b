# SPDX-License-Identifier: Apache-2.0
"""A prefill gives way only to requests that start in its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sched_connectors import Loads
from sched_rig import Rig, words

CLASSES = """scheduler:
  policy: {policy}
  max_overtaken: {bound}
  qos_classes:
    - {{name: premium, reserved_fraction: 0.5, priority: 9}}
    - {{name: free, reserved_fraction: 0.5, priority: 1}}
"""


def rig_of(tmp_path: Path, bound: int = 256, policy: str = "fcfs", **more: Any) -> Rig:
    """A rig whose class `premium` is owed, and whose steps are shorter than a page while classes share it."""
    path = tmp_path / "scheduler.yaml"
    path.write_text(CLASSES.format(bound=bound, policy=policy))
    rig = Rig(budget=64, additional={"pd_scheduler": str(path)}, **more)
    rig.fit.model = replace(rig.fit.model, c=0.0)
    rig.set_balances({"premium": 1.0, "free": 0.0})
    return rig


def test_two_that_had_no_room_do_not_take_turns_for_the_sake_of_a_third(tmp_path: Path) -> None:
    """Both start before the class that is owed. A step computes half a page: a request that yields loses it."""
    rig = rig_of(tmp_path, bound=0, seqs=1)
    for name in ("a", "b"):
        rig.add(name, words(ord(name), 40), qos="free")
        rig.order.turned_back.add(name)
    rig.add("owed", words(1, 40), qos="premium")
    requests = dict(rig.scheduler.requests)
    rig.run(most_steps=100)
    rig.assert_served()
    assert rig.ended[0] == "a"
    assert [requests[name].num_preemptions for name in ("a", "b")] == [0, 1]


@pytest.mark.parametrize("policy", ["fcfs", "srjf", "srjf_calibrated", "length_grouped"])
@pytest.mark.parametrize("tokens", [48, 100])
def test_a_class_pays_for_all_that_is_computed(tmp_path: Path, policy: str, tokens: int) -> None:
    """vLLM stores the blocks of a request's first chunk before it pops the request."""
    rig = rig_of(tmp_path, seqs=1, policy=policy)
    rig.set_balances({"premium": 0.0})  # else steps are short
    rig.add("a", words(1, tokens), qos="premium")
    rig.add("b", words(2, 40), qos="free")
    assert rig.step()["a"] >= 48
    earned_s = rig.order.fair_share.balance_s("free")
    assert earned_s == pytest.approx(tokens * 1e-3 / 2), "the other class earns half of that"


@pytest.mark.parametrize("blocked", [1, 2, 5])
def test_a_prefill_gives_way_to_each_that_cannot_start_once_at_most(
    tmp_path: Path, blocked: int
) -> None:
    rig = rig_of(tmp_path)
    Loads(rig)  # its answer is "ask again"
    long = rig.add("long", words(1, 100), qos="free")
    rig.step()
    for n in range(blocked):
        rig.add(f"blocked {n}", words(2 + n, 48), qos="premium", kv={"do_remote_prefill": True})
    for _ in range(40):
        queue = rig.order.class_queue("premium")
        oldest = queue.first()
        assert oldest is not None
        queue.move(oldest, oldest.key + 1, oldest.cost_s)  # another one is first
        rig.step()
    assert long.num_preemptions <= blocked
    assert rig.ended == ["long"]
