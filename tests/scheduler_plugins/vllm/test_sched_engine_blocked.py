# SPDX-License-Identifier: Apache-2.0
"""Requests that vLLM passes by, or whose KV is loaded: what they leave to those behind them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sched_connectors import Loads
from sched_rig import BLOCK, Rig, words
from vllm.lora.request import LoRARequest

CLASSES = """scheduler:
  policy: fcfs
  max_overtaken: 3
  qos_classes:
    - {name: premium, reserved_fraction: 0.5, priority: 9}
    - {name: free, reserved_fraction: 0.5, priority: 1}
"""
REMOTE = {"do_remote_prefill": True}


def adapter(number: int) -> LoRARequest:
    return LoRARequest(f"adapter {number}", number, "/nowhere")


def rig_of(tmp_path: Path, premium_s: float = 0.5, **more: Any) -> Rig:
    """A rig with room for one adapter at a time; the class `premium` is owed."""
    path = tmp_path / "scheduler.yaml"
    path.write_text(CLASSES)
    rig = Rig(budget=64, additional={"pd_scheduler": str(path)}, **more)
    rig.scheduler.lora_config = SimpleNamespace(max_loras=1)
    rig.set_balances({"premium": premium_s, "free": 0.0})
    return rig


@pytest.mark.parametrize("blocked", [1, 40])
def test_a_class_goes_on_behind_those_of_it_that_cannot_start(tmp_path: Path, blocked: int) -> None:
    """Its 40 prompts of 0.2 s are not started, so it is owed as much as before."""
    rig = rig_of(tmp_path, seqs=16, blocks=200)
    rig.add("runs", words(1, 10), 200, qos="free", lora=adapter(1))
    rig.step()
    rig.set_balances({"premium": 0.5, "free": 0.0})
    for n in range(blocked):
        rig.add(f"blocked {n}", words(100 + n, 200), qos="premium", lora=adapter(2))
    for n in range(9):
        rig.add(f"free {n}", words(10 + n, 20), qos="free")
    rig.add("not blocked", words(2, 20), qos="premium")
    assert "not blocked" in rig.step()
    assert rig.order.fair_share.balance_s("premium") > 0


def test_a_load_that_failed_keeps_no_room_from_those_before_it(tmp_path: Path) -> None:
    """vLLM reserves room for it until it starts. Here a load of another class is before it."""
    rig = rig_of(tmp_path, blocks=12, premium_s=0.0)
    loads = Loads(rig)
    loads.ready = True
    rig.add("failed", words(1, 6 * BLOCK + 4), qos="free", kv=dict(REMOTE), lora=adapter(2))
    rig.step()
    rig.add("runs", words(2, 10), 4, qos="free", lora=adapter(1))
    rig.step()
    rig.add("before", words(3, 4 * BLOCK + 4), qos="premium", kv=dict(REMOTE))
    rig.set_balances({"premium": 1.0})
    rig.step(loads.arrive("failed", failed=True))  # and vLLM passes it by, for its adapter
    for _ in range(8):
        rig.step()
    assert "before" in loads._loading
    rig.step(loads.arrive("before"))
    rig.run()
    rig.assert_served()


def test_kv_that_nobody_brings_makes_no_prompt_cheaper() -> None:
    """A client can say that its KV is elsewhere, also to an engine that loads none."""
    rig = Rig(seqs=1)
    rig.add("says so", words(1, 60), kv=dict(REMOTE))
    rig.add("short", words(2, 20))
    assert list(rig.step()) == ["short"]
    rig.run()
    rig.assert_served()


def test_a_load_has_started(tmp_path: Path) -> None:
    """It counts for those that had no room, and is paid for: else the class of the highest priority would
    have a decode engine for itself."""
    rig = rig_of(tmp_path)
    loads = Loads(rig)
    loads.ready = True
    for name, qos in (("load", "premium"), ("other", "free")):
        rig.add(name, words(ord(name[0]), 40), qos=qos, kv=dict(REMOTE))
    rig.step()
    assert rig.order.turned_back.starts == 2
    assert rig.order.fair_share.balance_s("free") > 0
    for name in ("load", "other"):
        rig.step(loads.arrive(name))
    rig.run()
    rig.assert_served()


def test_whoever_is_urgent_does_not_wait_for_one_that_was_preempted() -> None:
    """As with vLLM's queue: policy `priority` without a file."""
    rig = Rig(policy="priority", seqs=1)
    rig.add("runs", words(1, 40), 5, priority=5)
    rig.add("same", words(3, 40), 5, priority=5)
    rig.step()
    rig.add("urgent", words(2, 40), priority=1)
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert list(rig.step()) == ["urgent"]
    rig.run()
    rig.assert_served()
    assert rig.ended == ["urgent", "runs", "same"]
