# SPDX-License-Identifier: Apache-2.0
"""Prompts whose chunks a store has, as the router knows them: of a host, or a far one."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from router_fakes import World, until

from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.engines.pool import EnginePool


def prompt(seed: int, tokens: int = 1000) -> list[int]:
    return [Random(seed).randrange(1000) + place for place in range(tokens)]


def stored(world: World, store: str) -> int:
    """Chunks that the router knows a store to have."""
    pool = world.app[SHARED].pool
    assert isinstance(pool, EnginePool)
    return pool.caches.prefixes.store_chunks(store)


async def stored_known(world: World, chunks: int, store: str) -> None:
    """Wait until the router knows the store, and how to read prompts."""
    await until(lambda: stored(world, store) == chunks, f"{chunks} chunks are known")
    tokens = world.app[SHARED].tokens
    while (await tokens.of({"model": "m", "prompt": [1]})).tokens is None:  # noqa: ASYNC110 - not an event
        await asyncio.sleep(0.01)


async def sent(world: World, seed: int, **body: Any) -> str:
    """Name of the prefill engine that got a prompt."""
    before = [len(engine.bodies) for engine in world.p]
    reply = await world.complete(prompt=prompt(seed), **body)
    assert reply.status == 200, reply.text
    await world.idle()
    (name,) = [
        engine.name for engine, had in zip(world.p, before, strict=True) if len(engine.bodies) > had
    ]
    return name
