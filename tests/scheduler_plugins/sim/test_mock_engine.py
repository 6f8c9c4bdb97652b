# SPDX-License-Identifier: Apache-2.0
"""The mock engine: vLLM's HTTP and KV events, times from the cost model, and the router in front of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.router.engines.traffic import read
from scheduler_plugins.router.server import RouterServer
from scheduler_plugins.router.settings.config import RouterConfig
from scheduler_plugins.sim.mock.events import (
    BlockRemoved,
    BlockStored,
    EventBatch,
    Publisher,
    WatchedBlocks,
)
from scheduler_plugins.sim.mock.server import GENERATE, WORD, MockEngine, block_hashes, text_ids
from scheduler_plugins.sim.mock.settings import MockSettings

COSTS = CostModel(a=1e-4, c=0.01, d0=0.005, chunk_tokens=512)
TEXT = "the same beginning " * 20


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await scenario

    asyncio.run(limited())


@asynccontextmanager
async def engine(**settings: Any):
    made = MockEngine(MockSettings(**{"costs": COSTS, "speed": 10.0, **settings}))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def ask(session: aiohttp.ClientSession, port: int, path: str = "completions", **body: Any):
    async with session.post(
        f"http://127.0.0.1:{port}/v1/{path}", json={"model": "mock", **body}
    ) as answer:
        raw = await answer.read()
        assert answer.status == 200, raw
        return raw


async def cached(session: aiohttp.ClientSession, port: int) -> tuple[float, float]:
    """Tokens of all prompts, and those that were cached, as `/metrics` says."""
    async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
        rows = (line.rsplit(" ", 1) for line in (await answer.text()).splitlines())
        found = {name.partition("{")[0]: float(value) for name, value in rows}
    return found["vllm:prefix_cache_queries_total"], found["vllm:prefix_cache_hits_total"]


def test_answers_have_as_many_tokens_as_asked_and_say_what_was_cached() -> None:
    async def scenario() -> None:
        async with engine() as mock, aiohttp.ClientSession() as session:
            first = json.loads(await ask(session, mock.port, prompt=TEXT, max_tokens=5))
            assert (
                first["usage"]["completion_tokens"]
                == first["choices"][0]["text"].count("word")
                == 5
            )
            assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            again = json.loads(await ask(session, mock.port, prompt=TEXT, max_tokens=1))
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 80
            assert again["usage"]["prompt_tokens"] == len(text_ids(TEXT.encode()))
            messages = [{"role": "user", "content": "hi"}]
            raw = await ask(
                session, mock.port, "chat/completions", messages=messages, stream=True, max_tokens=7
            )
            events = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: ")]
            assert events[-1] == "[DONE]"
            assert [json.loads(one)["choices"][0]["delta"]["content"] for one in events[:-1]] == [
                " word"
            ] * 7
            async with session.get(f"http://127.0.0.1:{mock.port}/metrics") as answer:
                text = await answer.text()
            assert 'vllm:prefix_cache_hits_total{model_name="mock",engine="0"} 80' in text
            assert read(text, 0.0).totals, "or the router says that it has no PDConnector"

    run(scenario())


def test_token_ids_in_are_token_ids_out() -> None:
    async def scenario() -> None:
        async with engine() as p, engine() as d:
            urls = {
                side: (f"http://127.0.0.1:{one.port}",)
                for side, one in (("prefill", p), ("decode", d))
            }
            sent = {"token_ids": list(range(100)), "sampling_params": {"max_tokens": 5}}
            async with (
                RouterServer(RouterConfig(**urls, port=0)) as router,
                aiohttp.ClientSession() as session,
            ):
                url = f"http://127.0.0.1:{router.port}{GENERATE}"
                async with session.post(url, json=sent) as answer:
                    whole = await answer.json()
                assert whole["choices"][0]["token_ids"] == [WORD] * 5
                assert whole["usage"]["prompt_tokens"] == 100
                async with session.post(url, json={**sent, "stream": True}) as answer:
                    events = (await answer.text()).split("\n\n")
                assert events[-2] == "data: [DONE]"
                choices = [json.loads(one[6:])["choices"][0] for one in events[:-2]]
                assert [one["token_ids"] for one in choices] == [[WORD]] * 5
                assert choices[-1]["finish_reason"] == "length"
                # The second prompt is cached, and both were computed by the prefill engine.
                assert await cached(session, p.port) == (200, 96)

    run(scenario())


def test_an_address_that_is_taken_leaves_no_socket_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    context = zmq.asyncio.Context
    monkeypatch.setattr(zmq.asyncio, "Context", lambda: made.append(context()) or made[-1])

    async def scenario() -> None:
        first = Publisher("tcp://127.0.0.1:*")
        for addresses in ((first.endpoint, ""), ("tcp://127.0.0.1:*", first.endpoint)):
            with pytest.raises(OSError, match="KV events at"):
                Publisher(*addresses)
        assert [one.closed for one in made] == [False, True, True]
        first.close()

    run(scenario())


def test_events_say_what_is_cached_and_can_be_replayed() -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context()
        async with AsyncExitStack() as stack:
            stack.callback(context.destroy, linger=0)
            endpoint = "tcp://127.0.0.1:*"
            mock = await stack.enter_async_context(
                engine(kv_events=endpoint, kv_replay=endpoint, cache_blocks=8)
            )
            session = await stack.enter_async_context(aiohttp.ClientSession())
            assert mock.events is not None
            for prompt in (TEXT, "another " * 40):
                await ask(session, mock.port, prompt=prompt, max_tokens=1)
            asker = context.socket(zmq.DEALER)
            asker.connect(mock.events.replay_endpoint)
            await asker.send_multipart((b"", (0).to_bytes(8, "big")))
            cached: dict[int, list[int]] = {}
            numbers = []
            while True:
                _, _, number, payload = await asker.recv_multipart()
                if not payload:
                    break
                numbers.append(int.from_bytes(number, "big"))
                for one in msgspec.msgpack.decode(payload, type=EventBatch).events:
                    follow(cached, one)
            assert numbers == list(range(len(numbers)))
            assert len(numbers) == 2
            assert len(cached) == 8, "what was evicted was told"
            ids = text_ids(b"another " * 40)
            assert set(block_hashes(ids, 16)) & set(cached)
            for name, tokens in cached.items():
                assert name in [*block_hashes(ids, 16), *block_hashes(text_ids(TEXT.encode()), 16)]
                assert len(tokens) == 16

    run(scenario())


def follow(cached: dict[int, list[int]], event: BlockStored | BlockRemoved) -> None:
    if isinstance(event, BlockRemoved):
        for name in event.block_hashes:
            del cached[name]
        return
    assert event.parent_block_hash is None or event.parent_block_hash in cached
    for n, name in enumerate(event.block_hashes):
        assert name not in cached
        cached[name] = event.token_ids[n * 16 : (n + 1) * 16]


def test_an_event_is_told_when_the_step_has_ended() -> None:
    told: list[Any] = []
    cache = WatchedBlocks(4, 16)
    cache.publish = told.append
    ids = list(range(48))
    hashes = block_hashes(ids, 16)
    cache.know(hashes, ids)
    cache.store(hashes)
    assert not told
    cache.computed(1.0)
    (stored,) = told[0]
    assert stored.block_hashes == hashes
    assert stored.token_ids == ids


def test_the_router_hands_over_between_mocks() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            p = [await stack.enter_async_context(engine()) for _ in range(2)]
            d = [await stack.enter_async_context(engine()) for _ in range(2)]
            config = RouterConfig(
                prefill=tuple(f"http://127.0.0.1:{one.port}" for one in p),
                decode=tuple(f"http://127.0.0.1:{one.port}" for one in d),
                policy="prefix_hash",
                port=0,
            )
            router = await stack.enter_async_context(RouterServer(config))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            for n in range(6):
                raw = await ask(
                    session, router.port, prompt=TEXT * 4, max_tokens=20 + n, stream=True
                )
                assert raw.count(b" word") == 20 + n
            shown = [await cached(session, one.port) for one in p]
            computed = sorted(queries for queries, _ in shown)
            assert computed[0] == 0, "one prefix, one prefill engine"
            assert computed[1] == 6 * len(text_ids((TEXT * 4).encode()))
            assert sum(hits for _, hits in shown) > 0.7 * computed[1]
            assert not any(one._engine.prefill for one in d), "decode engines computed no prompt"
            assert all(one._engine.busy_s == 0.0 for one in d)

    run(scenario())


def test_kv_waits_until_its_decode_engine_has_room() -> None:
    """As in vLLM, where a request waits in the queue until it has pages. The engine preempts nothing for it."""

    async def scenario() -> None:
        async with engine(speed=1.0, kv_tokens=1000.0) as mock:
            clock, ended = mock.clock, list[str]()

            async def receive(name: str, tokens: int, answer: int) -> None:
                asked = Waiting(
                    id=name,
                    tokens=tokens,
                    block_hashes=(),
                    arrival_s=clock.now_s,
                    max_tokens=answer,
                )
                async with clock.room(tokens):
                    made = clock.receive(asked)
                async for _ in made.progress():
                    pass
                ended.append(name)
                assert made.record.preemptions == 0

            async with asyncio.TaskGroup() as group:
                group.create_task(receive("first", 700, 20))
                await asyncio.sleep(0.03)
                left = group.create_task(receive("left", 600, 2))
                group.create_task(receive("second", 600, 5))
                group.create_task(receive("small", 100, 1))
                await asyncio.sleep(0.02)
                assert ended == []
                left.cancel()
            assert ended == ["first", "small", "second"]
            async with clock.room(1000):
                pass

    run(scenario())


def test_two_mocks_hand_over_as_sglang_s_router_asks() -> None:
    async def scenario() -> None:
        async with engine(sglang=True) as p, engine(sglang=True) as d:
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{p.port}/server_info") as answer:
                    assert (await answer.json())["model_path"] == "mock"
                room = {
                    "bootstrap_host": "127.0.0.1",
                    "bootstrap_port": p.port,
                    "bootstrap_room": 7,
                }
                asked = {"prompt": TEXT, "max_tokens": 5, "stream": True, **room}
                _, raw = await asyncio.gather(
                    ask(session, p.port, **asked), ask(session, d.port, **asked)
                )
                async with session.get(f"http://127.0.0.1:{d.port}/metrics") as answer:
                    counted = read(await answer.text(), 0.0).producers
            (pair,) = counted.values()
            assert [*counted] == [f"127.0.0.1:{p.port}"], "the live page shows KV by pair"
            assert (pair.transfers, pair.failed, pair.chunks, [*pair.codecs]) == (1, 0, 1, ["raw"])
            assert raw.count(b" word") == 5
            assert p._engine.busy_s > 0
            assert d._engine.busy_s == 0.0, "the decode engine computed no prompt"

    run(scenario())


def test_a_stream_goes_on_at_another_mock_when_its_engine_dies() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            p = await stack.enter_async_context(engine())
            d = [await stack.enter_async_context(engine(speed=1.0)) for _ in range(2)]
            config = RouterConfig(
                prefill=(f"http://127.0.0.1:{p.port}",),
                decode=tuple(f"http://127.0.0.1:{one.port}" for one in d),
                port=0,
            )
            router = await stack.enter_async_context(RouterServer(config))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            body = {"model": "mock", "prompt": TEXT, "max_tokens": 200, "stream": True}
            url = f"http://127.0.0.1:{router.port}/v1/completions"
            async with session.post(url, json=body) as answer:
                got = await answer.content.readuntil(b"\n\n")
                (busy,) = [one for one in d if one.clock.running]
                await busy.close()
                got += await answer.content.read()
            assert got.count(b" word") == 200
            assert got.endswith(b"data: [DONE]\n\n")
            assert b"token_ids" not in got, "the client did not ask for them"

    run(scenario())


def test_a_client_that_leaves_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        async with engine(speed=1.0) as mock, aiohttp.ClientSession() as session:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await ask(session, mock.port, prompt=TEXT, max_tokens=10_000)
            while mock.clock.running or mock._engine.decode.batch:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    run(scenario())
