# SPDX-License-Identifier: Apache-2.0
"""A request that is prefilled here and decoded there is answered as one engine answers it."""

from __future__ import annotations

import json
import shutil
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from harness import (
    assert_same_logprobs,
    completion,
    fresh_salt,
    largest_difference,
    prefill_step,
    two_step,
    wait_until,
)
from pairs import (
    Pair,
    Setup,
    Side,
)
from recipes import MODEL, NEW, Recipe
from tools import TOLERANCE, delta, probe, streamed_chat

from pd_connector.kv.model import model_problem
from pd_connector.protocol.wire import about

PAGE = 32
SHORT_LEASE = {"lease_s": 6}
"""For a producer whose peers refuse what it keeps for them: it keeps it until the lease ends."""


@dataclass(frozen=True)
class OneStarted(Setup):
    """The prefill engine is started as users start it, in new interpreters. The decode engine is forked."""

    def recipe(self, side: Side) -> Recipe:
        return Setup.recipe(replace(self, forked=side == "decode"), side)


SETUP = OneStarted.of(vllm=NEW, worker_apart=True, prefill_extra=SHORT_LEASE)


@cache
def _text() -> str:
    return (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text()


def prompt_of(tokens: int, start: int = 0) -> list[int]:
    """A prompt of exactly that many tokens: bytes of real text."""
    return list(_text()[start : start + tokens].encode()[:tokens])


def token_bytes() -> int:
    """Bytes of one token's KV in the test model, in float32."""
    model = json.loads((MODEL / "config.json").read_text())
    head_dim = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    return int(model["num_hidden_layers"] * 2 * model["num_key_value_heads"] * head_dim * 4)


LENGTHS = {
    "shorter than a page": 5,
    "exactly one page": PAGE,
    "several pages": 3 * PAGE,
    "a partial last page": 3 * PAGE + 7,
    "many chunks": 3500,
}


@pytest.mark.parametrize("tokens", LENGTHS.values(), ids=list(LENGTHS))
def test_the_answer_is_that_of_one_engine(pair: Pair, reference, tokens: int) -> None:
    prompt = prompt_of(tokens, start=11)
    with delta(pair.d, "pd_connector:received_transfers_total") as received:
        answer = two_step(pair.p, pair.d, prompt)
    assert received.amount == 1
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def test_the_pages_are_the_same_byte_for_byte(pair: Pair) -> None:
    prompt, salt = prompt_of(20 * PAGE, start=500), fresh_salt()
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    digests = probe(pair.p, "kv_digests", params["remote_block_ids"][0])
    assert len(set(digests)) == 20
    completion(pair.d, prompt, 1, cache_salt=salt, kv_transfer_params=params)
    assert all(probe(pair.d, "kv_pages_with", digests))


@pytest.mark.parametrize(
    "page", [0, 54, 108], ids=["first page", "a middle page", "last whole page"]
)
def test_one_damaged_page_moves_the_logprobs(pair: Pair, reference, page: int) -> None:
    """The negative control of every comparison in this file."""
    prompt, salt = prompt_of(3500, start=11), fresh_salt()
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    probe(pair.p, "damage_page", params["remote_block_ids"][0][page])
    answer = completion(pair.d, prompt, cache_salt=salt, kv_transfer_params=params)
    assert largest_difference(answer, reference(prompt)) > 2 * TOLERANCE


def test_sixteen_requests_at_once_do_not_mix(pair: Pair, reference) -> None:
    prompts = [prompt_of(40 + 61 * i, start=300 * i) for i in range(16)]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda prompt: two_step(pair.p, pair.d, prompt), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)


@pytest.mark.parametrize(
    ("known", "pages"),
    [(0, 5), (2 * PAGE, 3), (4 * PAGE + 7, 1)],
    ids=["nothing cached", "a part cached", "all whole pages cached"],
)
def test_only_what_the_decode_side_lacks_is_moved(
    pair: Pair, reference, known: int, pages: int
) -> None:
    prompt, salt = prompt_of(4 * PAGE + 7, start=900), fresh_salt()
    if known:
        completion(pair.d, [*prompt[:known], 0], 1, cache_salt=salt)
    with delta(pair.d, "pd_connector:received_bytes_total") as received:
        answer = two_step(pair.p, pair.d, prompt, cache_salt=salt)
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)
    assert received.amount == pages * PAGE * token_bytes()


