# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler takes requests in our order, and keeps its own rules otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from sched_connectors import Loads
from sched_rig import BLOCK, Rig, words
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from scheduler_plugins.qos.request_id import with_class
from scheduler_plugins.vllm.request_queue import qos_of

CLASSES = """
  qos_classes:
    - {name: premium, reserved_fraction: 0.5, priority: 9}
    - {name: free, reserved_fraction: 0.5, priority: 1}
"""
REMOTE = {"do_remote_prefill": True}


@pytest.fixture
def section(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Additional config with a section `scheduler`."""

    def write(text: str) -> dict[str, str]:
        path = tmp_path / "scheduler.yaml"
        path.write_text(f"scheduler:\n{text}\n")
        return {"pd_scheduler": str(path)}

    return write


def started_before(rig: Rig, name: str) -> list[str]:
    """The requests that started before one, in that order."""
    order = list(dict.fromkeys(one for step in rig.worker.steps for one in step))
    return order[: order.index(name)]


def test_cheaper_requests_go_first() -> None:
    rig = Rig(seqs=1)
    for name, tokens in (("long", 120), ("short", 20), ("middle", 60)):
        rig.add(name, words(tokens, tokens))
    assert rig.run() == ["short", "middle", "long"]
    rig.assert_served()


def test_vllms_own_scheduler_would_take_them_as_they_come() -> None:
    rig = Rig(Scheduler, seqs=1)
    for name, tokens in (("long", 120), ("short", 20), ("middle", 60)):
        rig.add(name, words(tokens, tokens))
    assert rig.run() == ["long", "short", "middle"]
    rig.assert_served()


def test_a_request_whose_prefix_gets_cached_moves_up_at_once() -> None:
    rig = Rig(seqs=1)
    profile = words(1, 160)
    rig.add("first", profile)
    rig.step()
    rig.add("other", words(2, 100))
    rig.add("shares", profile + words(3, 10))
    assert rig.run() == ["first", "shares", "other"]
    rig.assert_served()


def test_without_prefix_caching_nothing_is_cheaper_for_having_been_computed() -> None:
    rig = Rig(seqs=1, caching=False)
    profile = words(1, 160)
    rig.add("first", profile)
    rig.step()
    rig.add("other", words(2, 100))
    rig.add("shares", profile + words(3, 10))
    assert rig.run() == ["first", "other", "shares"]
    rig.assert_served()


def test_the_class_is_named_in_the_extra_arguments_and_an_unknown_one_is_the_lowest(
    section,
) -> None:
    rig = Rig(seqs=1, additional=section("  policy: fcfs" + CLASSES))
    rig.add("unknown", words(1, 20), qos="gold")
    rig.add("none", words(2, 20))
    rig.add("premium", words(3, 20), qos="premium")
    assert rig.run() == ["premium", "unknown", "none"]


def test_vllms_priority_flag_orders_by_the_clients_priority() -> None:
    rig = Rig(seqs=1, policy="priority")
    rig.add("late", words(1, 20), priority=5)
    rig.add("early", words(2, 90), priority=-1)
    assert rig.run() == ["early", "late"]


def test_the_policy_of_a_file_goes_before_the_flag(section) -> None:
    rig = Rig(seqs=1, policy="priority", additional=section("  policy: fcfs"))
    rig.add("first", words(1, 90), priority=5)
    rig.add("second", words(2, 20), priority=-1)
    assert rig.run() == ["first", "second"]


def test_prefill_only_gives_a_request_for_one_token_a_batch_by_itself(section) -> None:
    rig = Rig(budget=64, additional=section("  policy: prefill_only"))
    for n in range(3):
        rig.add(f"one{n}", words(n, 40))
    rig.add("many", words(9, 12), 3)
    rig.run()
    for step in rig.worker.steps:
        assert sum(name.startswith("one") for name in step) <= 1
        assert sum(count > 1 for count in step.values()) <= 1, "beside it others may only decode"
    rig.assert_served()


def test_a_batch_by_itself_is_not_held_up_by_a_request_that_cannot_start(section) -> None:
    rig = Rig(additional=section("  policy: prefill_only"))
    Loads(rig)
    rig.add("waits for its KV", words(1, 10), kv=REMOTE)
    rig.add("can run", words(2, 90))
    assert rig.step() == {"can run": 64}


def test_what_is_turned_back_keeps_its_place_and_gets_its_turn(section) -> None:
    """A big request comes first, but there is never room for it while small ones are let in."""
    rig = Rig(
        blocks=11,
        max_model_len=160,
        seqs=3,
        additional=section("  policy: fcfs\n  max_overtaken: 4"),
    )
    rig.add("running", words(0, 30), 40)
    rig.step()
    rig.add("big", words(1, 140))
    started = []
    for n in range(12):
        rig.add(f"small{n}", words(10 + n, 10), 3, qos="unheard of")
        started += [name for name in rig.step() if name not in started]
    assert started == ["running"], "vLLM ends its scan at a request that it has no room for"
    rig.run()
    rig.assert_served()


@pytest.mark.parametrize(("bound", "overtaken"), [(2, 2), (256, 12)])
def test_another_class_may_take_the_room_that_a_big_request_waits_for_only_so_often(
    section, bound: int, overtaken: int
) -> None:
    text = f"  policy: fcfs\n  max_overtaken: {bound}{CLASSES}"
    rig = Rig(blocks=11, max_model_len=160, seqs=3, additional=section(text))
    rig.add("running", words(0, 30), 60, qos="premium")
    rig.step()
    rig.add("big", words(1, 140), qos="free")
    rig.step()  # turned back
    # Premium has credit while hardly any of the work that is given out is its own.
    rig.set_balances({"premium": 1e9})
    for n in range(12):
        rig.add(f"small{n}", words(10 + n, 10), 2, qos="premium")
        rig.step()
    rig.run()
    assert sum(name.startswith("small") for name in started_before(rig, "big")) == overtaken
    rig.assert_served()


def test_a_request_that_waits_for_its_grammar_is_passed_by_and_comes_first_then() -> None:
    rig = Rig(seqs=1)
    waits = rig.request("waits", words(1, 20))
    waits.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    waits.structured_output_request = SimpleNamespace(grammar=None)
    rig.scheduler.add_request(waits)
    rig.add("runs", words(2, 70))
    rig.add("later", words(3, 90))
    assert rig.step() == {"runs": 64}
    waits.structured_output_request = None
    waits.status = RequestStatus.WAITING
    assert rig.run() == ["runs", "waits", "later"]
    rig.assert_served()


def test_a_class_loses_no_credit_by_requests_that_are_tried_in_vain(section) -> None:
    rig = Rig(additional=section("  policy: fcfs" + CLASSES))
    shares = rig.order.fair_share
    rig.set_balances({"premium": 1.0})
    Loads(rig)
    rig.add("waits", words(1, 50), kv=None, qos="free").kv_transfer_params = REMOTE
    for _ in range(50):
        rig.step()
    assert shares.balance_s("premium") == pytest.approx(1.0)
    assert shares.balance_s("free") == pytest.approx(0.0)


def test_lora_limits_hold_and_who_was_passed_by_keeps_its_place() -> None:
    rig = Rig(seqs=4, budget=32)
    rig.scheduler.lora_config = SimpleNamespace(max_loras=1)
    adapters = [LoRARequest(f"adapter{n}", n, "/nowhere") for n in (1, 2)]
    rig.add("a1", words(1, 20), 3, lora=adapters[0])
    rig.add("b", words(2, 22), 3, lora=adapters[1])
    rig.add("a2", words(3, 24), 3, lora=adapters[0])
    rig.run()
    for step in rig.worker.steps:
        assert not ("b" in step and ("a1" in step or "a2" in step))
    rig.assert_served()


def test_a_request_that_loads_its_kv_costs_nothing_here() -> None:
    rig = Rig(seqs=1)
    loads = Loads(rig)
    loads.ready = True
    rig.add("short", words(1, 20))
    rig.add("loads", words(2, 100), 2, kv=REMOTE)
    rig.step()
    assert len(rig.scheduler.kv_holding_waiting) == 1
    rig.step(loads.arrive("loads"))
    rig.run()
    rig.assert_served()
    assert rig.worker.computed_tokens == 20 + 2


def test_kv_that_did_not_come_is_computed_here() -> None:
    rig = Rig(seqs=2)
    loads = Loads(rig)
    loads.ready = True
    rig.add("loads", words(2, 100), 2, kv=REMOTE)
    rig.step()
    rig.step(loads.arrive("loads", failed=True))
    rig.run()
    rig.assert_served()
    assert rig.worker.computed_tokens == 100 + 1


def test_a_request_can_be_aborted_wherever_it_is(section) -> None:
    rig = Rig(seqs=2, additional=section("  policy: srjf"))
    loads = Loads(rig)
    rig.add("running", words(1, 20), 9)
    rig.step()
    rig.add("asks again", words(2, 20), kv=REMOTE)
    rig.step()
    rig.abort("asks again")
    loads.ready = True
    rig.add("waiting", words(3, 20))
    rig.abort("waiting")
    rig.abort("running")
    rig.run()
    rig.assert_served()


def test_what_was_preempted_comes_back_first_of_its_class() -> None:
    rig = Rig(seqs=2)
    rig.add("a", words(1, 100), 4)
    rig.step()
    rig.add("b", words(2, 20))
    rig.add("c", words(3, 40), 2)
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert next(iter(rig.scheduler.waiting)).request_id == "a"
    rig.run()
    rig.assert_served()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prefill_gives_way_to_a_class_that_is_owed_and_computes_nothing_twice(
    section, depth: int
) -> None:
    rig = Rig(budget=64, depth=depth, additional=section("  policy: fcfs" + CLASSES))
    rig.add("long", words(1, 320), qos="free")
    rig.step()
    rig.add("owed", words(2, 48), qos="premium")
    rig.set_balances({"premium": 0.5})
    assert "owed" in rig.step(), "the long prefill takes what is left of the budget"
    rig.run()
    rig.assert_served()
    assert rig.ended == ["owed", "long"]
    assert rig.worker.computed_tokens == 320 + 48


@pytest.mark.parametrize(
    ("left", "owed", "step"),
    [
        (48, 60, {"owed": 60}),  # shielded: "long" does not join its step
        (48, 16, {"long": 48, "owed": 16}),  # it fits beside the rest
        (32, 60, {"long": 32, "owed": 32}),  # so little is left that it would be computed again
    ],
)
def test_the_rest_of_a_prefill_gives_way_to_what_does_not_fit_beside_it(
    section, left: int, owed: int, step: dict[str, int]
) -> None:
    rig = Rig(budget=64, additional=section("  policy: fcfs" + CLASSES))
    rig.add("long", words(1, 64 + left), qos="free")
    rig.step()
    rig.add("owed", words(2, owed), qos="premium")
    rig.set_balances({"premium": 0.5})
    assert rig.step() == step
    rig.run()
    rig.assert_served()


def test_a_prefill_that_has_a_batch_by_itself_gives_way_too(section) -> None:
    rig = Rig(budget=64, additional=section("  policy: prefill_only" + CLASSES))
    rig.add("long", words(1, 320), qos="free")
    rig.step()
    rig.add("owed", words(2, 48), qos="premium")
    rig.set_balances({"premium": 0.5})
    assert rig.step() == {"owed": 48}
    rig.run()
    rig.assert_served()
    assert rig.worker.computed_tokens == 320 + 48


def test_a_prefill_does_not_give_way_where_its_work_would_be_lost(section) -> None:
    rig = Rig(budget=64, caching=False, additional=section("  policy: fcfs" + CLASSES))
    rig.add("long", words(1, 320), qos="free")
    rig.step()
    rig.add("owed", words(2, 48), qos="premium")
    rig.set_balances({"premium": 0.5})
    assert rig.step() == {"long": 64}


def test_a_prefill_gives_way_to_a_request_that_cannot_start_only_once(section) -> None:
    rig = Rig(budget=64, additional=section("  policy: fcfs" + CLASSES))
    Loads(rig)
    rig.add("long", words(1, 320), qos="free")
    rig.step()
    rig.add("owed", words(2, 48), qos="premium", kv=REMOTE)
    rig.set_balances({"premium": 0.5})
    for _ in range(4):
        rig.step()
    assert rig.scheduler.requests.get("long") is None or (
        rig.scheduler.requests["long"].num_preemptions == 1
    )
    assert rig.answers["long"]


def test_an_empty_queue_has_no_head() -> None:
    waiting = Rig().scheduler.waiting
    assert not waiting
    with pytest.raises(IndexError):
        waiting.peek_request()
    with pytest.raises(IndexError):
        waiting.pop_request()


def test_a_request_that_is_added_again_takes_the_place_of_itself() -> None:
    rig = Rig()
    request = rig.add("a", words(1, BLOCK))
    rig.scheduler.waiting.add_request(request)
    rig.scheduler.waiting.prepend_request(request)
    assert len(rig.scheduler.waiting) == 1
    with pytest.raises(ValueError, match="is not waiting"):
        rig.scheduler.waiting.remove_request(rig.request("b", words(2, 5)))
    del rig.asked["b"]
    rig.run()
    rig.assert_served()


def test_a_pooling_request_has_the_class_in_its_id(section) -> None:
    rig = Rig(additional=section("  policy: fcfs" + CLASSES))
    for name, qos in (("a", "free"), ("b", "premium"), ("c", "none")):
        generation = rig.request(name, words(ord(name), 20))
        del rig.asked[name]
        request = Request(
            request_id=f"embd-{with_class(name, qos)}-0-1a2b3c4d",
            prompt_token_ids=list(generation.prompt_token_ids),
            sampling_params=None,
            pooling_params=PoolingParams(task="embed"),
            arrival_time=generation.arrival_time,
        )
        assert qos_of(request) == qos
        rig.scheduler.waiting.add_request(request)
    rig.set_balances({"premium": 1.0})
    assert "premium" in rig.scheduler.waiting.peek_request().request_id


@pytest.mark.parametrize("odd", ["text", 5, [1], {"do_remote_prefill": 0}])
def test_transfer_parameters_of_any_type_stop_no_engine(odd: object) -> None:
    """Clients can write them (`vllm_xargs` takes texts, numbers and lists)."""
    rig = Rig()
    rig.add("odd", words(1, 50), kv=odd)
    rig.add("plain", words(2, 50))
    rig.run()
