# SPDX-License-Identifier: Apache-2.0
"""Steps are short while classes share the engine, and as long as vLLM allows otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sched_rig import Rig, words

from scheduler_plugins.queue.step_length import MOST_CUT

BUDGET = 64
CLASSES = """scheduler:
  policy: fcfs
  qos_classes:
    - {name: premium, reserved_fraction: 0.2, priority: 9}
    - {name: standard, reserved_fraction: 0.3, priority: 5}
    - {name: free, reserved_fraction: 0.5, priority: 1}
"""

Make = Callable[..., Rig]


@pytest.fixture
def rig(tmp_path: Path) -> Make:
    """A rig with these classes and a long prompt of a class under way; `premium` is owed."""
    path = tmp_path / "scheduler.yaml"
    path.write_text(CLASSES)

    def make(qos: str, *, tokens: float = 24, known: bool = True, **more: object) -> Rig:
        """`tokens`: as many take ten times what a step costs without any."""
        rig = Rig(budget=BUDGET, additional={"pd_scheduler": str(path)}, **more)
        fit = rig.fit
        fit.model = replace(fit.model, c=tokens * fit.model.a / 10, known=known)
        rig.add("long", words(1, 300), qos=qos)
        for name in ("premium", "standard", "free"):
            rig.set_balances({name: float(name == "premium")})
        return rig

    return make


@pytest.mark.parametrize("qos", ["standard", "free"])
@pytest.mark.parametrize(("tokens", "step"), [(24, 24), (2, BUDGET // MOST_CUT), (500, BUDGET)])
def test_steps_are_as_short_as_their_fixed_cost_allows(
    rig: Make, qos: str, tokens: float, step: int
) -> None:
    engine = rig(qos, tokens=tokens)
    assert [engine.step() for _ in range(2)] == [{"long": step}] * 2
    engine.run()
    engine.assert_served()


def test_whoever_has_priority_itself_gets_whole_steps(rig: Make) -> None:
    assert rig("premium").step() == {"long": BUDGET}


def test_a_class_that_is_owed_nothing_shortens_no_steps(rig: Make) -> None:
    engine = rig("free")
    engine.set_balances({"premium": 0.0})
    assert engine.step() == {"long": BUDGET}


def test_a_class_that_is_owed_shares_short_steps(rig: Make) -> None:
    engine = rig("free")
    engine.add("here", words(2, 100), qos="premium")
    assert engine.step() == {"here": 24}
    engine.run()
    engine.assert_served()


def test_a_class_that_has_the_engine_for_itself_gets_whole_steps(rig: Make) -> None:
    engine = rig("premium")
    engine.add("here", words(2, 100), qos="premium")
    assert sum(engine.step().values()) == BUDGET


def test_what_a_step_costs_must_be_known(rig: Make) -> None:
    assert rig("free", known=False).step() == {"long": BUDGET}


@pytest.mark.parametrize("depth", [1, 2])
def test_what_decodes_is_not_held_up(rig: Make, depth: int) -> None:
    engine = rig("free", tokens=2, depth=depth, seqs=32, blocks=200)
    for n in range(20):
        engine.add(f"decodes {n}", words(10 + n, 8), 40, qos="free")
    while engine.scheduler.waiting or any(one.is_prefill_chunk for one in engine.scheduler.running):
        engine.step()
    engine.add("another", words(3, 300), qos="free")
    engine.set_balances({"premium": 1.0})
    step = engine.step()
    assert step.pop("another") == BUDGET // MOST_CUT
    assert sorted(step.values()) == [1] * 20
    engine.run()
    engine.assert_served()


def test_prompts_that_must_be_computed_in_one_piece_get_whole_steps(rig: Make) -> None:
    engine = rig("free")
    engine.scheduler._shape._may_cut = False
    assert engine.step() == {"long": BUDGET}
