# SPDX-License-Identifier: Apache-2.0
"""Engines with a pool while they read all bytes of their weights, which may take minutes: after their start, and after the
weights were loaded again. Here another process has the lock on the fingerprints, as a rank that reads them first has."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import assert_same_logprobs, completion, fresh_salt, wait_until
from pools import CHUNKS, PROMPT, PooledEngines, counted, forget, hits, in_use, sharing_a_pool
from recipes import MODEL
from test_identity_live import retrained
from test_pauses import no_generation
from tools import TOLERANCE, probe_all

from pd_connector.kv.weights import cache_file
from pd_connector.tools.launch import VllmEngine

TRAINER = ("--worker-extension-cls", "probe.Trainer")
AT_ONCE_S = 15.0
"""Longest stop of an engine that has nothing to do, on a busy machine."""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PooledEngines]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with sharing_a_pool(tmp_path) as engines:
        yield engines


@contextmanager
def unread() -> Iterator[None]:
    """Within the block no engine can read weights that it does not know."""
    cache = cache_file()
    assert cache is not None
    cache.parent.mkdir(parents=True, exist_ok=True)
    with cache.with_suffix(".lock").open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # of all files
        yield


def loads_with_its_next_request(engine: VllmEngine, salt: str) -> float:
    """Chunks that a request loads, if nothing else comes before it."""
    before = counted(engine, "pool_hits")
    completion(engine, PROMPT, 32, cache_salt=salt)
    return hits(engine) - before


def test_neither_a_pause_nor_a_stop_waits_until_weights_are_read(pool: PooledEngines) -> None:
    with unread():
        engine = pool.start(32, *TRAINER, known=False)
        time.sleep(1.0)
        for mode in ("keep", "wait", "abort"):
            with no_generation(engine, mode):
                time.sleep(0.5)
        completion(engine, PROMPT, 2)
        assert in_use(engine) == 0
        began = time.monotonic()
        engine.stop()
        assert time.monotonic() - began < AT_ONCE_S


def test_the_first_request_after_weights_are_known_uses_the_pool(
    pool: PooledEngines, tmp_path: Path
) -> None:
    writer, salt = pool.start(32, *TRAINER), fresh_salt()
    wanted = pool.computed(writer, salt)
    with unread():
        probe_all(writer, "reload_weights", None, str(retrained(tmp_path / "other")))
        other = completion(writer, PROMPT, 32, cache_salt=salt)
        with pytest.raises(AssertionError):
            assert_same_logprobs(other, wanted, TOLERANCE)
        with no_generation(writer, "keep"):
            assert in_use(writer) == 1
    wait_until(lambda: in_use(writer) == 2, "it is told without a request")
    probe_all(writer, "reload_weights", None, str(MODEL))
    wait_until(lambda: in_use(writer) == 3, "it is told without a request")
    assert loads_with_its_next_request(writer, salt) == CHUNKS


def test_the_first_request_after_a_version_was_told_uses_the_pool(pool: PooledEngines) -> None:
    engine, salt = pool.start(32, *TRAINER), fresh_salt()
    probe_all(engine, "set_weights_version", "step 7")
    wait_until(lambda: in_use(engine) == 2, "it is told without a request")
    pool.computed(engine, salt)
    probe_all(engine, "set_weights_version", "step 8")
    wait_until(lambda: in_use(engine) == 3, "it is told without a request")
    assert forget(engine)
    probe_all(engine, "set_weights_version", "step 7")
    assert loads_with_its_next_request(engine, salt) == CHUNKS
