# SPDX-License-Identifier: Apache-2.0
"""vLLM is paused, or holds a request back itself: neither is taken for something else."""

from __future__ import annotations

import pytest
from sched_rig import BLOCK, Rig, words
from vllm.v1.core.sched.interface import PauseState

CLASSES = """
  qos_classes:
    - {name: premium, reserved_fraction: 0.5, priority: 10}
    - {name: free, reserved_fraction: 0.5, priority: 1}
"""


@pytest.fixture
def section(tmp_path):
    """`additional_config` with this content of the section `scheduler`."""

    def made(text: str) -> dict[str, str]:
        path = tmp_path / "scheduler.yaml"
        path.write_text("scheduler:\n" + text)
        return {"pd_scheduler": str(path)}

    return made


def owed(rig: Rig, seconds: float = 0.5) -> None:
    rig.set_balances({"premium": seconds})


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.UNPAUSED])
def test_a_pause_waits_for_a_prefill_that_would_give_way(section, state: PauseState) -> None:
    """Without a pause (the other case) the same prefill is preempted."""
    rig = Rig(budget=64, additional=section("  policy: fcfs" + CLASSES))
    rig.add("long", words(1, 320), qos="free")
    rig.step()
    rig.add("owed", words(2, 48), qos="premium")
    owed(rig)
    rig.scheduler.set_pause_state(state)
    step = rig.step()
    if state == PauseState.UNPAUSED:
        assert "owed" in step
        return
    assert step == {"long": 64}
    for _ in range(20):
        if not rig.scheduler.has_requests() or not rig.scheduler.get_num_unfinished_requests():
            break
        rig.step()
    assert rig.ended == ["long"], "vLLM says it is drained: the prefill must have ended"
    rig.scheduler.set_pause_state(PauseState.UNPAUSED)
    rig.run()
    rig.assert_served()


def test_while_paused_a_prefill_leaves_no_room_for_those_who_cannot_start(section) -> None:
    rig = Rig(budget=64, additional=section("  policy: srjf_calibrated"))
    rig.add("long", words(1, 320))
    rig.step()
    rig.add("short", words(2, 10))
    rig.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert rig.step() == {"long": 64}
    rig.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert rig.step() == {"long": 54, "short": 10}


def held_back_for_a_while(rig: Rig, steps: int, *, throttled: bool) -> None:
    """Something decodes, and vLLM defers the prefill that waits (data-parallel balancing)."""
    schedule = rig.scheduler.schedule
    if throttled:
        rig.scheduler.schedule = lambda *_: schedule(True)
    for _ in range(steps):
        rig.step()
    rig.scheduler.schedule = schedule


def test_a_head_that_vllm_holds_back_does_not_overtake_a_class_that_is_owed(section) -> None:
    settings = "  policy: fcfs\n  max_overtaken: 1" + CLASSES
    rig = Rig(budget=64, seqs=3, additional=section(settings))
    rig.add("decodes", words(1, 20), 60, qos="free")
    rig.step()
    rig.add("free", words(2, 40), qos="free")
    held_back_for_a_while(rig, 3, throttled=True)
    assert "free" in rig.order
    # Two that are owed come and go: had the head been noted as lacking room, it would be first now.
    for n in range(3):
        rig.add(f"premium{n}", words(3 + n, 64), qos="premium")
        owed(rig)
        step = rig.step()
        assert f"premium{n}" in step
        assert "free" not in step
    owed(rig, 0.0)
    rig.run()
    rig.assert_served()


def test_a_head_that_lacks_room_still_gets_its_turn(section) -> None:
    """The other side: here the cache is full, and the bound must hold."""
    settings = "  policy: srjf_calibrated\n  max_overtaken: 2"
    rig = Rig(blocks=9, budget=512, seqs=8, additional=section(settings))
    rig.add("decodes", words(1, 3 * BLOCK), 12)
    rig.step()
    rig.add("big", words(2, 7 * BLOCK))
    for n in range(12):
        rig.add(f"short{n}", words(10 + n, BLOCK), 3)
        rig.step()
    assert "big" in rig.order.turned_back
    rig.run()
    rig.assert_served()
    assert rig.ended.index("big") < rig.ended.index("short11")
