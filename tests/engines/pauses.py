# SPDX-License-Identifier: Apache-2.0
"""Engines that stand still: frozen as a process, or paused by an operator (`/pause`) while KV moves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from harness import Answer, Prompt, Service, completion, prefill_step, wait_until
from pairs import Pair

from pd_connector.tools.launch import VllmEngine

LEASED = "pd_connector:leased_pages"
AT_ONCE_S = 5.0
"""Half of the time after which a decode engine gives a silent prefill engine up, and much less than `wait_timeout_s`."""


@contextmanager
def paused(service: Service) -> Iterator[None]:
    """Freeze an engine: its sockets stay open, and nothing of it answers."""
    service.pause()
    try:
        yield
    finally:
        service.resume()


@contextmanager
def no_generation(engine: VllmEngine, mode: str) -> Iterator[None]:
    """Within the block the engine generates nothing."""
    began = time.monotonic()
    engine.client.post(f"/pause?mode={mode}&clear_cache=false", {})
    took_s = time.monotonic() - began
    try:
        yield
    finally:
        engine.client.post("/resume", {})
    assert took_s < AT_ONCE_S, f"{engine.name}: {took_s:.1f} s until it was paused"


@contextmanager
def in_background(call: Any, *args: Any, **kwargs: Any) -> Iterator[Future[Answer]]:
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(call, *args, **kwargs)


def loading(pair: Pair) -> bool:
    return pair.d.metrics().total("pd_connector:incoming_transfers") > 0


@contextmanager
def fetching_while_paused(pair: Pair, prompt: Prompt, salt: str) -> Iterator[Future[Answer]]:
    """Within the block the decode engine is paused, and the KV of a request comes to it. Yields the request's answer."""
    params = prefill_step(pair.p, prompt, cache_salt=salt)
    wait_until(lambda: pair.p.metrics().total(LEASED), "the KV is on offer")
    extra = {"cache_salt": salt, "kv_transfer_params": params}
    with paused(pair.p), in_background(completion, pair.d, prompt, **extra) as answer:
        wait_until(lambda: loading(pair), "the transfer is under way")
        with no_generation(pair.d, "keep"):
            pair.p.resume()
            yield answer
