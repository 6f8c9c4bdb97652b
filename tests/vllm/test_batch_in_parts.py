# SPDX-License-Identifier: Apache-2.0
"""vLLM may compute a batch in parts (`--enable-dbo`): it tells of each layer once for each of them."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.vllm_computing import ComputingEngine, answered, until_over

from pd_connector.protocol.wire.params import decode_params, prefill_params
from pd_connector.vllm.identity.layers import CacheId
from pd_connector.vllm.runner import hooks_tell_layers

OPTIONS: dict[str, Any] = {"budget": 4096, "blocks": 400, "defer_pages": False}


def wrong() -> list[str]:
    """What a decode engine used of two prompts, each of them one part of a batch, that was wrong."""
    prefill = ComputingEngine("prefill", "kv_producer", parts=2, **OPTIONS)
    decode = ComputingEngine("decode", "kv_consumer", **OPTIONS)
    try:
        for names, tokens in ((["first"], 40), (["a", "b"], 1500)):
            for seed, name in enumerate(names):
                prefill.add(name, tokens, 1, seed, **prefill_params(name))
                params = decode_params(prefill.side.offers.address, name)
                asked = decode.add(name, tokens, 4, seed, **params)
            decode.step()
            until_over((prefill, decode), lambda names=names: decode.ended.keys() >= set(names))
            assert list(asked.output_token_ids) == answered(asked)
            prefill.pause_s = 0.1
        return decode.wrong
    finally:
        decode.close()
        prefill.close()


def test_a_layer_is_not_sent_when_a_part_of_the_batch_has_it() -> None:
    assert wrong() == []


def test_taken_at_its_word_the_hook_would_send_what_is_not_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("support.vllm_computing.hooks_tell_layers", lambda *_: True)
    assert wrong()


@pytest.mark.parametrize(
    ("labels", "in_parts", "told"),
    [
        (["model/attention"], False, True),
        (["model/attention"], True, False),
        (["model/attention", "model/indexer"], False, False),
    ],
)
def test_when_layers_are_told(*, labels: list[str], in_parts: bool, told: bool) -> None:
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=in_parts))
    caches = {label: CacheId(number, label) for number, label in enumerate(labels)}
    assert hooks_tell_layers(config, caches) is told
