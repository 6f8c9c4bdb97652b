# SPDX-License-Identifier: Apache-2.0
"""A model with recurrent states, prefilled on vLLM and decoded on SGLang, and the reverse, through the router. States stand
after the whole prompt where SGLang decodes, and before its last token where vLLM does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recipes import COMPILE_NOTHING
from sglang_engines.sglang_harness import EnginePool, text
from sglang_engines.test_sglang_cross import COMPLETIONS, Cross, ask
from sglang_engines.test_sglang_states import ALONE
from support.engine_nursery import fork_engine
from tiny_models import build

from pd_connector.tools.launch import RouterProcess, VllmEngine, stop_services

BFLOAT = ("--dtype", "bfloat16")  # vLLM's CPU kernels of delta nets take nothing else
NOISE, TOKENS = 0.15, 6
"""How far apart logprobs of two engines may be, and tokens after which texts may differ."""
LENGTH = 300
"""vLLM's CPU kernel of delta nets answers short prompts with NaN."""


@pytest.mark.parametrize("order", ["vllm:sglang", "sglang:vllm"])
def test_the_answer_is_that_of_one_engine(
    engines: EnginePool, tmp_path_factory: pytest.TempPathFactory, order: str
) -> None:
    folder = tmp_path_factory.mktemp("cross")
    model = str(build("delta net of experts", folder / "delta_net"))
    vllm = VllmEngine(
        model,
        "kv_both",
        extra_config={"audit": "off"},
        args=[*BFLOAT, "--mamba-ssm-cache-dtype", "float32"],
        env={**COMPILE_NOTHING},
        name="vllm",
        log_path=folder / "vllm.log",
    )
    vllm.popen = fork_engine
    role = "decode" if order.endswith("sglang") else "prefill"
    recipe = replace(ALONE, role=role, model=model, args=(*ALONE.args, *BFLOAT), env=())
    vllm.start()
    sglang = engines.start(recipe)
    try:
        vllm.wait_ready()
        sglang.wait_ready()
        pair = (vllm, sglang) if role == "decode" else (sglang, vllm)
        router = RouterProcess(
            [pair[0].base_url], [pair[1].base_url], args=["--policy", "round_robin"]
        ).start()
        router.wait_ready()
        cross = Cross(router, *pair, vllm, {})
        prompt = bytes(text(LENGTH)).decode()
        wanted = ask(vllm.client, COMPLETIONS, prompt)
        found = ask(router.client, COMPLETIONS, prompt)
        assert cross.others() == {}, "the prompt was not handed over"
        cross.wait_received(1)
        print("WANTED", wanted, "\nFOUND", found)
        for place in range(TOKENS):
            assert found.tokens[place] == wanted.tokens[place], place
            assert abs(found.logprobs[place] - wanted.logprobs[place]) <= NOISE, place
    finally:
        stop_services([router, vllm])
