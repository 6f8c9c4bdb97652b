# SPDX-License-Identifier: Apache-2.0
"""Real engines that are started unlike: KV passes only where both compute the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from harness import (
    Answer,
    assert_same_logprobs,
    completion,
    fresh_salt,
    two_step,
    wait_until,
)
from pairs import EnginePool, Pair, Setup
from pauses import LEASED, fetching_while_paused
from recipes import MODEL
from safetensors.torch import load_file, save_file
from test_handoff import PAGE, prompt_of
from tiny_models import LONG_FROM, build
from tools import TOLERANCE, delta, probe_all

from pd_connector.tools.launch import VllmEngine

DRAFTS = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("long", tmp_path_factory.mktemp("models") / "long")


def test_a_rotation_that_depends_on_the_longest_sequence_is_another_one(
    engines: EnginePool, long: Path
) -> None:
    """Its own pair: how long a sequence may be is said when an engine starts, and decides its rotation."""
    pair = engines.pair(
        Setup.of(
            model=long,
            prefill_args=["--max-model-len", str(LONG_FROM)],
            decode_args=["--max-model-len", str(4 * LONG_FROM)],
        )
    )
    prompt = prompt_of(200)
    with delta(pair.d, "pd_connector:failed_transfers_total", cause="model") as refused:
        answer = two_step(pair.p, pair.d, prompt)
    assert refused.amount == 1
    assert_same_logprobs(answer, completion(pair.d, prompt, cache_salt=fresh_salt()), TOLERANCE)
    pair.assert_idle()


TRAINED = {"args": ["--worker-extension-cls", "probe.Trainer"]}


def update(engine, factor: float) -> None:
    """What a trainer does: the engine forgets its KV, and its weights change in place."""
    forget = Request(f"{engine.base_url}/reset_prefix_cache?reset_external=true", method="POST")
    with urlopen(forget) as answer:
        assert answer.status == 200
    probe_all(engine, "scale_weights", factor)


def handed_over(pair: Pair) -> bool:
    """Whether KV of a prompt passes; the answer is right in any case."""
    prompt = prompt_of(200)
    with delta(pair.d, "pd_connector:received_transfers_total") as received:
        answer = two_step(pair.p, pair.d, prompt)
    wanted = completion(pair.d, prompt, cache_salt=fresh_salt())
    assert_same_logprobs(answer, wanted, TOLERANCE)
    return received.amount == 1


def test_weights_that_change_in_place_are_other_weights(engines: EnginePool) -> None:
    """Its own pair: its weights are others afterwards."""
    pair = engines.pair(Setup.of(**TRAINED))
    assert handed_over(pair)
    update(pair.p, 1.25)
    completion(pair.p, "a step", 1)
    assert not handed_over(pair), "the decode engine has the old ones"
    update(pair.d, 1.25)
    completion(pair.d, "a step", 1)
    assert not handed_over(pair), "a CPU's kernels hold weights that nobody can read"
    for engine in pair.engines:
        probe_all(engine, "set_weights_version", "step 7")
    assert handed_over(pair)
    pair.assert_idle()


def retrained(folder: Path) -> Path:
    """The model with other weights."""
    shutil.copytree(MODEL, folder)
    file = folder / "model.safetensors"
    kept = load_file(file)
    for name, tensor in kept.items():
        if "layernorm" in name:
            tensor.mul_(1.25)
    save_file(kept, file, {"format": "pt"})
    return folder


def with_one_other_weight(folder: Path) -> Path:
    """The model with one number changed."""
    shutil.copytree(MODEL, folder)
    (weights,) = folder.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    return folder


def test_weights_that_are_reloaded_without_a_pause_are_those_of_their_files(
    engines: EnginePool, tmp_path: Path
) -> None:
    """Neither KV of before, in the prefix cache, nor KV of other weights is used for a moment."""
    pair = engines.pair(Setup.of(**TRAINED))

    def reload(engine, folder: Path) -> None:
        probe_all(engine, "reload_weights", None, str(folder))

    def passes_once_read() -> None:
        wait_until(lambda: handed_over(pair), "both have read the files that they have loaded")

    for engine in pair.engines:
        reload(engine, MODEL)
    passes_once_read()
    other = retrained(tmp_path / "other")
    reload(pair.p, other)
    assert not handed_over(pair), "the decode engine has the old ones"
    assert not handed_over(pair)
    reload(pair.d, other)
    passes_once_read()
    reload(pair.p, MODEL)
    reload(pair.d, with_one_other_weight(tmp_path / "one number"))
    with delta(pair.d, "pd_connector:failed_transfers_total", cause="model") as refused:

        def refuses() -> bool:
            assert not handed_over(pair), "from the first request on"
            return refused.so_far() > 0

        wait_until(refuses, "both have read theirs")
    reload(pair.d, MODEL)
    passes_once_read()
    pair.assert_idle()


def test_kv_that_came_before_weights_changed_is_found_by_no_other_request(
    engines: EnginePool,
) -> None:
    """The decode engine is paused for new weights while the KV of a queued request comes."""
    pair = engines.pair(Setup.of(**TRAINED))
    prompt, salt = prompt_of(900), fresh_salt()
    with ThreadPoolExecutor(1) as threads:
        with fetching_while_paused(pair, prompt, salt) as first:
            wait_until(lambda: not pair.p.metrics().total(LEASED), "the KV has come")
            probe_all(pair.d, "scale_weights", 1.5)
            second = threads.submit(completion, pair.d, prompt, cache_salt=salt)
        first.result()
        wanted = completion(pair.d, prompt)
        for found in (second.result(), completion(pair.d, prompt, cache_salt=salt)):
            assert_same_logprobs(found, wanted, TOLERANCE)
    probe_all(pair.d, "reload_weights", None, str(MODEL))
    pair.assert_idle()


SPECULATES = ["--speculative-config", json.dumps(DRAFTS)]
ANSWER = 60
PROMPT_TOKENS = 6 * PAGE + 1


def accepted(engine: VllmEngine, ask: Callable[[], Answer]) -> tuple[Answer, float]:
    """An answer, and the part of its drafted tokens that was accepted."""
    with (
        delta(engine, "vllm:spec_decode_num_draft_tokens_total") as drafted,
        delta(engine, "vllm:spec_decode_num_accepted_tokens_total") as kept,
        delta(engine, "vllm:generation_tokens_total") as answered,  # counted after the drafts
    ):
        answer = ask()
        wait_until(lambda: answered.so_far() >= ANSWER, "drafts are counted")
    return answer, kept.amount / drafted.amount


@pytest.mark.parametrize("both", [False, True], ids=["decode engine drafts", "both draft"])
def test_as_many_drafts_are_accepted_after_a_handoff_as_in_one_engine(
    engines: EnginePool, reference, both: bool
) -> None:
    """An engine without the draft model hands nothing over to one that drafts. Here the draft is the model itself: KV
    without its layers would leave nearly nothing accepted.

    The engine alone is asked with whole pages of the prompt in its prefix cache. So it computes one token in its first step, as
    it does after a handoff. vLLM gives such a step placeholders for drafts, and counts them as refused drafts: two of 42
    in these answers, with or without a handoff."""
    setup = Setup.of(args=SPECULATES) if both else Setup.of(decode_args=SPECULATES)
    pair: Pair = engines.pair(setup)
    prompt, salt = prompt_of(PROMPT_TOKENS), fresh_salt()
    if both:
        completion(pair.d, prompt, 1, cache_salt=salt)
    _, alone = accepted(pair.d, lambda: completion(pair.d, prompt, ANSWER, cache_salt=salt))
    assert alone > 0.8
    moved = 1 if both else 0
    with (
        delta(pair.d, "pd_connector:received_transfers_total") as received,
        delta(pair.d, "pd_connector:failed_transfers_total", cause="draft") as refused,
    ):
        answer, handed_over = accepted(pair.d, lambda: two_step(pair.p, pair.d, prompt, ANSWER))
    assert (received.amount, refused.amount) == (moved, 1 - moved)
    print(f"drafts accepted: {handed_over:.4f} handed over, {alone:.4f} in one engine")
    assert handed_over >= 0.98 * alone
    assert_same_logprobs(answer, reference(prompt, ANSWER), TOLERANCE)
    pair.assert_idle()
