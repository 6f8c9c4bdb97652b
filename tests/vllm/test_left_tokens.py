# SPDX-License-Identifier: Apache-2.0
"""How many tokens of a prompt a prefill engine leaves to the decode engine, and that both sides count alike: rings, a window
that vLLM replays, and several MTP modules. With vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from support.vllm_steps import OFFER, PAGE, SteppedEngine
from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from pd_connector.kv.geometry import Shard
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.vllm.handoff.left_tokens import takes_inputs_whole

FULL = kv.FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=1, dtype=torch.float32)
RING = kv.CircularBufferSpec(
    block_size=8, num_kv_heads=1, head_size=2, head_size_v=0, dtype=torch.float32
)
REPLAYED = kv.SlidingWindowMLASpec(
    block_size=PAGE,
    num_kv_heads=1,
    head_size=2,
    dtype=torch.float32,
    sliding_window=32,
    model_version="deepseek_v4",
    bounded_replay=True,
)
SPECS: dict[str, Sequence[Any]] = {
    "a ring": [FULL, RING],
    "a replayed window": [FULL, REPLAYED],
    "both": [FULL, REPLAYED, RING],
}


def engine_of(specs: Sequence[Any], **extra: Any) -> SteppedEngine:
    engine = SteppedEngine(specs=specs, budget=512, audit="off", caching=False, **extra)
    engine.side.set_peers((Peer(Source("127.0.0.1", 7, "producer"), Shard(0, 2, 0, 1)),))
    return engine


def offered(engine: SteppedEngine) -> Offer:
    while True:
        for command in engine.step():
            if isinstance(command, Offer) and command.final:
                return command


def loaded(engine: SteppedEngine) -> Load | None:
    commands = [*engine.step(), *engine.step()]
    return next((command for command in commands if isinstance(command, Load)), None)


@pytest.mark.parametrize("tokens", [2, PAGE, PAGE + 1, 100])
@pytest.mark.parametrize("kind", SPECS)
def test_the_last_token_is_left_and_a_ring_is_one_page(kind: str, tokens: int) -> None:
    producer, consumer = engine_of(SPECS[kind]), engine_of(SPECS[kind])
    producer.add("p", tokens, 8, **OFFER, transfer_id="t")
    offer = offered(producer)
    consumer.fetch("d", tokens)
    load = loaded(consumer)
    assert load is not None
    assert (offer.tokens, load.stop_token) == (tokens - 1, tokens - 1)
    assert offer.identity == load.identity
    assert offer.final_token is None, "what was sampled is no answer"
    position = tokens - 1 if RING in SPECS[kind] else 0
    assert (offer.state_token, load.state_token) == (position, position)
    for place, spec in enumerate(SPECS[kind]):
        if spec is RING:
            assert list(offer.pages[place]) == list(producer.pages("p")[place])
            assert len(offer.pages[place]) == len(load.pages[place]) == 1


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> int:
    """vLLM speculates with 4 MTP modules."""
    monkeypatch.setattr(VllmConfig, "num_prefill_lookahead_tokens", property(lambda _: 4))
    return 4


@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 64, 100])
@pytest.mark.parametrize("kind", ["no state", *SPECS])
def test_what_mtp_modules_read_ahead_is_left(kind: str, tokens: int, modules: int) -> None:
    specs = SPECS.get(kind, [FULL])
    producer, consumer = engine_of(specs), engine_of(specs)
    request = producer.add("p", tokens, 8, **OFFER, transfer_id="t")
    offer = offered(producer)
    consumer.fetch("d", tokens)
    load = loaded(consumer)
    left = tokens - (modules - 1)
    if left < 1:
        assert (request.num_prompt_tokens, load) == (tokens, None), (
            "nothing is wanted of so short a prompt"
        )
        return
    assert load is not None
    assert (offer.tokens, load.stop_token) == (left, left)
    assert offer.identity == load.identity
    assert offer.final_token is None


SPECULATED = [(1, 4), (4, 1), (2, 4), (4, 2), (3, 3)]
"""Speculative tokens of a prefill and of a decode engine."""


def side_by_side(counts: tuple[int, int], tokens: int, *, told: bool) -> tuple[Offer, Load | None]:
    """A prompt of which both engines are told at once, each with MTP modules and a number of speculative tokens of its own.

    Args:
        told: the decode engine is told what the producer's address says.
    """
    engines = []
    for count in counts:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                VllmConfig, "num_prefill_lookahead_tokens", property(lambda _, n=count: n)
            )
            engines.append(engine_of([FULL], drafts="mtp", defer_pages=False))
    producer, consumer = engines
    address = producer.side.offers.address
    assert address.left_tokens == counts[0] - 1
    fields = {**address.fields(), "remote_block_ids": None}
    producer.add("p", tokens, 8, **OFFER, transfer_id="t")
    consumer.fetch("d", tokens, **{k: v for k, v in fields.items() if told or k != "left_tokens"})
    load = loaded(consumer)
    return offered(producer), load


@pytest.mark.parametrize("tokens", [40, 100])
@pytest.mark.parametrize("counts", SPECULATED)
def test_engines_that_speculate_otherwise_count_alike(counts: tuple[int, int], tokens: int) -> None:
    offer, load = side_by_side(counts, tokens, told=True)
    assert load is not None
    assert load.identity == offer.identity
    assert offer.tokens == tokens - (counts[0] - 1)
    assert load.stop_token == tokens - max(1, *(count - 1 for count in counts))


@pytest.mark.parametrize("counts", SPECULATED)
def test_without_the_address_a_decode_engine_counts_its_own(counts: tuple[int, int]) -> None:
    """The control: engines of before name other tokens, and a producer refuses that."""
    offer, load = side_by_side(counts, 40, told=False)
    assert load is not None
    assert (load.identity == offer.identity) is (counts[0] == counts[1])


IMAGE = 20
"""Tokens of an image."""


def with_image(
    engine: SteppedEngine, tokens: int, begins: int, *, whole: bool = False
) -> tuple[Request, Offer | None]:
    """Offer a prompt with an image. Returns the final offer; None if nothing is offered, or nothing more is computed.

    Args:
        begins: the image's first token.
        whole: vLLM does not cut inputs.
    """
    scheduler = engine.scheduler
    scheduler.max_num_encoder_input_tokens = 100
    scheduler.encoder_cache_manager = EncoderCacheManager(100)
    scheduler.scheduler_config.disable_chunked_mm_input = whole
    place = PlaceholderRange(offset=begins, length=IMAGE)
    features = [MultiModalFeatureSpec(None, "image", "i", place)]
    request = engine.add("p", tokens, 8, features=features, **OFFER, transfer_id="t")
    for _ in range(10):
        for command in engine.step():
            if isinstance(command, Offer) and command.final:
                return request, command
    return request, None


@pytest.mark.parametrize("cut", range(-3, 3))
@pytest.mark.parametrize("tokens", [40, 600])
def test_an_image_may_end_or_begin_among_the_tokens_that_are_left(
    tokens: int, cut: int, modules: int
) -> None:
    """With `cut` negative, its first tokens are among the others."""
    left, producer = modules - 1, engine_of([FULL])
    begins = tokens - left + cut if cut >= 0 else tokens - IMAGE - (cut + 3)
    request, offer = with_image(producer, tokens, begins)
    assert offer is not None
    assert offer.tokens == tokens - left
    assert len(request.mm_features) == (begins < tokens - left), "vLLM encodes no others"
    assert not producer.scheduler.encoder_cache_manager.cached.get("i"), "nothing refers to it"


@pytest.mark.parametrize("ends", range(5))
def test_where_vllm_cuts_no_image_none_is_offered_in_part(
    ends: int, modules: int, caplog: pytest.LogCaptureFixture
) -> None:
    """`ends`: tokens behind it."""
    producer = engine_of([FULL])
    producer.side._engine = producer.side._engine._replace(inputs_whole=True)
    _, offer = with_image(producer, 100, 100 - IMAGE - ends, whole=True)
    if 0 <= ends < modules - 1:
        assert offer is None
        assert "--disable-chunked-mm-input" in caplog.text
        while producer.scheduler.requests:
            producer.step()
    else:
        assert offer is not None


@pytest.mark.parametrize(("cuts", "ahead"), [(True, 1), (True, 0), (False, 1)])
def test_vllm_cuts_no_image_if_so_started_and_drafts_read_ahead(cuts: bool, ahead: int) -> None:
    config = SimpleNamespace(
        num_prefill_lookahead_tokens=ahead,
        scheduler_config=SimpleNamespace(disable_chunked_mm_input=cuts),
    )
    assert takes_inputs_whole(config) is (cuts and ahead > 0)  # type: ignore[arg-type]


def test_vllm_would_compute_nothing_more(modules: int) -> None:
    """The control of the test above: such a request hangs."""
    producer = engine_of([FULL])
    assert not producer.side._engine.inputs_whole
    request, offer = with_image(producer, 100, 100 - IMAGE, whole=True)
    assert offer is None
    assert request.num_computed_tokens < request.num_prompt_tokens
    producer.abort("p")


@pytest.mark.parametrize("said", [4, 5])
def test_of_a_short_prompt_that_a_producer_computed_whole_nothing_is_fetched(
    said: int, modules: int
) -> None:
    """It says how many tokens it has. A decode engine computes the last ones in any case."""
    consumer = engine_of([FULL])
    consumer.fetch("d", said, remote_num_tokens=said)
    load = loaded(consumer)
    assert load is not None
    assert load.stop_token == said - (modules - 1)


def test_other_models_keep_their_prompts() -> None:
    """The control."""
    producer = engine_of([FULL])
    assert producer.add("p", 100, 8, **OFFER, transfer_id="t").num_prompt_tokens == 100
    assert offered(producer).tokens == 100
    consumer = engine_of([FULL])
    consumer.fetch("d", 100)
    load = loaded(consumer)
    assert load is not None
    assert load.stop_token == 99
