# SPDX-License-Identifier: Apache-2.0
"""Engines that compute, with one pool: one whose caches are reset uses nothing of the pool from before, until it has
computed it itself."""

from __future__ import annotations

import logging
from concurrent.futures import Future

import pytest

pytest.importorskip("vllm")

from support.vllm_computing import until_over
from support.vllm_pooled import CHUNKS, Make, keys_of, make, run

from pd_connector.errors import Miss
from pd_connector.pool.keys import CHUNK_TOKENS

__all__ = ["make"]


def reset(engine: object) -> None:
    """As `/reset_prefix_cache?reset_running_requests=true&reset_external=true`, and `/pause?clear_cache=true`, do."""
    scheduler = engine.scheduler  # type: ignore[attr-defined]
    until_over([engine], lambda: not scheduler.has_unfinished_requests())  # type: ignore[list-item]
    assert scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def test_an_engine_whose_caches_were_reset_loads_nothing_from_before(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    writer, other = make("writer"), make("other")
    run(writer, "a")
    keys_of(writer)
    counted: list[tuple[str, float]] = []
    writer.side.telemetry.count = lambda name, number=1, **more: counted.append(
        (more.get("cause", name), number)
    )
    with caplog.at_level(logging.INFO, "pd_connector.vllm"):
        reset(writer)
        assert run(writer, "b") == [], "it computes the prompt"
    assert (Miss.RESET, CHUNKS) in counted
    assert f"the {CHUNKS} chunks that the pool has by now" in caplog.text
    assert "pd-connector pool clear" in caplog.text
    (load,) = run(other, "c")
    assert load.stop_token == CHUNKS * CHUNK_TOKENS, "other engines go on to use them"


@pytest.mark.parametrize("writes", [True, False])
def test_what_it_has_computed_since_is_loaded_again(make: Make, writes: bool) -> None:
    writer = make("writer")
    run(writer, "a")
    keys_of(writer)
    engine = make("engine", pool={"memory": "64MiB", "write": writes})
    reset(engine)
    assert run(engine, "b") == []
    engine.scheduler.reset_prefix_cache()  # of its own cache alone: the pool has it still
    (load,) = run(engine, "c")
    assert load.stop_token == CHUNKS * CHUNK_TOKENS


def test_what_others_save_after_the_reset_is_used(make: Make) -> None:
    writer, engine = make("writer"), make("engine")
    reset(engine)
    run(writer, "a")
    keys_of(writer)
    (load,) = run(engine, "b")
    assert load.stop_token == CHUNKS * CHUNK_TOKENS


def test_a_request_that_had_found_chunks_looks_again(make: Make) -> None:
    writer = make("writer")
    run(writer, "a")
    keys_of(writer)
    engine = make("engine")
    until_over([engine], lambda: bool(engine.side.pool.model))
    engine.add("b", CHUNKS * CHUNK_TOKENS + 30, max_tokens=4)
    prompt = engine.side.pool._prompts["b"]
    assert isinstance(prompt.look, Future)
    assert len(prompt.look.result().hits) == CHUNKS
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    until_over([engine], lambda: "b" in engine.ended)
    assert [one for one in engine.commands if getattr(one, "stop_token", 0)] == []


def test_an_engine_that_has_slept_uses_the_pool(make: Make) -> None:
    """vLLM resets all caches before it sleeps. The weights are those of before, and so is what the pool has of them."""
    engine = make("engine")
    run(engine, "a")
    keys_of(engine)
    until_over([engine], lambda: not engine.scheduler.has_unfinished_requests())
    assert engine.sleep()
    for _ in range(3):
        engine.step()  # its workers say that pages are empty
    (load,) = run(engine, "b")
    assert load.stop_token == CHUNKS * CHUNK_TOKENS


def test_chunks_that_were_being_saved_are_from_before(make: Make) -> None:
    engine = make("engine")
    saves = engine.side.pool._saves
    run(engine, "a")
    until_over([engine], lambda: not saves)
    saves._saved["pool save 0"] = b"a key"
    reset(engine)
    looks = engine.side.pool._looks
    looks._thread.submit(lambda: None).result()
    assert b"a key" in looks._before_reset
    saves._saved.clear()
