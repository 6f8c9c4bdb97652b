# SPDX-License-Identifier: Apache-2.0
"""A sliding window begins within a page, and only its tokens are loaded; vLLM takes the page for a full one. Requests
that begin alike do not find it in the prefix cache."""

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from support.vllm_computing import ComputingEngine, answered, full, until_over, window
from support.vllm_steps import PAGE

from pd_connector.protocol.wire.params import prefill_params
from pd_connector.vllm.pages.partial import PartialPages

Engines = tuple[ComputingEngine, ComputingEngine]
WINDOW = 40


@pytest.fixture
def pair() -> Iterator[Engines]:
    """Engines whose pages look unlike: KV passes token by token."""
    specs = [full(), window(WINDOW)]
    prefill = ComputingEngine("prefill", "kv_producer", specs=specs, layout="one")
    decode = ComputingEngine("decode", "kv_consumer", specs=specs, layout="other")
    yield prefill, decode
    decode.close()
    prefill.close()


def used_by_the_next(pair: Engines, tokens: int, *, aborted: bool = False) -> list[str]:
    """What was wrong of what a second request used that has the same prompt, without its last token."""
    prefill, decode = pair
    prefill.add("p", tokens, 1, **prefill_params())
    until_over([prefill], lambda: "p" in prefill.ended)
    params = prefill.answers["p"]
    assert params is not None
    decode.add("a", tokens, 1, **params)
    if aborted:
        until_over([decode], lambda: decode.scheduler.finished_recving_kv_req_ids)
        decode.scheduler._handle_blocked_waiting_request(decode.scheduler.requests["a"])
        decode.abort("a")
    else:
        until_over([decode], lambda: "a" in decode.ended)
    assert decode.agent.telemetry.take().counts[("received_transfers", ())] == 1
    second = decode.add("b", tokens - 1, 4)
    until_over(pair, lambda: "b" in decode.ended and not decode.scheduler.requests)
    assert list(second.output_token_ids) == answered(second)
    decode.assert_nothing_held()
    return decode.wrong


@pytest.mark.parametrize("tokens", range(96, 96 + PAGE))
def test_what_the_next_one_uses_is_right(pair: Engines, tokens: int) -> None:
    assert used_by_the_next(pair, tokens) == []


def test_also_where_the_first_one_left_before_it_ran(pair: Engines) -> None:
    assert used_by_the_next(pair, 100, aborted=True) == []


def test_also_while_the_first_one_finds_no_room(
    pair: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has cached its pages, and another request may come first in the next step."""
    prefill, decode = pair
    prefill.add("p", 100, 1, **prefill_params())
    until_over([prefill], lambda: "p" in prefill.ended)
    params = prefill.answers["p"]
    assert params is not None
    decode.add("a", 100, 1, **params)
    until_over([decode], lambda: decode.scheduler.finished_recving_kv_req_ids)
    manager = decode.scheduler.kv_cache_manager
    with monkeypatch.context() as full_cache:
        full_cache.setattr(manager, "allocate_slots", lambda *_, **__: None)
        decode.step()
    (page,) = decode.side._fetching._partial_pages._loaded["a"]
    cached = [manager.block_pool.blocks[page + more].block_hash for more in (0, 1)]
    assert cached[0] is None
    assert cached[1] is not None, "the step has cached what was loaded"
    until_over([decode], lambda: "a" in decode.ended)
    assert decode.wrong == []


@pytest.mark.parametrize("aborted", [False, True])
def test_left_in_the_cache_the_page_would_be_used(
    pair: Engines, monkeypatch: pytest.MonkeyPatch, *, aborted: bool
) -> None:
    monkeypatch.setattr(PartialPages, "load", lambda *_: None)
    assert used_by_the_next(pair, 100, aborted=aborted)
