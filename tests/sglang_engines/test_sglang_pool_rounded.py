# SPDX-License-Identifier: Apache-2.0
"""The pool between vLLM's and SGLang's engines in bfloat16, with chunks as they were computed and in INT8."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import fresh_salt
from sglang_engines.sglang_harness import text
from sglang_engines.sglang_pools import MEMORY, Host, ask, hosting
from sglang_engines.sglang_recipes import Recipe

from pd_connector.pool.keys import CHUNK_TOKENS

NOISE = 0.05
"""How far log probabilities of two engines may be apart in bfloat16 (docs/sglang.md). INT8 adds less than 0.01."""
BFLOAT16 = ("--dtype", "bfloat16")
INT8 = {"memory": MEMORY, "codec": "int8"}
PROMPT = text(700)
LOADED = 5 * CHUNK_TOKENS
INT8_BYTES = 300_000
"""A chunk of this model in INT8 has fewer, in bfloat16 it has 512 KiB."""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    raw = f'{{"codec": "int8", "pool": {{"memory": "{MEMORY}"}}}}'
    int8 = f'{{"pool": {{"memory": "{MEMORY}", "codec": "int8"}}}}'
    sglang = {
        "sglang raw": Recipe(None, 64, args=BFLOAT16, config=raw),
        "sglang int8": Recipe(None, 64, args=BFLOAT16, config=int8),
    }
    vllm = {
        "vllm raw": {"args": BFLOAT16, "codec": "int8"},
        "vllm int8": {"args": BFLOAT16, "pool": INT8},
    }
    with hosting(tmp_path_factory.mktemp("rounded"), sglang, vllm) as made:
        yield made


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize(("writer", "reader"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_what_another_kind_computed_is_within_the_noise(
    host: Host, writer: str, reader: str, codec: str
) -> None:
    writer, reader = f"{writer} {codec}", f"{reader} raw"
    host.audited(writer, reader, PROMPT, NOISE)
    before = set(host.pool.files())
    salt, wanted = host.computed(writer, PROMPT)
    saved = set(host.pool.files()) - before
    assert {file.stat().st_size > INT8_BYTES for file in saved} == {codec == "raw"}
    found = ask(host.engines[reader], salt, PROMPT)
    found.assert_same(wanted, NOISE)
    assert found.loaded == LOADED
    assert ask(host.engines[reader], fresh_salt(), PROMPT).loaded == 0, "another salt"
    salt, wanted = host.computed(writer, PROMPT)
    host.pool.damage()
    found = ask(host.engines[reader], salt, PROMPT)
    found.assert_same(wanted, NOISE)
    assert found.loaded == 0, "an altered byte"
