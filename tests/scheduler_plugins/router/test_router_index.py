# SPDX-License-Identifier: Apache-2.0
"""What the live router knows of its engines' caches, and what that does to requests."""

import json
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from router_fakes import World, run, until

from scheduler_plugins.router.app_keys import SHARED
from scheduler_plugins.router.index.hashes import token_bytes
from scheduler_plugins.router.index.prefixes import PromptKeys

LONG = "You are a helpful assistant. " * 100
TOKENS = list(range(64))
ENCODER = msgspec.msgpack.Encoder()


async def served_by(world: World, prompt: Any) -> list[int]:
    """How many copies each prefill engine has got after one more request."""
    assert (await world.complete(prompt=prompt)).status == 200
    return [len(engine.bodies) for engine in world.p]


def test_a_prompt_goes_where_its_prefix_was_computed() -> None:
    """The same prompt ten times: with an index one engine gets them all, and with none they are spread."""

    async def scenario() -> None:
        async with World(prefill=2, policy="conductor") as world:
            for _ in range(10):
                copies = await served_by(world, LONG)
            assert sorted(copies) == [0, 10]
        async with World(prefill=2, policy="round_robin") as world:
            for _ in range(10):
                copies = await served_by(world, LONG)
            assert copies == [5, 5]

    run(scenario())


def test_an_engine_that_restarted_is_not_expected_to_have_anything() -> None:
    async def scenario() -> None:
        async with World(prefill=1, policy="conductor") as world:
            await served_by(world, LONG)
            caches = world.app[SHARED].pool.caches
            url = world.p[0].url
            await until(lambda: caches.prefixes.state(url).blocks > 0, "the prompt is known")
            await world.p[0].die()
            await world.down(world.p[0])
            await world.p[0].start()
            await world.up(world.p[0])
            assert caches.prefixes.state(url).blocks == 0

    run(scenario())


def test_kv_events_reach_the_index_and_health_says_so() -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context()
        events = context.socket(zmq.PUB)
        port = events.bind_to_random_port("tcp://127.0.0.1")
        async with World(prefill=1) as world:
            (engine,) = [one for one in world.engines if one.url == world.p[0].url]
            pool = world.app[SHARED].pool
            pool.caches.follow(engine, f"tcp://127.0.0.1:{port}", None)
            health = (await world.get("/health")).json
            assert "no event has come" in health["engines"][0]["cache"]["note"]
            event = {
                "type": "BlockStored",
                "block_hashes": [1, 2, 3, 4],
                "parent_block_hash": None,
                "token_ids": TOKENS,
                "block_size": 16,
            }

            def told() -> bool:
                # A subscriber misses what was published before it was connected.
                batch = ENCODER.encode([1.0, [event]])
                events.send_multipart([b"", (0).to_bytes(8, "big"), batch])
                return bool(pool.caches.prefixes.state(engine.name).blocks == 4)

            await until(told, "the events have arrived")
            assert engine.block_tokens == 16
            prompt = PromptKeys((), token_bytes(TOKENS))
            assert pool.caches.prefixes.match(prompt, [engine], 64, 0.0) == [4]
            cache = (await world.get("/health")).json["engines"][0]["cache"]
            assert cache == {"source": "events", "blocks": 4}, json.dumps(cache)
        context.destroy(linger=0)

    run(scenario())
