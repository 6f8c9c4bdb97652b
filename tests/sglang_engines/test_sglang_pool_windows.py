# SPDX-License-Identifier: Apache-2.0
"""A KV pool behind SGLang engines of a model in which half of the layers have a sliding window, which SGLang keeps in a pool of
its own. vLLM does not know this model. Chunks with windows that vLLM has written have the same form (tests/pool)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from harness import fresh_salt
from pools import CHUNKS, PROMPT
from sglang_engines.sglang_harness import assert_idle, text
from sglang_engines.sglang_pools import MEMORY, Host, ask, hosting
from sglang_engines.sglang_recipes import Recipe
from tiny_models import build

from pd_connector.pool.keys import CHUNK_TOKENS

CONFIG = f'{{"pool": {{"memory": "{MEMORY}"}}}}'
NAMES = ("sglang 16", "sglang 64")
LOADED = CHUNKS * CHUNK_TOKENS


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    model = str(build("two pools", tmp_path_factory.mktemp("model")))
    pieces = ("--chunked-prefill-size", "256")
    sglang = {
        NAMES[0]: Recipe(None, 16, config=CONFIG, model=model, module="mellum", args=pieces),
        NAMES[1]: Recipe(None, 64, tp=2, config=CONFIG, model=model, module="mellum"),
    }
    with hosting(tmp_path_factory.mktemp("pool"), sglang, {}) as made:
        for name in NAMES:
            assert "SWAKVPool" in made.engines[name].log_path.read_text(), "control"
        yield made


@pytest.mark.parametrize(("writer", "reader"), list(itertools.permutations(NAMES)))
def test_what_one_engine_computed_the_other_loads(host: Host, writer: str, reader: str) -> None:
    host.audited(writer, reader)
    salt, wanted = host.computed(writer)
    found = ask(host.engines[reader], salt)
    found.assert_same(wanted)
    assert found.loaded == LOADED
    assert ask(host.engines[reader], fresh_salt()).loaded == 0, "another salt shares nothing"


@pytest.mark.parametrize(("writer", "reader"), list(itertools.permutations(NAMES)))
def test_prompts_that_share_a_beginning_load_it(host: Host, writer: str, reader: str) -> None:
    """Windows of all of a prompt are there, not the last one alone. The reader's own cache has the beginning from the second
    prompt on, and goes on from there."""
    host.audited(writer, reader)
    salt, _ = host.computed(writer)
    for shared in (3, 4, 5):
        prompt = [*PROMPT[: shared * CHUNK_TOKENS + 40], *text(60, seed=shared)]
        wanted = ask(host.engines[reader], fresh_salt(), prompt)
        found = ask(host.engines[reader], salt, prompt)
        found.assert_same(wanted)
        assert found.loaded >= shared * CHUNK_TOKENS


def test_a_conversation_is_loaded_turn_by_turn(host: Host) -> None:
    """Each turn is a node of its own in SGLang's cache, and chunks lie across nodes."""
    writer, reader = NAMES
    host.audited(writer, reader)
    salt, words = fresh_salt(), text(1200, seed=9)
    turns = (200, 330, 470, 790, 1200)
    before = set(host.pool.files())
    answers = [ask(host.engines[writer], salt, words[:turn]) for turn in turns]
    host.wait_for_files(before, turns[-1] // CHUNK_TOKENS)
    found = ask(host.engines[reader], salt, words)
    found.assert_same(answers[-1])
    assert found.loaded == turns[-1] // CHUNK_TOKENS * CHUNK_TOKENS


def test_altered_chunks_are_not_read_and_nothing_is_held(host: Host) -> None:
    writer, reader = NAMES
    host.audited(writer, reader)
    salt, wanted = host.computed(writer)
    host.pool.damage()
    found = ask(host.engines[reader], salt)
    found.assert_same(wanted)
    assert found.loaded == 0
    assert_idle(*(host.engines[name] for name in NAMES))
    for name in NAMES:
        host.assert_nothing_held(name)
