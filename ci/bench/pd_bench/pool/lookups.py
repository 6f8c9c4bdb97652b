# SPDX-License-Identifier: Apache-2.0
"""How soon a look-up is ready, and how soon the store is ready with many chunks in it: within limits in milliseconds."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from random import Random

from pd_bench.pool.folders import own_folder
from pd_bench.report import BenchError, Comparison, Say
from pd_bench.sample import Sample
from pd_connector.pool.keys import CHUNK_TOKENS, chain
from pd_connector.pool.store.base import Refusal
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space

LIMITS_MS = {4_000: 1.0, 131_072: 8.0}
"""For a prompt of that many tokens, all stored: from its token ids to the chunks found."""
START_LIMIT_S = 1.0
"""How much longer a start with many chunks may take than with none."""
_BUDGET = 4 << 30
_PAYLOAD = bytes(64)


def measure(chunks: int, runs: int, warm_ups: int, say: Say) -> list[Comparison]:
    """Measure both figures in a store of their own.

    Args:
        chunks: there when a store starts; they are small, so that they fit into memory.

    Raises:
        BenchError: a chunk was not stored, or not found.
    """
    with own_folder() as folder, own_folder() as empty:
        looked_up = _looks(folder, runs, warm_ups, say)
        _store(folder, _made_up(chunks), "")
        starts: dict[Path, list[float]] = {folder: [], empty: []}
        for number in range(warm_ups + runs):
            for place, times in starts.items():
                took_s = _start(place)
                if number >= warm_ups:
                    times.append(took_s)
        say(
            f"start with {chunks:,} chunks: {starts[folder][-1]:.3f} s, {starts[empty][-1]:.3f} s without"
        )
    ours, limit = (Sample(tuple(starts[place])) for place in (folder, empty))
    allowed = Sample(tuple(value + START_LIMIT_S for value in limit.values))
    return [*looked_up, Comparison("store ready", {"chunks": chunks}, ours, allowed, "s", 1.0)]


def _looks(folder: Path, runs: int, warm_ups: int, say: Say) -> list[Comparison]:
    model, random = bytes(32), Random(1)
    compared = []
    with contextlib.closing(LocalStore(Space(folder, _BUDGET))) as store:
        for tokens, limit_ms in LIMITS_MS.items():
            prompt = [random.randrange(32_000) for _ in range(tokens)]
            _store(folder, chain(model, prompt), "looked up")
            times = []
            for number in range(warm_ups + runs):
                began = time.perf_counter()
                chunks_found = store.find(chain(model, prompt))
                took_ms = (time.perf_counter() - began) * 1e3
                if len(chunks_found) != tokens // CHUNK_TOKENS or None in chunks_found:
                    raise BenchError("a stored chunk was not found")
                if number >= warm_ups:
                    times.append(took_ms)
            say(f"look-up of {tokens:,} tokens: {times[-1]:.2f} ms")
            limit = Sample((limit_ms,))
            params = {"tokens": tokens}
            compared.append(Comparison("look-up", params, Sample(tuple(times)), limit, "ms", 1.0))
    return compared


def _start(folder: Path) -> float:
    """Seconds until a store of this folder finds chunks and takes one."""
    (key,) = _made_up(1)
    began = time.perf_counter()
    with contextlib.closing(LocalStore(Space(folder, _BUDGET))) as store:
        store.find([key])
        writing = store.begin(os.urandom(32), parent=b"", part="0", parts=1, nbytes=len(_PAYLOAD))
        if isinstance(writing, Refusal):
            raise BenchError(f"a store takes nothing after its start: {writing.text}")
        took_s = time.perf_counter() - began
        writing.cancel()
    return took_s


def _store(folder: Path, keys: list[bytes], tenant: str) -> None:
    with contextlib.closing(LocalStore(Space(folder, _BUDGET))) as store:
        parent = b""
        for key in keys:
            writing = store.begin(
                key, parent=parent, part="0", parts=1, nbytes=len(_PAYLOAD), tenant=tenant
            )
            if isinstance(writing, Refusal):
                raise BenchError(f"a chunk was refused: {writing.text}")
            with writing:
                writing.write(0, memoryview(_PAYLOAD))
                if not writing.publish():
                    raise BenchError("a chunk was not kept")
            parent = key


def _made_up(count: int) -> list[bytes]:
    return [b"%032d" % number for number in range(count)]
