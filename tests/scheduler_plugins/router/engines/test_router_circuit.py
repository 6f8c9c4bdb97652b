# SPDX-License-Identifier: Apache-2.0
"""Engines that fail requests although they are healthy get a pause; retries have a budget."""

from random import Random

import pytest
from router_fakes import World, answer, run, slow, status

from scheduler_plugins.router.engines import circuit as circuit_module
from scheduler_plugins.router.engines.circuit import (
    BUDGET,
    FAILURES,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SAVED,
    Circuit,
    RetryBudget,
)


def opened(causes: int = 1) -> Circuit:
    circuit = Circuit(Random(0))
    for _ in range(FAILURES):
        for cause in range(causes):
            circuit.failed(f"cause{cause}", 0.0)
    return circuit


def test_failures_of_one_cause_in_a_row_open_it() -> None:
    circuit = Circuit(Random(0))
    for n in range(FAILURES - 1):
        assert not circuit.failed("status_500", 0.0)
        assert not circuit.failed(f"other{n}", 0.0)
    assert circuit.lets_pass(0.0)
    assert circuit.failed("status_500", 0.0)
    assert not circuit.lets_pass(0.0)
    assert circuit.cause == "status_500"


def test_a_success_in_between_begins_anew() -> None:
    circuit = Circuit(Random(0))
    for _ in range(3):
        for _ in range(FAILURES - 1):
            assert not circuit.failed("status_500", 0.0)
        circuit.succeeded()
    assert circuit.lets_pass(0.0)


def test_half_open_one_request_tries() -> None:
    circuit = opened()
    assert circuit.lets_pass(FIRST_PAUSE_S)
    circuit.sent()
    assert not circuit.lets_pass(FIRST_PAUSE_S)
    circuit.given_up()  # the client left: the next one may try
    assert circuit.lets_pass(FIRST_PAUSE_S)
    circuit.sent()
    circuit.succeeded()
    assert circuit.lets_pass(FIRST_PAUSE_S)
    assert circuit.cause == ""


def test_pauses_double_up_to_a_limit_and_are_never_equal() -> None:
    circuit, now, pauses = opened(), 0.0, []
    for _ in range(10):
        begin = now
        while not circuit.lets_pass(now):
            now += 0.01
        pauses.append(now - begin)
        circuit.sent()
        assert circuit.failed("status_500", now)
    assert FIRST_PAUSE_S / 2 <= pauses[0] <= FIRST_PAUSE_S + 0.02
    assert max(pauses) <= LONGEST_PAUSE_S + 0.02
    assert pauses[4] > 2 * pauses[1]
    other = Circuit(Random(1))
    for _ in range(FAILURES):
        other.failed("status_500", 0.0)
    assert other._until_s != opened()._until_s


def test_an_engine_may_fail_for_days() -> None:
    circuit, now_s = Circuit(), 0.0
    for _ in range(FAILURES + 3000):
        circuit.failed("status_500", now_s)
        now_s += LONGEST_PAUSE_S
    assert not circuit.lets_pass(now_s - LONGEST_PAUSE_S)
    assert circuit.lets_pass(now_s)
    circuit.succeeded()
    assert circuit.lets_pass(now_s)


def test_retries_are_a_share_of_all_requests() -> None:
    budget = RetryBudget()
    assert sum(budget.allows("status_500") for _ in range(100)) == SAVED
    allowed = 0
    for _ in range(1000):
        budget.request()
        allowed += budget.allows("status_500")
    assert abs(allowed - 1000 * BUDGET) <= 1
    assert budget.allows("died"), "an engine that died fails its requests once, and none again"


def test_an_engine_that_fails_again_and_again_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(circuit_module, "FIRST_PAUSE_S", LONGEST_PAUSE_S)  # for all of the test

    async def scenario() -> None:
        async with World(decode=2, attempts=2) as world:
            world.d[0].behave = status(500)
            for _ in range(40):
                assert (await world.complete()).status == 200
            assert len(world.d[0].bodies) <= FAILURES + 2
            assert await world.metric("circuit_opened_total", cause="status_500") >= 1
            (state,) = [
                engine
                for engine in (await world.get("/health")).json["engines"]
                if engine["url"] == world.d[0].url
            ]
            assert state["circuit"] == "status_500"
            known = world.known(world.d[0])
            known.forget_metrics()
            left = (await world.get("/metrics")).text
            assert f'circuit_opened_total{{cause="status_500",engine="{known.url}"' not in left, (
                "pods come and go: a series for each that ever was would never end"
            )

    run(scenario())


def test_if_all_engines_are_paused_they_are_asked_all_the_same() -> None:
    async def scenario() -> None:
        async with World(decode=1, attempts=1) as world:
            world.d[0].behave = status(500)
            for _ in range(FAILURES + 2):
                assert (await world.complete()).status == 503
            world.d[0].behave = answer
            assert (await world.complete()).status == 200

    run(scenario())


def test_when_nothing_but_failing_engines_is_left_retries_end() -> None:
    async def scenario() -> None:
        async with World(prefill=1, decode=3) as world:
            for engine in world.d:
                engine.behave = status(500)
            for _ in range(40):
                assert (await world.complete()).status == 503
            asked = sum(len(engine.bodies) for engine in world.d)
            assert asked <= 40 + SAVED + 40 * BUDGET + 1

    run(scenario())


def test_requests_that_are_wrong_in_themselves_say_nothing_of_an_engine() -> None:
    """A client that sends one again and again must not take prefill engines from the others."""

    async def scenario() -> None:
        async with World(prefill=2) as world:
            for engine in (*world.p, *world.d):
                engine.behave = status(400)
            for _ in range(4 * FAILURES):
                assert (await world.complete()).status == 400
            assert [world.known(engine).circuit.cause for engine in world.p] == ["", ""]
            world.d[0].behave = slow(
                0.01
            )  # it takes what prefill engines refuse: they may have shorter contexts
            for _ in range(2 * FAILURES):
                assert (await world.complete()).status == 200
            assert [world.known(engine).circuit.cause for engine in world.p] == ["", ""]

    run(scenario())
