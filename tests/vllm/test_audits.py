# SPDX-License-Identifier: Apache-2.0
"""Which requests vLLM computes itself to audit a producer, when the comparison begins, and that its pages are there as
long as it lasts: with vLLM's own scheduler."""

import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from support.vllm_steps import PAGE, SteppedEngine
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from pd_connector.agent.commands import Distrust, Drop
from pd_connector.errors import Cause
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.vllm.handoff import audits
from pd_connector.vllm.messages import AuditReport, WorkerActivity

FULL = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=1, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=PAGE, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=64
)


def report(request: str, cause: Cause | None = None) -> WorkerActivity:
    engines = () if cause is None else ("producer",)
    return WorkerActivity(audits=(AuditReport(request, cause, engines, "why"),))


def loads(engine: SteppedEngine) -> list[Load]:
    return [command for command in engine.commands if isinstance(command, Load)]


def drops(engine: SteppedEngine) -> list[str]:
    return [command.request for command in engine.commands if isinstance(command, Drop)]


def passed(engine: SteppedEngine) -> None:
    """An audit of the producer passes."""
    engine.fetch("first", 40, 2, seed=99)
    while not loads(engine):
        engine.step()
    engine.step(report("first"))
    while engine.scheduler.requests:
        engine.step()
    engine.commands.clear()


def test_the_first_prompt_is_computed_and_compared_with_all_of_its_pages() -> None:
    engine = SteppedEngine()
    engine.fetch("a", 150)  # three steps
    for _ in range(3):
        engine.step()
        assert not loads(engine), "its end is computed with this step"
    engine.step()
    (load,) = loads(engine)
    assert load.compares
    assert (load.first_token, load.stop_token) == (0, 149)
    assert [list(table) for table in load.pages] == [engine.pages("a")[0][:10]]
    assert not drops(engine)
    engine.step(report("a"))
    while engine.scheduler.requests:
        engine.step()
    assert not drops(engine)
    engine.assert_nothing_held()
    engine.fetch("b", 150, seed=3)
    engine.step()
    assert [load.compares for load in loads(engine)] == [True, False], "it is believed now"


def test_what_ends_before_it_was_compared_keeps_its_pages_until_then() -> None:
    engine = SteppedEngine()
    engine.fetch("a", 40, 1)
    engine.step()
    assert "a" in engine.scheduler.requests, "kept"
    kept = engine.pages("a")
    assert engine.side.pending_work, "steps go on without requests"
    engine.step()
    (load,) = loads(engine)
    assert [list(table) for table in load.pages] == [kept[0][:3]]
    engine.step()
    assert engine.scheduler.requests
    engine.step(report("a"))
    engine.step()
    assert not engine.side.pending_work
    engine.assert_nothing_held()


def test_pages_are_not_kept_for_ever() -> None:
    engine = SteppedEngine(stall_timeout_s=0.001)
    engine.fetch("a", 40, 1)
    for _ in range(50):
        engine.step()
        if not engine.scheduler.requests:
            break
    assert drops(engine) == ["a"], "nobody reads them any more before they are free"
    engine.assert_nothing_held()


def test_others_are_computed_until_one_has_passed_and_short_ones_show_too_little() -> None:
    engine = SteppedEngine(budget=512)
    engine.fetch("short", 2 * PAGE, seed=1)  # the last token is computed in any case
    engine.fetch("a", 60, seed=2)
    engine.fetch("b", 60, seed=3)
    engine.step()
    engine.step()
    assert [load.request for load in loads(engine)] == ["a"]
    assert drops(engine) == ["short", "b"]


@pytest.mark.parametrize("how", ["aborted", "unreachable", "preempted"])
def test_if_it_comes_to_no_end_the_next_one_is_audited(how: str) -> None:
    engine = SteppedEngine()
    engine.fetch("a", 40, 50, seed=1)
    engine.step()
    if how == "aborted":
        engine.abort("a")
    elif how == "preempted":
        request = engine.scheduler.requests["a"]
        engine.scheduler.running.remove(request)
        engine.scheduler._preempt_request(request, 0.0)
        engine.scheduler.reset_preempted_req_ids.add("a")
    else:
        engine.step()
        engine.step(report("a", Cause.UNREACHABLE))
    engine.step()
    assert drops(engine) == ["a"]
    engine.fetch("b", 40, seed=2)
    engine.step()
    engine.step()
    assert loads(engine)[-1].request == "b"
    assert loads(engine)[-1].compares


def test_a_mismatch_is_told_to_all_ranks_and_the_producer_is_asked_again_only_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = SteppedEngine()
    engine.fetch("a", 40, 30, seed=1)
    engine.step()
    engine.step()
    engine.step(report("a", Cause.AUDIT))
    told = engine.step()
    assert [c for c in told if isinstance(c, Distrust)] == [Distrust("producer", "why")]
    later = time.monotonic() + 60
    engine.fetch("b", 40, seed=2)
    engine.step()
    assert drops(engine) == ["a", "b"]
    monkeypatch.setattr(audits, "time", SimpleNamespace(monotonic=lambda: later))
    engine.fetch("c", 40, seed=3)
    engine.step()
    engine.step()
    assert loads(engine)[-1].request == "c"
    assert loads(engine)[-1].compares, "it may have restarted"


