# SPDX-License-Identifier: Apache-2.0
"""Fields of a request that only one kind of engine knows, before a router that has both."""

from typing import Any

import pytest
from router_fakes import run
from test_router_kinds import CHAT, world

VLLMS = [
    {"allowed_token_ids": [1, 2]},
    {"bad_words": ["x"]},
    {"truncate_prompt_tokens": 4},
    {"include_stop_str_in_output": True},
    {"structured_outputs": {"regex": "a+"}},
    {"add_special_tokens": False},
]
AS_USUAL: list[dict[str, Any]] = [
    {"bad_words": []},
    {"include_stop_str_in_output": False},
    {"truncate_prompt_tokens": None},
    {"add_special_tokens": True},
]


@pytest.mark.parametrize("asked", VLLMS)
def test_a_field_that_only_vllm_knows_is_for_its_engines_alone(asked: dict[str, Any]) -> None:
    """SGLang's decode engines answered without it, and with status 200."""

    async def scenario() -> None:
        async with world("v", "s") as w:
            assert (await w.complete(**asked)).json["served_by"] == "p0"
            assert not w.d[0].bodies
        async with world("vs", "sv") as w:
            for _ in range(4):
                assert (await w.complete(**asked)).json["served_by"] == "d1"
            assert not w.d[0].bodies
            for engine in (w.d[1], w.p[0]):
                await engine.die()
                await w.down(engine)
            assert (await w.complete(**asked)).status == 503, "they may come back"
        async with world("s", "s") as w:
            assert (await w.complete(**asked)).status == 200, (
                "SGLang's way with fields it does not know"
            )

    run(scenario())


@pytest.mark.parametrize("asked", AS_USUAL)
def test_where_such_a_field_asks_for_nothing_pairs_answer(asked: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with world("v", "s") as w:
            assert (await w.complete(**asked)).json["served_by"] == "d0"

    run(scenario())


@pytest.mark.parametrize(
    "asked", [{"chat_template": "{{ 1 }}"}, {"add_generation_prompt": False}, {"documents": [{}]}]
)
def test_so_are_those_of_chats(asked: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with world("v", "s") as w:
            reply = await w.post("/v1/chat/completions", {**CHAT, **asked})
            assert reply.json["served_by"] == "p0"

    run(scenario())


def test_a_prompt_that_its_engine_cuts_is_not_handed_over_between_kinds() -> None:
    """The prefill engine was given the ids of the whole prompt, whose KV the decode engine then refused."""

    async def scenario() -> None:
        async with world("s", "v") as w:
            assert (await w.complete(truncate_prompt_tokens=4)).json["served_by"] == "d0"
            assert not w.p[0].bodies
            assert await w.metric("flows_total", flow="decode_alone", cause="truncated") == 1

    run(scenario())


@pytest.mark.parametrize("asked", [{"stop_regex": "a+"}, {"no_stop_trim": True}])
def test_a_field_that_only_sglang_knows_is_not_answered_by_vllm(asked: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with world("vs", "s") as w:
            assert (await w.complete(**asked)).json["served_by"] == "d0"
            assert not w.p[0].bodies

    run(scenario())
