# SPDX-License-Identifier: Apache-2.0
"""Requests that no honest client sends: the engine judges them, and nothing breaks in the router."""

from typing import Any

import pytest
from router_fakes import World, run

from scheduler_plugins.qos.classes import QosClass
from scheduler_plugins.qos.rules import ClassRule, Match
from scheduler_plugins.router.prompt.body import CHAT, COMPLETIONS, parse

CHAT_BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "odd",
    [
        {"logprobs": "all"},
        {"logprobs": [1]},
        {"logprobs": {}},
        {"tools": [{"function": "x"}]},
        {"cache_salt": "\ud800"},
        {"user": "\ud800"},
        {"max_tokens": 10**400},
        {"messages": 5},
        {"prompt": [-1, 10**30]},
    ],
)
def test_a_field_of_a_wrong_type_is_left_to_the_engine(odd: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with World(policy="session") as world:
            reply = await world.complete(**odd)
            assert (reply.status, reply.json["served_by"]) == (200, "d0")

    run(scenario())


@pytest.mark.parametrize(
    "odd", [{"logprobs": True, "top_logprobs": "x"}, {"tools": [{"function": 5}]}, {"prompt": [7]}]
)
def test_so_is_one_of_a_chat(odd: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with World() as world:
            assert (await world.post(CHAT, {**CHAT_BODY, **odd})).status == 200

    run(scenario())


def test_what_the_router_cannot_make_a_request_of_is_an_error_of_openais_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with World() as world:

            def broken(*args: object) -> None:
                raise RuntimeError("a mistake of the router's")

            monkeypatch.setattr("scheduler_plugins.router.request.client_request.describe", broken)
            reply = await world.complete()
            assert (reply.status, reply.json["error"]["type"]) == (500, "internal_error")
            monkeypatch.undo()

    run(scenario())


def test_the_prompt_is_that_of_the_endpoint() -> None:
    """Else a chat's stray `prompt` would be computed on the prefill side, and its messages on the other."""
    assert "prompt" not in parse(b'{"messages": [], "prompt": [1, 2]}', CHAT)
    assert "messages" not in parse(b'{"messages": 5, "prompt": [1, 2]}', COMPLETIONS)


@pytest.mark.parametrize("order", [("free", "premium"), ("premium", "free")])
def test_a_header_that_is_given_twice_gives_no_class(order: tuple[str, str]) -> None:
    """A proxy that adds the customer's tier must not be outvoted by the customer."""

    async def scenario() -> None:
        classes = (
            QosClass(name="premium", reserved_fraction=0.5, priority=2),
            QosClass(name="free", reserved_fraction=0.1, priority=1),
        )
        routes = (ClassRule(match=Match(header="x-tier: premium"), qos="premium"),)
        async with World(
            classes=classes, routes=routes, router_key="a secret that all routers of a test share"
        ) as world:
            twice = [("X-Tier", tier) for tier in order]
            body = {"model": "m", "prompt": "hi"}
            async with world.client.post(COMPLETIONS, json=body, headers=twice) as response:
                assert response.status == 200
            assert world.d[0].headers[-1]["X-PD-Class"].split(".")[2] == "free"

    run(scenario())


@pytest.mark.parametrize("field", ["tools", "cache_salt", "prompt", "logit_bias"])
def test_no_depth_of_nesting_is_too_much_for_one_part_of_the_router_alone(field: str) -> None:
    """The deepest that can be read is Python's to say: about 990 in 3.11, 10,000 since 3.12."""

    async def scenario() -> None:
        async with World() as world:

            async def status(depth: int) -> int:
                nested = "[" * depth + "]" * depth
                body = f'{{"model": "m", "prompt": "x", "{field}": {nested}}}'
                return (await world.post(COMPLETIONS, body.encode())).status

            taken, refused = 100, 200
            while await status(refused) == 200:
                taken, refused = refused, 2 * refused
            while refused - taken > 100:
                middle = (taken + refused) // 2
                taken, refused = (
                    (middle, refused) if await status(middle) == 200 else (taken, middle)
                )
            seen = {await status(depth) for depth in range(taken - 100, refused + 10)}
            assert seen == {200, 400}

    run(scenario())
