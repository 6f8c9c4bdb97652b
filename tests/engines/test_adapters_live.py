# SPDX-License-Identifier: Apache-2.0
"""Adapters that are loaded, and loaded again, while real engines serve: what answers is the adapter that is loaded."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import torch
from harness import Answer, assert_same_logprobs, completion, fresh_salt, two_step, wait_until
from pairs import Pair, Setup
from recipes import MODEL
from safetensors.torch import save_file
from test_handoff import prompt_of
from told import halves
from tools import TOLERANCE, delta

from pd_connector.tools.launch import VllmEngine

SETUP = Setup.of(args=["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"])
RECEIVED = "pd_connector:received_transfers_total"
RANK = 8
ANSWER_S = 300.0


def adapter(folder: Path, seed: int) -> Path:
    """An adapter of the model's keys, values and queries, as PEFT saves it."""
    config = json.loads((Path(MODEL) / "config.json").read_text())
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
        "v_proj": config["num_key_value_heads"],
    }
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, count in heads.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for side, shape in (("A", (RANK, hidden)), ("B", (count * dim, RANK))):
                made = 0.1 * torch.randn(shape, generator=random)
                weights[f"{prefix}.lora_{side}.weight"] = made
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "new")
    os.replace(folder / "new", folder / "adapter_model.safetensors")
    told = {"r": RANK, "lora_alpha": RANK, "target_modules": list(heads), "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


def tell(engine: VllmEngine, what: str, **body: object) -> None:
    data = json.dumps({"lora_name": "sql", **body}).encode()
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"{engine.base_url}/v1/{what}_lora_adapter", data, headers)) as answer:
        assert answer.status == 200


def alone(engine: VllmEngine, prompt: str) -> Answer:
    """What this engine answers with the adapter that it has, without any KV of before."""
    return completion(engine, prompt, cache_salt=fresh_salt(), model="sql")


def handed_over(pair: Pair, prompt: str, wanted: Answer) -> float:
    """Ask with the adapter; returns how many transfers were received for that."""
    with delta(pair.d, RECEIVED) as received:
        answer = two_step(pair.p, pair.d, prompt, cache_salt="shared", model="sql")
    assert_same_logprobs(answer, wanted, TOLERANCE)
    return received.amount


@pytest.mark.parametrize("in_place", [False, True], ids=["unloaded", "in place"])
def test_an_adapter_that_is_loaded_anew_answers_and_not_the_one_before(
    pair: Pair, tmp_path: Path, in_place: bool
) -> None:
    """The prefill engine has pages of the prompt from before, under the adapter's name and path."""
    folder, prompt = adapter(tmp_path / "sql", 1), prompt_of(640)
    for engine in pair.engines:
        tell(engine, "load", lora_path=str(folder))
    before = alone(pair.d, prompt)
    assert handed_over(pair, prompt, before) == 1
    adapter(folder, 2)
    for engine in pair.engines:
        if not in_place:
            tell(engine, "unload")
        tell(engine, "load", lora_path=str(folder), load_inplace=in_place)
    after = alone(pair.d, prompt)
    with pytest.raises(AssertionError):
        assert_same_logprobs(after, before, TOLERANCE)
    assert handed_over(pair, prompt, after) == 1, "its pages are computed again, and handed over"
    for engine in pair.engines:
        tell(engine, "unload")


def test_a_request_that_waits_for_kv_while_its_adapter_is_replaced_is_computed_with_the_new_one(
    pair: Pair, tmp_path: Path
) -> None:
    """The prefill engine still has the one before."""
    prompt = prompt_of(640)
    for engine in pair.engines:
        tell(engine, "load", lora_path=str(adapter(tmp_path / "first", 1)))
    prefill, decode = halves(pair.p)
    with (
        ThreadPoolExecutor(1) as threads,
        delta(pair.d, RECEIVED) as received,
        delta(pair.d, "pd_connector:handoffs_total", cause="model") as given_up,
    ):
        answer = threads.submit(completion, pair.d, prompt, model="sql", **decode)
        waiting = "vllm:num_requests_waiting"
        wait_until(lambda: pair.d.metrics().total(waiting) == 1, "it waits for its KV")
        second = str(adapter(tmp_path / "second", 2))
        tell(pair.d, "load", lora_path=second, load_inplace=True)
        completion(pair.p, prompt, 1, model="sql", **prefill)
        found = answer.result(ANSWER_S)
        wait_until(lambda: given_up.so_far() == 1, "the handoff is counted")
    assert received.amount == 0
    assert_same_logprobs(found, alone(pair.d, prompt), TOLERANCE)
    with pytest.raises(AssertionError):
        assert_same_logprobs(found, alone(pair.p, prompt), TOLERANCE)
    for engine in pair.engines:
        tell(engine, "unload")
