# SPDX-License-Identifier: Apache-2.0
"""The pool where windows slide: pages that vLLM frees while their request runs, and pages that a load fills in part, are
not saved as what they were, or would be."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.vllm_computing import ComputingEngine, answered, full, until_over, window
from support.vllm_pooled import Make, make, until_saved
from vllm.v1.request import Request

from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.load_breakeven import LoadBreakeven
from pd_connector.pool.saver import Saver
from pd_connector.protocol.wire.params import prefill_params
from pd_connector.vllm.pages.partial import PartialPages
from pd_connector.vllm.pool.saves import PoolSaves

__all__ = ["make"]

SPECS = {"window": (window(64),), "both": (full(), window(64))}
PAGES = {"window": 40, "both": 70}
PROMPTS = 6


def ended(of: ComputingEngine, *requests: Request) -> None:
    until_over([of], lambda: all(request.request_id in of.ended for request in requests))
    for request in requests:
        assert list(request.output_token_ids) == answered(request)


def saved_and_read(make: Make, specs: str) -> list[str]:
    """Prompts in a cache with few pages are saved; what is wrong with them where another engine has loaded them."""
    writer = make("writer", specs=SPECS[specs], blocks=PAGES[specs])
    until_over([writer], lambda: bool(writer.side.pool.model))
    asked = [writer.add(f"{n}", 250 + 60 * n, max_tokens=2, seed=n) for n in range(PROMPTS)]
    ended(writer, *asked)
    until_over([writer], lambda: not writer.side.saving)
    reader = make("reader", specs=SPECS[specs], blocks=400)
    until_over([reader], lambda: bool(reader.side.pool.model))
    for chunks in (1, 2, 3):
        for number in range(PROMPTS):
            tokens = chunks * CHUNK_TOKENS + 20
            ended(reader, reader.add(f"{chunks} {number}", tokens, max_tokens=1, seed=number))
        reader.scheduler.reset_prefix_cache()
    wrong, reader.wrong = reader.wrong, []
    return wrong


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is loaded, however slow the machine."""
    monkeypatch.setattr(LoadBreakeven, "chunks", lambda _, missing, *_more: len(missing))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store takes a while, so pages are copied when some more steps have been computed."""
    ask, step = Saver.ask, ComputingEngine.step
    steps = 0

    def steps_on(engine: ComputingEngine, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        return step(engine, *args)

    def asks(*args: Any) -> Any:
        later, stop_s = steps + 4, time.monotonic() + 1
        while steps < later and time.monotonic() < stop_s:  # at its end no engine steps
            time.sleep(0.001)
        return ask(*args)

    monkeypatch.setattr(ComputingEngine, "step", steps_on)
    monkeypatch.setattr(Saver, "ask", asks)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("specs", SPECS)
def test_a_page_that_a_window_has_freed_is_not_saved_once_it_is_anothers(
    make: Make, specs: str
) -> None:
    assert saved_and_read(make, specs) == []


@pytest.mark.usefixtures("slow")
def test_it_would_be_saved_as_what_it_was(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoolSaves, "present", lambda _, prompt, told=(): told or prompt.pages)
    assert saved_and_read(make, "window")


def handed_over_and_read(make: Make) -> list[str]:
    """A window begins within a page, and KV passes token by token. The decode engine saves the prompt."""
    specs = SPECS["both"]
    prefill = ComputingEngine("prefill", "kv_producer", specs=specs, layout="one")
    try:
        prefill.add("p", 2 * CHUNK_TOKENS + 10, 1, **prefill_params())
        until_over([prefill], lambda: "p" in prefill.ended)
        decode = make("decode", specs=specs, layout="other")
        until_over([decode], lambda: bool(decode.side.pool.model))
        fetched = decode.add("d", 2 * CHUNK_TOKENS + 10, 2, **(prefill.answers["p"] or {}))
        until_over([prefill, decode], lambda: "d" in decode.ended)
        assert list(fetched.output_token_ids) == answered(fetched)
        assert decode.agent.telemetry.take().counts[("received_transfers", ())] == 1
    finally:
        prefill.close()
    until_saved(decode)
    reader = make("reader", specs=specs, layout="other")
    until_over([reader], lambda: bool(reader.side.pool.model))
    ended(reader, reader.add("r", 2 * CHUNK_TOKENS + 20, max_tokens=1))
    wrong, reader.wrong = reader.wrong, []
    return wrong


def test_a_page_that_a_handoff_has_filled_in_part_is_not_saved(make: Make) -> None:
    assert handed_over_and_read(make) == []


def test_it_would_be_saved_as_a_whole_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartialPages, "partial_pages", lambda *_: ())
    assert handed_over_and_read(make)
