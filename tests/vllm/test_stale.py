# SPDX-License-Identifier: Apache-2.0
"""Pages with KV of other weights are found by no request: vLLM's own scheduler and pages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from support import vllm_computing
from support.vllm_computing import ComputingEngine, until_over
from support.vllm_steps import PAGE, SteppedEngine
from vllm.v1.core.sched.interface import PauseState

from pd_connector.protocol.wire.params import prefill_params
from pd_connector.vllm.messages import WorkerActivity

CHANGED = WorkerActivity(weight_changes={0: 1})


def cached(engine: SteppedEngine) -> int:
    """Number of pages in vLLM's prefix cache."""
    blocks = engine.scheduler.kv_cache_manager.block_pool.blocks
    return sum(block.block_hash is not None for block in blocks)


def test_all_pages_leave_the_prefix_cache_when_weights_have_changed() -> None:
    engine = SteppedEngine()
    engine.add("ended", 4 * PAGE, 1)
    engine.step()
    assert cached(engine) == 4
    engine.step(CHANGED)
    assert cached(engine) == 0
    engine.add("new", 4 * PAGE, 1)
    engine.step(CHANGED)
    assert cached(engine) == 4, "they have changed once"
    engine.step(WorkerActivity(weight_changes={1: 1}))
    assert cached(engine) == 0, "another rank's"


def test_pages_of_requests_that_ran_meanwhile_are_never_cached() -> None:
    engine = SteppedEngine()
    engine.add("old", 6 * PAGE, 3 * PAGE)
    engine.step(CHANGED)
    for _ in range(2 * PAGE):
        engine.step()
        assert cached(engine) == 0
    engine.add("new", 2 * PAGE, 2, seed=1)
    while engine.scheduler.requests:
        engine.step()
    assert cached(engine) == 2, "those of a request that came later"


def test_what_a_producer_sent_leaves_the_prefix_cache_when_it_is_not_trusted_any_more() -> None:
    engine = SteppedEngine()
    engine.add("running", 4 * PAGE, 2 * PAGE)
    engine.step(WorkerActivity(gauges={0: {"distrusted_producers": 0.0}, 1: {}}))
    assert cached(engine) == 4
    engine.step(WorkerActivity(gauges={1: {"distrusted_producers": 1.0}}))
    assert cached(engine) == 0
    while engine.scheduler.requests:
        engine.step(WorkerActivity(gauges={1: {"distrusted_producers": 1.0}}))
    assert cached(engine) == 0, "it had used what came"


def test_kv_that_was_loaded_before_weights_changed_is_used_by_no_other_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM caches loaded pages in the step that runs their request, and looks at the next request in the same step."""
    prefill = ComputingEngine("prefill", "kv_producer")
    decode = ComputingEngine("decode", "kv_consumer")
    try:
        prefill.add("p", 100, 1, **prefill_params())
        until_over([prefill], lambda: "p" in prefill.ended)
        decode.add("a", 100, 4, **(prefill.answers["p"] or {}))
        until_over([decode], lambda: decode.scheduler.kv_holding_waiting)
        decode.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        until_over([decode], lambda: decode.scheduler.finished_recving_kv_req_ids)
        other_weights(monkeypatch, decode)
        decode.step()
        decode.add("b", 99, 4)
        decode.scheduler.set_pause_state(PauseState.UNPAUSED)
        until_over([prefill, decode], lambda: {"a", "b"} <= decode.ended.keys())
        assert [wrong for wrong in decode.wrong if ": b " in wrong] == []
        assert decode.wrong, "`a` goes on with KV of both weights"
    finally:
        decode.close()
        prefill.close()


def other_weights(monkeypatch: pytest.MonkeyPatch, engine: ComputingEngine) -> None:
    """The model computes other KV from now on, and the worker says so with its next step."""
    before = vllm_computing.kv_of
    monkeypatch.setattr(vllm_computing, "kv_of", lambda layer, marks: before(layer, marks) + 1)
    model = SimpleNamespace(changes=1, reads=False, step=lambda **_: None, close=lambda: None)
    monkeypatch.setattr(engine._worker, "_model", model)
