# SPDX-License-Identifier: Apache-2.0
"""Two prompts of one step begin alike: the second finds pages in the prefix cache that this very step computes. They
are not sent before that."""

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("vllm")

from support.vllm_computing import ComputingEngine, answered, until_over
from support.vllm_steps import OFFER, PAGE, SteppedEngine

from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire.params import decode_params, prefill_params
from pd_connector.vllm.handoff import streaming

Engines = tuple[ComputingEngine, ComputingEngine]


@pytest.fixture
def pair() -> Iterator[Engines]:
    """A prefill engine whose steps take their time, and a decode engine that has a session with it."""
    options = {"budget": 4096, "blocks": 400, "defer_pages": False}
    prefill = ComputingEngine("prefill", "kv_producer", **options)
    decode = ComputingEngine("decode", "kv_consumer", **options)
    hand_over(prefill, decode, "first", 40, seed=5)
    until_over((prefill, decode), lambda: "first" in decode.ended)
    prefill.pause_s = 0.1
    yield prefill, decode
    decode.close()
    prefill.close()


def hand_over(
    prefill: ComputingEngine, decode: ComputingEngine, name: str, tokens: int, seed: int = 0
) -> Callable[[], bool]:
    """Both engines get a request at once; returns whether the decode engine's answer is the right one."""
    prefill.add(name, tokens, 1, seed, **prefill_params(name))
    asked = decode.add(name, tokens, 4, seed, **decode_params(prefill.side.offers.address, name))
    return lambda: list(asked.output_token_ids) == answered(asked)


def both(pair: Engines) -> list[str]:
    prefill, decode = pair
    hand_over(prefill, decode, "a", 1600)
    right = hand_over(prefill, decode, "b", 1900)
    decode.step()
    until_over(pair, lambda: decode.ended.keys() >= {"a", "b"})
    assert right()
    return decode.wrong


def test_kv_of_the_second_is_what_the_first_computes(pair: Engines) -> None:
    assert both(pair) == []


def test_taken_for_computed_pages_would_be_sent_as_they_were_before(
    pair: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_all_computed_before", lambda output: True)
    assert both(pair)


def offered(engine: SteppedEngine) -> dict[str, int]:
    """Tokens that are on offer when a step begins."""
    return {told.request: told.tokens for told in engine.step() if isinstance(told, Offer)}


def test_what_was_cached_before_is_on_offer_at_once_where_a_prompt_is_alone_in_its_step() -> None:
    engine = SteppedEngine(budget=512)
    engine.add("before", 200, 1)
    engine.step()
    engine.add("a", 300, **OFFER, transfer_id="a")
    assert offered(engine) == {"a": 200 // PAGE * PAGE}


def test_after_its_first_step_everything_before_is_on_offer() -> None:
    engine = SteppedEngine(budget=512)
    engine.add("a", 300, **OFFER, transfer_id="a")
    engine.add("b", 900, **OFFER, transfer_id="b")
    assert offered(engine) == {"a": 0, "b": 0}
    assert offered(engine) == {"b": 300 // PAGE * PAGE + 512 - 300}
