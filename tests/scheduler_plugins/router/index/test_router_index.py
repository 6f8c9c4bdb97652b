# SPDX-License-Identifier: Apache-2.0
"""What the live router knows of its engines' caches, and what that does to requests."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from router_fakes import World, answer, run, until

from scheduler_plugins.admission.report import EngineReport, EventPorts, RankLoad
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.router.endpoints.app_keys import SHARED
from scheduler_plugins.router.index.hashes import token_bytes
from scheduler_plugins.router.index.prompt_keys import PromptKeys

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


@asynccontextmanager
async def destroyed(context: zmq.asyncio.Context) -> AsyncIterator[None]:
    """A context that is left to the garbage collector with its sockets keeps the collector waiting without end."""
    try:
        yield
    finally:
        context.destroy(linger=0)


def test_kv_events_reach_the_index_and_health_says_so() -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context()
        events = context.socket(zmq.PUB)
        port = events.bind_to_random_port("tcp://127.0.0.1")
        async with destroyed(context), World(prefill=1) as world:
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

    run(scenario())


def test_a_dead_port_of_kv_events_is_seen_in_metrics_and_health() -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context()
        events = context.socket(zmq.PUB)
        port = events.bind_to_random_port("tcp://127.0.0.1")
        async with destroyed(context), World(prefill=1) as world:
            fake = world.d[0]
            ports = EventPorts(events=f"tcp://127.0.0.1:{port}")
            fake.report = EngineReport(
                ranks=(load_of(0),), block_tokens=16, kv_events=ports
            ).encode()
            await fake.die()
            await world.down(fake)
            await fake.start()
            await world.up(fake)
            gauge = world.app[SHARED].metrics.events_connected

            def connected() -> float | None:
                (series,) = gauge.collect()
                return next(
                    (s.value for s in series.samples if s.labels["engine"] == fake.url), None
                )

            await until(lambda: connected() == 1, "the events are followed")
            events.close(linger=0)
            await until(lambda: connected() == 0, "their port is dead")
            assert world.known(fake).up
            engines = (await world.get("/health")).json["engines"]
            notes = [one["cache"].get("note", "") for one in engines if one["url"] == fake.url]
            assert [f"tcp://127.0.0.1:{port} cannot be reached" in note for note in notes] == [True]

    run(scenario())


def load_of(rank: int) -> RankLoad:
    model = CostModel.token_count()
    return RankLoad(
        rank=rank, queued_s=0.0, queued_tokens=0, waiting=0, batch=0, context=0, model=model
    )


@pytest.mark.parametrize(("cached", "sent_to"), [(512, "1"), (128, None)])
def test_a_request_for_one_engine_goes_to_the_rank_that_has_its_prompt(
    cached: int, sent_to: str | None
) -> None:
    """The engine tells its ranks and rank 0's port; rank 1 publishes at the next one. With little to gain it chooses itself."""

    async def scenario() -> None:
        context = zmq.asyncio.Context()
        publishers = [context.socket(zmq.PUB) for _ in range(2)]
        while True:
            port = publishers[0].bind_to_random_port("tcp://127.0.0.1")
            try:
                publishers[1].bind(f"tcp://127.0.0.1:{port + 1}")
                break
            except zmq.ZMQError:
                publishers[0].unbind(f"tcp://127.0.0.1:{port}")
        ids = list(range(600))
        async with destroyed(context), World(prefill=1) as world:
            fake = world.d[0]
            ports = EventPorts(events=f"tcp://127.0.0.1:{port}")
            loads = (load_of(0), load_of(1))
            fake.report = EngineReport(ranks=loads, block_tokens=16, kv_events=ports).encode()
            await fake.die()
            await world.down(fake)
            await fake.start()
            await world.up(fake)
            engine, prefixes = world.known(fake), world.app[SHARED].pool.caches.prefixes
            await until(lambda: engine.ranks == (0, 1), "the ranks are known")

            def told() -> bool:
                # A subscriber misses what was published before it was connected.
                for rank, tokens in enumerate((16, cached)):
                    event = {
                        "type": "BlockStored",
                        "block_hashes": list(range(1, 1 + tokens // 16)),
                        "parent_block_hash": None,
                        "token_ids": ids[:tokens],
                        "block_size": 16,
                    }
                    batch = ENCODER.encode([1.0, [event]])
                    publishers[rank].send_multipart([b"", (0).to_bytes(8, "big"), batch])
                return bool(prefixes.state(engine.name).blocks == (16 + cached) // 16)

            await until(told, "both ranks' events have arrived")
            await world.complete(prompt=ids)  # makes the router ask for the model
            tokens = world.app[SHARED].tokens
            await until(lambda: tokens._model is not None, "the model is known")
            assert (await world.complete(prompt=ids, n=2)).status == 200
            assert fake.headers[-1].get("X-data-parallel-rank") == sent_to
            assert (await world.complete(prompt=ids)).status == 200
            assert "X-data-parallel-rank" not in fake.headers[-1]  # its KV comes from elsewhere

    run(scenario())


def test_a_connection_to_an_engine_is_used_again_and_health_checks_have_their_own() -> None:
    async def scenario() -> None:
        async with World(prefill=1) as world:
            ports = list[int]()

            async def noted(fake: Any, request: Any, body: Any) -> Any:
                ports.append(request.transport.get_extra_info("peername")[1])
                return await answer(fake, request, body)

            world.d[0].behave = noted
            for _ in range(5):
                assert (await world.complete(n=2)).status == 200
            assert len(set(ports)) < len(ports)
            # An engine that takes no new connections is noticed although the old one would do.
            await world.d[0].refuse()
            await world.down(world.d[0])

    run(scenario())
