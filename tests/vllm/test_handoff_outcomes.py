# SPDX-License-Identifier: Apache-2.0
"""What became of each request that named a prefill engine, as the counter `handoffs` tells: with vLLM's own scheduler."""

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.vllm_steps import SteppedEngine

from pd_connector.errors import Cause
from pd_connector.vllm.messages import WorkerActivity


class Engine(SteppedEngine):
    """One that trusts producers at first sight, unless it is told otherwise."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"audit": "off", **options})
        self.counted = Counter[str]()
        count = self.side.telemetry.count

        def noted(name: str, amount: int = 1, **labels: str) -> None:
            if name == "handoffs":
                self.counted[labels["cause"]] += amount
            count(name, amount, **labels)

        self.side.telemetry.count = noted  # vLLM takes its figures away with each step

    def outcomes(self) -> dict[str, int]:
        """By outcome, once all requests have ended."""
        for _ in range(100):
            if not self.scheduler.requests:
                return dict(self.counted)
            self.step()
        raise AssertionError(f"still there: {self.scheduler.requests}")


def test_kv_that_came_was_handed_over() -> None:
    engine = Engine()
    engine.fetch("a", 60)
    engine.add("plain", 60, seed=5)
    engine.step()
    engine.step(finished_recving={"a"})
    assert engine.outcomes() == {"handed_over": 1}


@pytest.mark.parametrize("told", ["with the failure", "by another rank before it"])
def test_a_prompt_whose_load_failed_was_recomputed_for_its_cause(told: str) -> None:
    engine = Engine()
    engine.fetch("a", 60)
    engine.step()
    activity = WorkerActivity(causes={"a": Cause.STALLED})
    failed = {"finished_recving": {"a"}, "failed_recving": {"a"}}
    if told == "with the failure":
        engine.step(activity, **failed)
    else:
        engine.step(activity)
        engine.step(**failed)
    assert engine.outcomes() == {"stalled": 1}


def test_a_prompt_whose_kv_will_not_come_was_recomputed_for_its_cause() -> None:
    engine = Engine()
    engine.fetch("a", 60, remote_block_ids=None)
    engine.step()
    causes = {"a": Cause.UNREACHABLE}
    engine.step(WorkerActivity(unavailable=frozenset({"a"}), causes=causes))
    assert engine.outcomes() == {"unreachable": 1}


def test_until_a_producer_has_passed_one_is_audited_and_others_are_computed_here() -> None:
    engine = Engine(audit="first", budget=512, stall_timeout_s=0.001)
    for seed, name in enumerate("abc"):
        engine.fetch(name, 60, seed=seed)
    assert engine.outcomes() == {"audited": 1, "unaudited": 2}


def test_what_is_cached_here_was_not_needed() -> None:
    engine = Engine()
    engine.add("plain", 64, 1)
    assert engine.outcomes() == {}
    engine.fetch("a", 65)
    assert engine.outcomes() == {"cached": 1}


def test_what_its_client_gave_up_was_aborted() -> None:
    engine = Engine()
    engine.fetch("a", 60)
    engine.step()
    engine.abort("a")
    engine.step(finished_recving={"a"})
    assert engine.outcomes() == {"aborted": 1}


def test_parameters_that_cannot_be_followed_count_too() -> None:
    engine = Engine()
    engine.fetch("a", 60, remote_host=5)
    engine.add("offers", 20, seed=3, do_remote_decode=True, transfer_id=7)
    assert engine.outcomes() == {"malformed_params": 1}