def test_with_two_ranks_both_have_to_pass() -> None:
    engine = SteppedEngine()
    engine.side._fetching.audits._ranks = 2
    engine.fetch("a", 40, 30, seed=1)
    engine.step()
    engine.step()
    engine.step(report("a"))
    engine.fetch("b", 40, seed=2)
    engine.step(report("a"))
    assert drops(engine) == ["b"], "one rank is not enough"
    engine.fetch("c", 40, seed=3)
    engine.step()
    assert not loads(engine)[-1].compares


def test_it_is_believed_when_every_path_of_its_kv_has_passed() -> None:
    engine = SteppedEngine()
    engine.side._fetching.audits._ranks = 2
    engine.fetch("a", 40, 30, seed=1)
    engine.step()
    engine.step()
    engine.step(report("a", Cause.UNAUDITED))
    assert not drops(engine), "the other rank goes on"
    engine.step(report("a"))
    engine.fetch("b", 40, 30, seed=2)
    engine.step()
    engine.step()
    assert [load.compares for load in loads(engine)] == [True, True], "by the other path"
    engine.step(report("b"))
    engine.step(report("b"))
    engine.fetch("c", 40, seed=3)
    engine.step()
    assert not loads(engine)[-1].compares


def test_whom_a_rank_does_not_believe_any_more_is_audited_again() -> None:
    engine = SteppedEngine(budget=512)
    passed(engine)
    engine.fetch("a", 40, seed=1)
    engine.step()
    (load,) = loads(engine)
    assert not load.compares
    engine.step(
        WorkerActivity(unaudited=frozenset({"a"})),
        finished_recving={"a"},
        failed_recving={"a"},
    )
    engine.fetch("b", 40, seed=2)
    engine.step()
    engine.step()
    assert loads(engine)[-1].request == "b"
    assert loads(engine)[-1].compares


def test_a_part_of_later_ones_is_audited_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SteppedEngine(audit=0.5)
    passed(engine)
    chances = iter([0.7, 0.2, 0.3])
    monkeypatch.setattr(audits, "random", SimpleNamespace(random=lambda: next(chances)))
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        engine.fetch(name, 40, seed=seed)
    engine.step()
    engine.step()
    assert [(load.request, load.compares) for load in loads(engine)] == [
        ("a", False),
        ("c", False),  # one at a time
        ("b", True),
    ]


def test_it_can_be_switched_off() -> None:
    engine = SteppedEngine(audit="off")
    engine.fetch("a", 40)
    engine.step()
    (load,) = loads(engine)
    assert not load.compares


def test_each_adapter_is_audited_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SteppedEngine()
    passed(engine)
    monkeypatch.setattr(engine.side.identity.adapters, "name", lambda request: "an adapter")
    engine.fetch("a", 40, seed=1)
    engine.step()
    engine.step()
    (load,) = loads(engine)
    assert (load.compares, load.adapter) == (True, "an adapter")
    engine.step(report("a", Cause.AUDIT))
    engine.step()
    told = [command for command in engine.commands if isinstance(command, Distrust)]
    assert told == [Distrust("producer", "why", "an adapter")], "for all ranks"


def test_what_is_cached_here_is_not_compared() -> None:
    """It may have come from the same producer."""
    engine = SteppedEngine(budget=512)
    engine.add("before", 64, 1)
    engine.step()
    engine.fetch("a", 150)
    engine.step()
    engine.step()
    (load,) = loads(engine)
    assert (load.first_token, load.stop_token) == (64, 149)


@pytest.mark.parametrize("specs", [[WINDOW], [FULL, WINDOW]], ids=["windows", "some windows"])
@pytest.mark.parametrize("tokens", range(100, 100 + PAGE))
def test_no_page_is_compared_that_a_window_has_passed(specs: list[object], tokens: int) -> None:
    """After every step, what a comparison may read is the request's own."""
    engine = SteppedEngine(specs=specs, budget=48)
    engine.fetch("a", tokens, 100)
    compared: Load | None = None
    seen = 0
    for _ in range(60):
        told = engine.step()
        compared = next((one for one in told if isinstance(one, Load)), compared)
        if any(isinstance(one, Drop) for one in told):
            compared = None
        if compared is not None:
            own = engine.pages("a")
            for table, pages in zip(own, compared.pages, strict=True):
                for mine, listed in zip(table, pages, strict=False):
                    assert listed in (-1, mine)
            assert all(max(table) > 0 for table in compared.pages)
            seen += 1
    assert seen > PAGE, "there is time to compare"
