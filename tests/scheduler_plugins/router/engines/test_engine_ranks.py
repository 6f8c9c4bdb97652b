# SPDX-License-Identifier: Apache-2.0
"""A prefill engine with several data-parallel ranks behind one URL: its KV comes from the rank that the decode engine was
told of."""

import asyncio
from typing import Any
from unittest.mock import ANY

import pytest
from aiohttp import web
from router_fakes import FakeEngine, World, choices, run, until, waits_for_kv

RANK = "X-data-parallel-rank"


class Ranks(FakeEngine):
    """Answers for the rank that it is asked for; for one after the other where it is not, as vLLM's own balancing does."""

    def __init__(self, name: str, ranks: int, *, hears: bool = True) -> None:
        super().__init__(name, engine_id="")
        self.count(ranks)
        self.hears = hears
        self.turn = 0
        self.port_base = 7000
        self.asked: list[int] = []  # by prefill copies

    def count(self, ranks: int) -> None:
        self.ranks = ranks
        self.metrics = "".join(
            f'vllm:num_requests_waiting{{engine="{rank}",model_name="m"}} 0.0\n'
            for rank in range(ranks)
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        named = request.headers.get(RANK) if self.hears else None
        if named is None:
            self.turn += 1
        rank = self.turn % self.ranks if named is None else int(named)
        body = await request.json()
        params = body.get("kv_transfer_params") or {}
        address = {
            "remote_engine_id": f"rank {rank}",
            "remote_host": "127.0.0.1",
            "remote_port": self.port_base + rank,
        }
        if params.get("describe"):
            self.probes += 1
            return web.json_response({"kv_transfer_params": {**address, "describe": True}})
        self.asked.append(rank)
        self.bodies.append(body)
        return web.json_response({"id": "c", "kv_transfer_params": address, **choices("a")})


class RankedWorld(World):
    def __init__(self, ranks: int, *, hears: bool = True, **settings: Any) -> None:
        super().__init__(prefill=0, **settings)
        self.ranked = Ranks("p", ranks, hears=hears)
        self.p = [self.ranked]

    def told(self) -> list[int]:
        """The ranks that the decode engine was told of, request by request."""
        return [params["remote_port"] - 7000 for params in self.d[0].params if params]


def test_kv_comes_from_the_rank_that_the_decode_engine_was_told_of() -> None:
    async def scenario() -> None:
        async with RankedWorld(3) as world:
            for _ in range(6):
                assert (await world.complete()).status == 200
            assert world.ranked.asked == world.told()
            assert sorted(world.told()) == [0, 0, 1, 1, 2, 2], "they take turns"
            assert world.ranked.probes == 4, "its address has not changed"

    run(scenario())


@pytest.mark.parametrize(("named", "rank"), [("1", 1), ("7", 0), ("-1", 0), ("²", 0), ("", 0)])
def test_a_client_may_name_the_rank(named: str, rank: int) -> None:
    async def scenario() -> None:
        async with RankedWorld(2) as world:
            reply = await world.post(
                "/v1/completions", {"model": "m", "prompt": "a"}, **{RANK: named}
            )
            assert reply.status == 200
            assert world.ranked.asked == world.told() == [rank]

    run(scenario())


def test_ranks_that_come_and_go_are_asked_for_their_addresses() -> None:
    async def scenario() -> None:
        async with RankedWorld(1) as world:
            engine = world.known(world.ranked)
            assert len(engine.addresses) == 1
            for ranks in (3, 2):
                world.ranked.count(ranks)
                await until(lambda ranks=ranks: len(engine.addresses) == ranks, "they are known")
            await asyncio.gather(*(world.complete() for _ in range(8)))
            assert sorted(world.ranked.asked) == sorted(world.told()) == [0] * 4 + [1] * 4

    run(scenario())


def test_ranks_that_cannot_be_asked_one_by_one_hand_nothing_over() -> None:
    async def scenario() -> None:
        async with RankedWorld(2, hears=False) as world:
            engine = world.known(world.ranked)
            assert "a URL of its own" in engine.reason
            assert (await world.complete()).status == 200
            assert world.d[0].params == [None], "it computes the prompt itself"

    run(scenario())


def test_a_rank_that_has_started_anew_is_asked_again_and_nobody_waits_for_its_kv() -> None:
    async def scenario() -> None:
        async with RankedWorld(2) as world:
            world.ranked.port_base = 8000
            world.d[0].behave = waits_for_kv
            assert (await world.complete()).status == 200
            assert world.told() == [0], "the old address"
            assert world.d[0].params == [ANY, None], "the decode engine computes it then"
            assert await world.metric("prefill_failures_total", cause="moved") == 1
            await until(
                lambda: (
                    [address.port for address in world.known(world.ranked).addresses]
                    == [8000, 8001]
                ),
                "its addresses are known",
            )

    run(scenario())
