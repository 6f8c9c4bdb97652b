# SPDX-License-Identifier: Apache-2.0
"""An engine behind a proxy that asks for no handoff says so, though nothing fails."""

import logging
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.vllm_steps import FETCH, OFFER, PAGE, SteppedEngine

from pd_connector.telemetry import Telemetry
from pd_connector.vllm.handoff.no_handoff_requests import PAUSE_S, NoHandoffRequests


def counted(telemetry: Telemetry) -> dict[tuple[str, str], float]:
    snapshot = telemetry.take()
    found = snapshot.counts if snapshot else {}
    return {(name, dict(labels).get("cause", "")): n for (name, labels), n in found.items()}


def counts_of(
    *requests: tuple[int, Mapping[str, Any] | None], role: str = "kv_both"
) -> dict[tuple[str, str], float]:
    """What an engine counts for requests of this many tokens, with these parameters."""
    engine = SteppedEngine(role)
    for number, (tokens, params) in enumerate(requests):
        engine.add(f"r{number}", tokens, **(params or {}))
    return counted(engine.side.telemetry)


@pytest.mark.parametrize(("role", "told"), [("kv_both", 0), ("kv_consumer", 1)])
def test_an_engine_that_has_a_pool_and_both_roles_may_serve_without_a_proxy(
    role: str, told: int
) -> None:
    engine = SteppedEngine(role, pool={"memory": "64MiB"})
    engine.add("a", PAGE + 1)
    assert counted(engine.side.telemetry).get(("unmoved_prompts", "no_params"), 0) == told


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer", "kv_producer"])
def test_a_long_prompt_without_parameters_is_counted_and_told(
    role: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "pd_connector.vllm"):
        assert counts_of((PAGE + 1, None), role=role) == {("unmoved_prompts", "no_params"): 1}
    assert "the proxy in front sends no kv_transfer_params" in caplog.text


def test_parameters_that_ask_for_nothing_are_counted_apart() -> None:
    asked = counts_of((PAGE + 1, {"do_remote_decode": False}), (PAGE + 1, {"prefill_addr": "x"}))
    assert asked == {("unmoved_prompts", "nothing_asked"): 2}


def test_a_prompt_of_one_page_has_nothing_to_move() -> None:
    assert counts_of((PAGE, None)) == {}


@pytest.mark.parametrize("asks", [OFFER, {**FETCH, "remote_request_id": "t"}])
def test_once_a_proxy_has_asked_nothing_is_said(
    asks: Mapping[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Short prompts, and those that a router keeps where they are, carry no parameters."""
    with caplog.at_level(logging.WARNING, "pd_connector.vllm"):
        found = counts_of((PAGE + 1, asks), (PAGE + 1, None))
    assert found[("unmoved_prompts", "no_params")] == 1, "they are counted all the same"
    assert "no KV has moved" not in caplog.text


@pytest.mark.parametrize(
    ("role", "asks"),
    [("kv_consumer", OFFER), ("kv_both", {"do_remote_prefill": True})],
)
def test_parameters_that_cannot_be_followed_do_not_count_as_asked(
    role: str, asks: Mapping[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "pd_connector.vllm"):
        counts_of((PAGE + 1, asks), (PAGE + 1, None), role=role)
    assert "no KV has moved" in caplog.text


def test_a_decode_engine_that_is_asked_for_its_address_counts_nothing() -> None:
    """`pd-connector doctor` asks it so."""
    assert counts_of((PAGE + 1, {**OFFER, "describe": True}), role="kv_consumer") == {}


def test_it_is_said_once_a_minute_at_most(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    no_handoff = NoHandoffRequests(Telemetry(), PAGE, lambda: now[0])
    for _ in range(500):
        no_handoff.note(PAGE + 1, None)
    assert len(caplog.records) == 1
    now[0] += PAUSE_S
    no_handoff.note(PAGE + 1, None)
    assert "The last of 500 prompts" in caplog.records[-1].getMessage()
