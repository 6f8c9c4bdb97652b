# SPDX-License-Identifier: Apache-2.0
"""Prompts that begin with the one that a producer has computed, and go on: in vLLM's own scheduler."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from support.vllm_steps import SteppedEngine
from vllm.v1.kv_cache_interface import FullAttentionSpec

from pd_connector.kv.identity import token_fingerprint
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.vllm.identity.inputs import RequestIdentity


def test_a_prompt_that_goes_on_after_the_producers_uses_its_kv() -> None:
    """A proxy has appended the prefill's first token, or more."""
    whole = SteppedEngine(audit="off")
    for name, tokens in (("a", 101), ("b", 150)):
        request = whole.fetch(name, tokens, remote_num_tokens=100, seed=tokens)
        (load,) = [one for one in whole.step() if isinstance(one, Load)]
        assert (load.first_token, load.stop_token) == (0, 100), "all that the producer has"
        assert load.identity == token_fingerprint(request.prompt_token_ids[:100])
        whole.step(finished_recving={name})
        while whole.scheduler.requests:
            whole.step()
    whole.assert_nothing_held()


def test_where_prompts_attend_to_what_follows_only_kv_of_the_same_prompt_is_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Prefix LM: of a prompt that goes on, every token has other KV, and an engine alone another answer."""
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, non_causal=True
    )
    engine = SteppedEngine(specs=[spec], audit="off")
    for name, told, fetched in (("a", 100, 0), ("b", 149, 0), ("c", 150, 1), ("d", None, 1)):
        engine.fetch(name, 150, remote_num_tokens=told, seed=len(name))
        assert sum(isinstance(one, Load) for one in engine.step()) == fetched, name
        if fetched:
            engine.step(finished_recving={name})
        while engine.scheduler.requests:
            engine.step()
    assert "only KV of the very same prompt can be used" in caplog.text


@pytest.mark.parametrize("told", [None, 100, 200])
def test_a_prompt_that_is_the_producers_or_shorter_is_asked_for_as_a_whole(
    told: int | None,
) -> None:
    engine = SteppedEngine(audit="off")
    request = engine.fetch("a", 100, remote_num_tokens=told)
    (load,) = [one for one in engine.step() if isinstance(one, Load)]
    assert (load.first_token, load.stop_token) == (0, 99), "the last is computed for its logits"
    assert load.identity == token_fingerprint(request.prompt_token_ids)


def test_what_the_producer_has_of_a_longer_prompt_is_audited() -> None:
    engine = SteppedEngine(budget=512)
    engine.fetch("a", 150, remote_num_tokens=100)
    engine.step()
    engine.step()
    (load,) = [one for one in engine.commands if isinstance(one, Load)]
    assert load.compares
    assert (load.first_token, load.stop_token) == (0, 100)


def test_images_count_as_far_as_the_producers_prompt_goes() -> None:
    def identity(tokens: int, *places: int) -> bytes:
        features = [
            SimpleNamespace(
                data=None,
                modality="image",
                identifier=str(place),
                mm_position=SimpleNamespace(offset=place),
            )
            for place in places
        ]
        request: Any = SimpleNamespace(
            prompt_token_ids=[1] * 20, cache_salt=None, lora_request=None, mm_features=features
        )
        return RequestIdentity().of(request, tokens)

    assert identity(10, 3) == identity(10, 3, 10)
    assert identity(10, 3) != identity(10, 3, 9)