def test_nothing_is_moved_for_the_last_token_alone(pair: Pair, reference) -> None:
    prompt, salt = prompt_of(4 * PAGE + 1, start=1700), fresh_salt()
    completion(pair.d, prompt, 1, cache_salt=salt)
    with delta(pair.d, "pd_connector:received_bytes_total") as received:
        answer = two_step(pair.p, pair.d, prompt, cache_salt=salt)
    assert received.amount == 0
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def test_prefill_and_decode_opened_at_the_same_time(pair: Pair, reference) -> None:
    prompts = [prompt_of(n, start=2000) for n in (5, 3 * PAGE + 7, 3500)]
    with delta(pair.d, "pd_connector:received_transfers_total") as received:
        answers = [completion(pair.router, prompt) for prompt in prompts]
    assert received.amount == len(prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def test_streaming_chat_through_the_router(pair: Pair) -> None:
    messages = [{"role": "user", "content": _text()[100:700]}]
    with delta(pair.d, "pd_connector:received_transfers_total") as received:
        answer = streamed_chat(pair.router, messages)
    assert received.amount == 1
    assert_same_logprobs(answer, streamed_chat(pair.p, messages), TOLERANCE)


def test_a_salt_that_differs_is_another_prompt(pair: Pair, reference) -> None:
    prompt = prompt_of(3 * PAGE, start=4000)
    params = prefill_step(pair.p, prompt, cache_salt=fresh_salt())
    with delta(pair.d, "pd_connector:failed_transfers_total", cause="tokens") as refused:
        answer = completion(pair.d, prompt, kv_transfer_params=params)
    assert refused.amount == 1
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def test_parameters_survive_a_proxy_that_copies_only_nixl_names(pair: Pair, reference) -> None:
    names = ("do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_block_ids")
    names += ("remote_request_id", "remote_host", "remote_port", "tp_size")
    prompt, salt = prompt_of(3 * PAGE + 7, start=5000), fresh_salt()
    params = json.loads(json.dumps(prefill_step(pair.p, prompt, cache_salt=salt)))
    with delta(pair.d, "pd_connector:received_transfers_total") as received:
        kept = {name: params[name] for name in names}
        answer = completion(pair.d, prompt, cache_salt=salt, kv_transfer_params=kept)
    assert received.amount == 1
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)


def test_a_description_names_the_address_and_keeps_nothing(pair: Pair) -> None:
    params = {"do_remote_decode": True, "do_remote_prefill": False, "describe": True}
    found = completion(pair.p, "a", 1, kv_transfer_params=params).kv_transfer_params
    assert found["remote_host"] == "127.0.0.1"
    assert 0 < found["remote_port"] < 65536
    ours = about.read(completion(pair.d, "a", 1, kv_transfer_params=params).kv_transfer_params)
    theirs = about.read(found)
    assert ours.version == theirs.version != ""
    assert ours.model is not None
    assert theirs.model is not None
    assert model_problem(theirs.model, ours.model) == ""
    assert ("model_type", "llama") in theirs.model.fields
    assert pair.p.metrics().total("pd_connector:leased_pages") == 0


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with one weight changed."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(MODEL, folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-2] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_another_model_on_the_other_side_is_refused(engines, other_weights, reference) -> None:
    """Its own prefill engine, with other weights."""
    pair = engines.pair(Setup.of(prefill_args=["--model", str(other_weights)]))
    prompt = prompt_of(100)
    with (
        delta(pair.d, "pd_connector:failed_transfers_total", cause="model") as refused,
        delta(pair.p, "pd_connector:releases_total", cause="model") as released,
    ):
        answer = two_step(pair.p, pair.d, prompt)
        wait_until(lambda: released.so_far() == 1, "the prefill engine keeps nothing for it")
    assert refused.amount == 1
    assert_same_logprobs(answer, reference(prompt), TOLERANCE)
    pair.assert_idle()


# With 0.33, each data-parallel rank on a CPU needs a NUMA node of its own.
RANKS = Setup.of(vllm="0.32", worker_apart=True, prefill_args=["--data-parallel-size", "2"])


@pytest.mark.parametrize("setup", [RANKS], indirect=True, ids=["ranks"])
def test_the_decode_engine_is_told_of_the_data_parallel_rank_that_computes(
    pair: Pair, reference
) -> None:
    prompts = [prompt_of(100 + n, start=600 + 200 * n) for n in range(6)]
    with delta(pair.d, "pd_connector:received_transfers_total") as received:
        answers = [completion(pair.router, prompt) for prompt in prompts]
        answers += [two_step(pair.p, pair.d, prompt, cache_salt=fresh_salt()) for prompt in prompts]
    assert received.amount == 2 * len(prompts)
    sent = [pair.p.metrics().total("pd_connector:sent_bytes_total", engine=rank) for rank in "01"]
    assert all(sent), "both ranks have computed some of them"
    for prompt, answer in zip(prompts * 2, answers, strict=True):
        assert_same_logprobs(answer, reference(prompt), TOLERANCE)
