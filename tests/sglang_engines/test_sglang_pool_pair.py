# SPDX-License-Identifier: Apache-2.0
"""A pair of SGLang engines with a KV pool: the prefill engine loads and saves, the decode engine saves what it has answered, and
nothing is loaded twice. The prefill engine hands over by layers what it loads by layers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import fresh_salt, wait_until
from pools import counted
from sglang_engines.sglang_harness import SglangEngine, assert_idle, handed_over, text
from sglang_engines.sglang_pools import MEMORY, TOKENS, Engine, Found, Host, ask, hosting
from sglang_engines.sglang_recipes import RADIX, Recipe
from support.engine_forks import METRICS_S

from pd_connector.pool.keys import CHUNK_TOKENS

CONFIG = f'{{"pool": {{"memory": "{MEMORY}"}}}}'
PROMPT = text(1500, seed=7)
CHUNKS = len(PROMPT) // CHUNK_TOKENS


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    sglang = {
        "prefill": Recipe("prefill", 16, config=CONFIG),
        "decode": Recipe("decode", 64, args=RADIX, config=CONFIG),
    }
    with hosting(tmp_path_factory.mktemp("pair"), sglang, {"vllm": {}}) as made:
        yield made


def by_pair(host: Host, salt: str, prompt: list[int] = PROMPT, tokens: int = TOKENS) -> Found:
    """What the pair answers, and the tokens that it has loaded from the pool."""
    p, d = engines(host)
    before = loads(p)
    answer = handed_over(p, d, prompt, tokens, cache_salt=salt)
    assert_idle(p, d)
    for name in ("prefill", "decode"):
        host.assert_nothing_held(name)
    return Found(
        answer.tokens, answer.logprobs, int(loads(p) - before) * CHUNK_TOKENS, answer.leads
    )


def engines(host: Host) -> tuple[SglangEngine, SglangEngine]:
    p, d = host.engines["prefill"], host.engines["decode"]
    assert isinstance(p, SglangEngine)
    assert isinstance(d, SglangEngine)
    return p, d


def loads(engine: SglangEngine) -> float:
    """Chunks that an engine has loaded. It brings its metrics up to date every `METRICS_S`."""
    refreshed = "pd_connector:pool_hits_total"
    last = [-1.0]

    def settled() -> bool:
        last.append(engine.client.metrics().total(refreshed))
        return last[-1] == last[-2]

    wait_until(settled, "its metrics", every_s=4 * METRICS_S)
    return last[-1]


def audited(host: Host) -> None:
    """Have the prefill engine compare what vLLM computes, and vLLM what the pair computes."""
    salt, wanted = host.computed("vllm", PROMPT)
    if not by_pair(host, salt).loaded:
        p, _ = engines(host)
        wait_until(lambda: p.client.metrics().total("pd_connector:audits_total") > 0, "compared")
    before, salt = set(host.pool.files()), fresh_salt()
    by_pair(host, salt).assert_same(wanted)
    host.wait_for_files(before, CHUNKS)
    vllm = host.engines["vllm"]
    compared = counted(vllm, "audits")  # type: ignore[arg-type]
    if not ask(vllm, salt, PROMPT).loaded:
        wait_compared(vllm, compared)


def wait_compared(vllm: Engine, before: float) -> None:
    """Wait until vLLM has compared one more prompt."""
    wait_until(lambda: counted(vllm, "audits") > before, "compared")  # type: ignore[arg-type]


def test_the_prefill_engine_loads_and_hands_over_what_another_engine_computed(host: Host) -> None:
    audited(host)
    salt, wanted = host.computed("vllm", PROMPT)
    found = by_pair(host, salt)
    found.assert_same(wanted)
    assert found.loaded == CHUNKS * CHUNK_TOKENS
    p, d = engines(host)
    assert loads(d) == 0, "nothing is loaded twice"
    assert json.loads(p.client.get("/pd/pool"))["model"], "routers know what it can load"
    assert by_pair(host, fresh_salt()).loaded == 0, "control: another salt"
    salt, wanted = host.computed("vllm", PROMPT)
    host.pool.damage()
    found = by_pair(host, salt)
    found.assert_same(wanted)
    assert found.loaded == 0, "control: an altered byte"


def test_what_is_computed_behind_a_load_is_handed_over_by_layers_with_it(host: Host) -> None:
    audited(host)
    part = PROMPT[:700]
    salt, _ = host.computed("vllm", part)
    wanted = ask(host.engines["vllm"], fresh_salt(), PROMPT)
    found = by_pair(host, salt)
    found.assert_same(wanted)
    assert found.loaded == len(part) // CHUNK_TOKENS * CHUNK_TOKENS


def test_what_the_pair_computes_is_saved_once_and_its_answer_too(host: Host) -> None:
    audited(host)
    vllm = host.engines["vllm"]
    for _ in range(
        3
    ):  # vLLM audits both engines, each of which may have been the first to save a chunk
        before, salt = set(host.pool.files()), fresh_salt()
        found = by_pair(host, salt, tokens=3 * CHUNK_TOKENS)
        whole = [*PROMPT, *found.tokens]
        chunks = (len(whole) - 1) // CHUNK_TOKENS  # the last token's KV is not computed
        host.wait_for_files(before, chunks)
        assert len(set(host.pool.files()) - before) == chunks, "once"
        _, wanted = host.computed("vllm", whole)
        compared = counted(vllm, "audits")  # type: ignore[arg-type]
        again = ask(vllm, salt, whole)
        again.assert_same(wanted)
        if again.loaded == chunks * CHUNK_TOKENS:
            break
        wait_compared(vllm, compared)
    assert again.loaded == chunks * CHUNK_TOKENS


def test_eight_prompts_at_once_are_loaded_and_handed_over_without_mixing(host: Host) -> None:
    audited(host)
    prompts = [text(length, seed=length) for length in (140, 300, 700, 1500) for _ in range(2)]
    asked = [(prompt, *host.computed("vllm", prompt)) for prompt in prompts]
    p, d = engines(host)
    before = loads(p)
    with ThreadPoolExecutor(8) as threads:
        answers = [
            threads.submit(handed_over, p, d, prompt, TOKENS, cache_salt=salt)
            for prompt, salt, _ in asked
        ]
        for (_, _, wanted), future in zip(asked, answers, strict=True):
            answer = future.result()
            Found(answer.tokens, answer.logprobs, 0, answer.leads).assert_same(wanted)
    assert loads(p) - before == sum(len(prompt) // CHUNK_TOKENS for prompt in prompts)
    assert_idle(p, d)
    for name in ("prefill", "decode"):
        host.assert_nothing_held(name)
