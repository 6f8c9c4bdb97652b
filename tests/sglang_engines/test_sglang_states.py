# SPDX-License-Identifier: Apache-2.0
"""A model with recurrent states (Qwen3-Next: gated delta nets) between SGLang engines, from vLLM to SGLang, and the reverse:
the log probabilities are those of one engine. SGLang's kernels of delta nets are in torch here (ci/sgl_kernel).

States stand after the whole prompt where SGLang decodes, and before its last token where vLLM does. It takes minutes, so it runs when asked for: `PD_STATES=all`, or `PD_STATES=sglang`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from recipes import COMPILE_NOTHING
from sglang_engines.sglang_harness import (
    EnginePool,
    SglangEngine,
    assert_idle,
    body,
    fault,
    handed_over,
    send,
    text,
)
from sglang_engines.sglang_recipes import STATE_OF_ANOTHER, STATE_ZEROED, Recipe
from sglang_engines.test_sglang_cross import COMPLETIONS, Cross
from support.engine_nursery import fork_engine
from tiny_models import build

from pd_connector.tools.launch import Client, RouterProcess, VllmEngine, stop_services, wait_all

pytestmark = pytest.mark.skipif(
    os.environ.get("PD_STATES") not in ("all", "sglang"),
    reason="takes minutes: PD_STATES=all or PD_STATES=sglang runs it",
)

LENGTHS = (2, 65, 300)
"""Less than a convolution looks back on, more than a page, several chunks of the prefill."""
TOKENS = 8
NOISE = 0.04
"""How far apart log probabilities may be. vLLM's CPU kernels of delta nets take bfloat16 and nothing else."""
BFLOAT = ("--dtype", "bfloat16")
ALONE = Recipe(
    None,
    args=("--disable-radix-cache", *BFLOAT),  # what SGLang keeps beside it needs a GPU
    module="qwen3_next",
)
PREFILL = replace(
    ALONE, role="prefill", page_size=16, args=(*ALONE.args, "--chunked-prefill-size", "128")
)
DECODE = replace(ALONE, role="decode", page_size=64)

TOP = 20
Rows = list[tuple[str, dict[str, float]]]
"""The tokens of an answer, each with log probabilities of the likeliest ones in its place."""


class Engines:
    """Two engines of SGLang's, one that works alone, and one of vLLM's on either side."""

    def __init__(self, alone: SglangEngine, p: SglangEngine, d: SglangEngine, vllm: VllmEngine):
        self.alone, self.p, self.d, self.vllm = alone, p, d, vllm
        pairs = {"vllm:sglang": (vllm, d), "sglang:vllm": (p, vllm)}
        self.routed = {
            order: Cross(
                RouterProcess(
                    [pair[0].base_url], [pair[1].base_url], args=["--policy", "round_robin"]
                ).start(),
                *pair,
                vllm,
                {},
            )
            for order, pair in pairs.items()
        }
        wait_all([cross.router for cross in self.routed.values()])

    def wanted(self, engine: str, length: int) -> Rows:
        """What one engine answers, vLLM's or SGLang's."""
        if engine == "vllm":
            return _completion(self.vllm.client, length)
        asked = body(text(length), TOKENS, top_logprobs_num=TOP)
        return _of_sglang(self.alone.client.post("/generate", asked))

    def found(self, order: str, length: int) -> Rows:
        """What a pair answers."""
        if order == "sglang:sglang":
            asked = send(self.p, self.d, text(length), TOKENS, top_logprobs_num=TOP)
            prefilled, decoded = (future.result() for future in asked)
            assert prefilled["output_ids"] == decoded["output_ids"][:1]
            return _of_sglang(decoded)
        cross = self.routed[order]
        before = cross.received()
        rows = _completion(cross.router.client, length)
        assert cross.others() == {}, "the prompt was not handed over"
        cross.wait_received(before + 1)
        return rows


def _of_sglang(answer: dict[str, Any]) -> Rows:
    """An answer of SGLang's own API. The demo's tokens are bytes."""
    meta = answer["meta_info"]
    tokens = [_name(token) for token in answer["output_ids"]]
    tops = [
        {_name(token): logprob for logprob, token, _ in top} for top in meta["output_top_logprobs"]
    ]
    return list(zip(tokens, tops, strict=True))


def _name(token: int) -> str:
    return chr(token) if token < 256 else ""


def _completion(client: Client, length: int) -> Rows:
    asked = {
        "model": client.model(),
        "prompt": bytes(text(length)).decode(),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": TOP,
        "cache_salt": uuid.uuid4().hex,
    }
    logprobs = client.post(COMPLETIONS, asked)["choices"][0]["logprobs"]
    return list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))


def difference(here: Rows, there: Rows) -> float:
    """The largest of all log probabilities of tokens that are likely in both answers, up to the first token that differs. What
    follows it has another context."""
    largest = 0.0
    for (token, likely), (other, alike) in zip(here, there, strict=True):
        names = {name for name in likely.keys() & alike.keys() if len(name) == 1}
        apart = max((abs(likely[name] - alike[name]) for name in names), default=inf)
        largest = max(largest, apart)
        if token != other:
            break
    return largest


@pytest.fixture(scope="module")
def running(engines: EnginePool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("states")
    model = str(build("delta net of experts", folder / "model"))
    vllm = VllmEngine(
        model,
        "kv_both",
        extra_config={"audit": "off"},  # an audited prompt is computed where its KV goes
        args=[*BFLOAT, "--mamba-ssm-cache-dtype", "float32"],
        env={**COMPILE_NOTHING},
        name="vllm",
        log_path=folder / "vllm.log",
    )
    vllm.popen = fork_engine
    vllm.start()
    recipes = [replace(recipe, model=model) for recipe in (ALONE, PREFILL, DECODE)]
    engines.start_ahead(*recipes)
    alone = engines.start(recipes[0])
    p, d = engines.pair(*recipes[1:])
    wait_all([alone, vllm])
    made = Engines(alone, p, d, vllm)
    yield made
    stop_services([*(cross.router for cross in made.routed.values()), vllm])


@pytest.mark.parametrize("order", ["sglang:sglang", "vllm:sglang", "sglang:vllm"])
def test_the_logprobs_are_those_of_one_engine(running: Engines, order: str) -> None:
    """Without the state they are not.

    One engine of vLLM's and one of SGLang's round in other places. So a pair of both may be as far from one engine as the other
    one is.
    """
    prefills, decodes = order.split(":")
    seen, own = {}, {}
    for length in LENGTHS:
        wanted, rows = running.wanted(decodes, length), running.found(order, length)
        seen[length] = difference(rows, wanted)
        own[length] = difference(running.wanted(prefills, length), wanted)
    noise = max(NOISE, *own.values())
    print(order, seen, "the other engine alone", own)
    harmed = running.p if order.endswith("vllm") else running.d
    with fault(harmed, STATE_ZEROED):
        zeroed = difference(running.found(order, length), wanted)
    print("zeroed", zeroed)
    assert max(seen.values()) <= noise, seen
    assert zeroed > 2 * noise
    assert_idle(running.p, running.d)


def test_the_state_of_another_request_is_another_answer(running: Engines) -> None:
    wanted = running.wanted("sglang", LENGTHS[-1])
    handed_over(running.p, running.d, text(70, seed=2), TOKENS)
    with fault(running.d, STATE_OF_ANOTHER):
        rows = running.found("sglang:sglang", LENGTHS[-1])
    assert difference(rows, wanted) > 2 * NOISE
