# SPDX-License-Identifier: Apache-2.0
"""A window that vLLM replays behind a prefix hit is near what a whole prefill computes, and not the same. It is handed over, but
never compared: an honest engine would fail its audit. With vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("vllm")

import torch
from support.machines import ROUTES
from support.vllm_steps import OFFER, PAGE, SteppedEngine
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.request import Request

from pd_connector.errors import Cause
from pd_connector.kv.geometry import Shard
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.vllm.handoff import offers as offers_module
from pd_connector.vllm.messages import AuditReport, WorkerActivity
from pd_connector.vllm.pages.status import Use

FULL = kv.FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=1, dtype=torch.float32)
REPLAYED = kv.SlidingWindowMLASpec(
    block_size=PAGE,
    num_kv_heads=1,
    head_size=2,
    dtype=torch.float32,
    sliding_window=32,
    model_version="deepseek_v4",
    bounded_replay=True,
)
TOKENS = 150


def engine_of(**extra: object) -> SteppedEngine:
    engine = SteppedEngine(specs=[FULL, REPLAYED], budget=512, blocks=2000, **extra)  # type: ignore[arg-type]
    engine.side.set_peers((Peer(Source("127.0.0.1", 7, "producer"), Shard(0, 2, 0, 1)),))
    return engine


def warmed(**extra: object) -> SteppedEngine:
    """An engine whose prefix cache has the prompt."""
    engine = engine_of(**extra)
    engine.add("before", TOKENS, 1)
    while engine.scheduler.requests:
        engine.step()
    engine.commands.clear()
    return engine


def opening(offer: Offer, *, compares: bool) -> messages.Open:
    return messages.Open(
        transfer=offer.transfer,
        identity=offer.identity,
        first_token=0,
        stop_token=offer.tokens,
        wait=False,
        slots=[],
        chunk_bytes=4096,
        compares=compares or msgspec.UNSET,
    )


def offers(engine: SteppedEngine, count: int) -> Iterator[Offer]:
    """The final offers of this prompt, again and again."""
    for number in range(count):
        name = f"p{number}"
        engine.add(name, TOKENS, 1, **OFFER)
        while True:
            last = next(
                (
                    c
                    for c in engine.step()
                    if isinstance(c, Offer) and c.final and c.request == name
                ),
                None,
            )
            if last is not None:
                break
        yield last
        engine.step(finished_sending={name})


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is drawn for the next prompts of a prefill engine: 0 is a prompt that is computed whole."""
    numbers = list[int]()
    monkeypatch.setattr(
        offers_module, "random", SimpleNamespace(randrange=lambda _: numbers.pop(0))
    )
    return numbers


@pytest.mark.parametrize("overlap", ["off", "auto"])
def test_what_was_replayed_is_handed_over_and_not_compared(overlap: str, draws: list[int]) -> None:
    draws += [0, 1]
    first, second = offers(warmed(overlap=overlap), 2)
    assert not first.approximated
    assert second.approximated
    for offer in (first, second):
        assert offer.problem(opening(offer, compares=False), ROUTES, 4096) is None
    assert first.problem(opening(first, compares=True), ROUTES, 4096) is None
    refused = second.problem(opening(second, compares=True), ROUTES, 4096)
    assert refused is not None
    assert refused[0] is Cause.WINDOW


def test_which_prompts_are_computed_whole_is_chance(draws: list[int]) -> None:
    """Without any, no audit might ever end where all prompts begin alike. With every 16th, a router that sends prompts to
    some decode engines in turn would send all of them to the same one."""
    draws += [0, 1, 15, 0, 0, 7]
    found = [offer.approximated for offer in offers(warmed(), 6)]
    assert found == [False, True, True, False, False, True]


def test_while_a_prompt_is_computed_the_same_is_said(draws: list[int]) -> None:
    engine = warmed(overlap="auto")
    draws.append(1)
    engine.add("p", TOKENS, 4, **OFFER)
    early = next(c for c in engine.step() if isinstance(c, Offer) and c.request == "p")
    assert not early.final
    assert early.approximated


def test_a_decode_engine_computes_what_it_compares_without_its_prefix_cache() -> None:
    engine = warmed()
    request = engine.fetch("d", TOKENS)
    assert request.skip_reading_prefix_cache
    engine.step()
    engine.step()
    (load,) = (c for c in engine.commands if isinstance(c, Load))
    assert load.compares
    assert load.first_token == request.replay_start == 0
    engine.step(WorkerActivity(audits=(AuditReport("d", None, (), ""),)))
    while engine.scheduler.requests:
        engine.step()
    again = engine.fetch("e", TOKENS)
    assert not again.skip_reading_prefix_cache, "the producer has passed"


def test_requests_that_came_before_the_audit_read_the_prefix_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of them is audited. A client that wants log probabilities of its prompt has asked for no cache, too."""
    engine = warmed()
    audited, waiting = engine.fetch("d", TOKENS), engine.fetch("e", TOKENS)
    with monkeypatch.context() as context:
        context.setattr(Request, "get_skip_reading_prefix_cache", lambda _: True)
        asked = engine.fetch("f", TOKENS)
    for _ in range(3):
        engine.step()
    (load,) = (c for c in engine.commands if isinstance(c, Load))
    assert load.request == audited.request_id
    assert waiting.replay_start > 0, "it had a hit"
    assert asked.skip_reading_prefix_cache
    assert asked.replay_start == 0


def test_what_a_decode_engine_replayed_itself_is_not_compared() -> None:
    """The control: without that, its KV stands behind a replayed window."""
    engine = warmed()
    request = engine.fetch("d", TOKENS)
    request.skip_reading_prefix_cache = False
    for _ in range(4):
        engine.step()
    assert request.replay_start > 0
    assert engine.side._status.problem(request, Use.COMPARE) == "replayed"
    assert not [c for c in engine.commands if isinstance(c, Load)]


def test_other_models_read_their_prefix_cache() -> None:
    engine = SteppedEngine(budget=512)
    engine.add("before", TOKENS, 1)
    while engine.scheduler.requests:
        engine.step()
    assert not engine.fetch("d", TOKENS).skip_reading_prefix_cache
    assert not engine.add("p", TOKENS, 1, **OFFER).skip_reading_prefix_cache
