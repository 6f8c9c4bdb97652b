# SPDX-License-Identifier: Apache-2.0
"""A model with recurrent states (Qwen3-Next: gated delta nets) between SGLang engines, from vLLM to SGLang, and the reverse:
the log probabilities are those of one engine. SGLang's kernels of delta nets are in torch here (ci/sgl_kernel).

States stand after the whole prompt where SGLang decodes, and before its last token where vLLM does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from recipes import COMPILE_NOTHING
from sglang_engines.sglang_harness import (
    Answer,
    EnginePool,
    SglangEngine,
    assert_idle,
    fault,
    handed_over,
    text,
)
from sglang_engines.sglang_harness import ask as ask_sglang
from sglang_engines.sglang_recipes import STATE_OF_ANOTHER, STATE_ZEROED, Recipe
from sglang_engines.test_sglang_cross import COMPLETIONS, Cross
from sglang_engines.test_sglang_cross import ask as ask_router
from support.engine_nursery import fork_engine
from tiny_models import build

from pd_connector.tools.launch import Client, RouterProcess, VllmEngine, stop_services, wait_all

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

Rows = list[tuple[str, float, float]]
"""The tokens of an answer. Each has its log probability, and the lead of the likeliest token there."""


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

    def wanted(self, order: str, length: int) -> Rows:
        """What one engine answers, of the kind that decodes."""
        if order.endswith("vllm"):
            return self._of_client(self.vllm.client, length)
        return self._of_sglang(ask_sglang(self.alone, text(length), TOKENS))

    def found(self, order: str, length: int) -> Rows:
        """What a pair answers."""
        if order == "sglang:sglang":
            return self._of_sglang(handed_over(self.p, self.d, text(length), TOKENS))
        cross = self.routed[order]
        before = cross.received()
        found = self._of_client(cross.router.client, length)
        assert cross.others() == {}, "the prompt was not handed over"
        cross.wait_received(before + 1)
        return found

    @staticmethod
    def _of_sglang(answer: Answer) -> Rows:
        texts = [bytes([token]).decode("latin-1") for token in answer.tokens]
        return list(zip(texts, answer.logprobs, answer.leads, strict=True))

    @staticmethod
    def _of_client(client: Client, length: int) -> Rows:
        prompt = bytes(text(length)).decode()
        answer = ask_router(client, COMPLETIONS, prompt, max_tokens=TOKENS)
        best = [sorted(top.values(), reverse=True) for top in answer.top]
        leads = [first - second for first, second, *_ in best]
        return list(zip(answer.tokens, answer.logprobs, leads, strict=True))


def difference(found: Rows, wanted: Rows) -> float:
    """The largest of all log probabilities, up to the first token that differs. That token counts with the lead that the
    reference's best had; what follows it has another context."""
    largest = 0.0
    for (token, here, _), (other, there, lead) in zip(found, wanted, strict=True):
        if token != other:
            return max(largest, lead / 2)
        largest = max(largest, abs(here - there))
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
    """Without the state they are not."""
    for length in LENGTHS:
        wanted, found = running.wanted(order, length), running.found(order, length)
        print(order, length, difference(found, wanted), wanted, found)
        assert difference(found, wanted) <= NOISE, (length, found, wanted)
    harmed = running.p if order.endswith("vllm") else running.d
    with fault(harmed, STATE_ZEROED):
        print("zeroed", difference(running.found(order, length), wanted))
        assert difference(running.found(order, length), wanted) > 2 * NOISE
    assert_idle(running.p, running.d)


def test_the_state_of_another_request_is_another_answer(running: Engines) -> None:
    wanted = running.wanted("sglang:sglang", LENGTHS[-1])
    handed_over(running.p, running.d, text(70, seed=2), TOKENS)
    with fault(running.d, STATE_OF_ANOTHER):
        found = running.found("sglang:sglang", LENGTHS[-1])
    assert difference(found, wanted) > 2 * NOISE
