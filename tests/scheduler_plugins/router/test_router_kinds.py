# SPDX-License-Identifier: Apache-2.0
"""Engines of two kinds behind one router: who is sent what, and which pairs a request may use."""

import json
import re
from collections import Counter
from typing import Any

import pytest
from aiohttp import web
from router_fakes import (
    DONE,
    Behaviour,
    FakeEngine,
    World,
    run,
    status,
    until,
)

from scheduler_plugins.admission.pool_report import PoolReport
from scheduler_plugins.router.engines.engine import Role
from scheduler_plugins.router.engines.kinds import Kind, sglang_facts
from scheduler_plugins.router.handoff.engine_bodies import Prefill, of_two_kinds

IDS = [5, 6, 7]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BOOTSTRAP_PORT = 8998


class Fake(FakeEngine):
    """An engine with a tokenizer."""

    def __init__(self, name: str, engine_id: str | None) -> None:
        super().__init__(name, engine_id)
        self.ids: list[int] | None = IDS
        self.tokenized: list[dict[str, Any]] = []

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        self.tokenized.append(await request.json())
        if self.ids is None:
            error = {"message": "no such template", "code": 400}
            return web.json_response({"error": error}, status=400)
        return web.json_response({"tokens": self.ids, "count": len(self.ids)})


class FakeSglang(Fake):
    """An SGLang engine's HTTP side."""

    def __init__(self, name: str, mode: str) -> None:
        super().__init__(name, f"engine-{name}")
        self.mode = mode

    def describes_itself(self) -> dict[str, Any]:
        address = {"remote_engine_id": self.engine_id, "remote_host": "127.0.0.1"}
        address |= {"remote_port": 7001, "remote_ranks": [["127.0.0.1", 7001, 0, 4, 0]]}
        return {
            "disaggregation_mode": self.mode,
            "disaggregation_bootstrap_port": BOOTSTRAP_PORT,
            "served_model_name": "m",
            "internal_states": [{"pd_connector": address if self.mode == "prefill" else {}}],
        }

    def routes(self, app: web.Application) -> None:
        super().routes(app)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/generate", self._complete)

    async def _server_info(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self.describes_itself())


def world(prefill: str, decode: str, **settings: Any) -> World:
    """A router before engines of these kinds: one letter each, `v` or `s`."""
    made = World(prefill=0, decode=0, **settings)
    for side, letters in (("prefill", prefill), ("decode", decode)):
        for number, letter in enumerate(letters):
            name = f"{side[0]}{number}"
            vllm = Fake(name, f"engine-{name}" if side == "prefill" else None)
            engine = FakeSglang(name, side) if letter == "s" else vllm
            (made.p if side == "prefill" else made.d).append(engine)
    return made


def room_of(sent: dict[str, Any]) -> int:
    room = sent["bootstrap_room"]
    assert 0 < room < 1 << 63
    assert (sent["bootstrap_host"], sent["bootstrap_port"]) != (None, None)
    return int(room)


def test_an_sglang_engine_reports_its_place_in_a_pool_too() -> None:
    async def scenario() -> None:
        made = world("v", "s")
        report = PoolReport(store="a" * 32, model="ab" * 32, chunk_tokens=128)
        made.d[0].pool = lambda after: web.Response(body=report.encode())
        async with made as w:
            await until(lambda: w.known(w.d[0]).store is not None, "its place is known")
            assert w.known(w.p[0]).store is None, "control"

    run(scenario())


def test_kinds_are_found_by_asking() -> None:
    async def scenario() -> None:
        async with world("vs", "sv") as w:
            found = [w.known(engine).kind for engine in (*w.p, *w.d)]
            assert found == [Kind.VLLM, Kind.SGLANG, Kind.SGLANG, Kind.VLLM]
            told = (await w.get("/health")).json["engines"]
            assert [engine["kind"] for engine in told] == ["vllm", "sglang", "sglang", "vllm"]
            assert all(engine["hands_over_kv"] for engine in told if engine["role"] == "prefill")

    run(scenario())


def test_sides_are_found_by_asking_where_the_operator_does_not_say() -> None:
    async def scenario() -> None:
        async with world("vs", "sv", unnamed=True) as w:
            assert [w.known(e).role for e in w.p] == [Role.PREFILL] * 2
            assert [w.known(e).role for e in w.d] == [Role.DECODE] * 2
            for _ in range(4):
                assert (await w.complete()).status == 200
            assert all(engine.bodies for engine in (*w.p, *w.d))

    run(scenario())


def test_two_of_sglang_get_the_same_request_and_room() -> None:
    async def scenario() -> None:
        async with world("s", "s") as w:
            request = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
            mine = {"bootstrap_room": 1, "kv_transfer_params": {"do_remote_prefill": True}}
            await w.post("/v1/chat/completions", {**request, **mine})
            (prefill,), (decode,) = w.p[0].bodies, w.d[0].bodies
            room = room_of(decode)
            assert room == room_of(prefill) != 1
            named = {"bootstrap_host": "127.0.0.1", "bootstrap_port": BOOTSTRAP_PORT}
            # SGLang refuses `return_token_ids` in streams of chats, so it is not asked for them.
            assert decode == {**request, **named, "bootstrap_room": room}
            one = {"stream": False, "max_tokens": 1}
            assert prefill == {**CHAT, **one, **named, "bootstrap_room": room}

    run(scenario())


def test_vllm_prefills_what_sglang_has_read() -> None:
    async def scenario() -> None:
        async with world("v", "s") as w:
            request = {**CHAT, "temperature": 0.5, "top_k": 4, "seed": 9, "min_tokens": 3}
            request |= {"repetition_penalty": 1.3, "max_tokens": 40, "cache_salt": "x"}
            await w.post("/v1/chat/completions", request)
            (prefill,), (decode,) = w.p[0].bodies, w.d[0].bodies
            room = room_of(decode)
            assert w.d[0].tokenized == [request]
            assert decode == {
                **request,
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": 7000,  # no registry: a rank's control port
                "bootstrap_room": room,
                # for a prompt that must be computed again
                "custom_params": {"pd_prefill_server": {"url": w.p[0].url, "rank": None}},
            }
            assert prefill == {
                "model": "m",
                "prompt": IDS,
                "max_tokens": 1,
                "stream": False,
                "temperature": 0.5,
                "top_k": 4,
                "seed": 9,
                "min_tokens": 1,
                "cache_salt": "x",
                "kv_transfer_params": {
                    "do_remote_decode": True,
                    "from_first_token": True,
                    "do_remote_prefill": False,
                    "transfer_id": str(room),
                },
            }

    run(scenario())


def test_no_client_names_the_server_that_a_decode_engine_asks() -> None:
    async def scenario() -> None:
        async with world("s", "s") as w:
            server = {"pd_prefill_server": {"url": "http://10.0.0.1:22", "rank": None}}
            assert (await w.complete(custom_params={"qos": "a", **server})).status == 200
            assert [each.bodies[0]["custom_params"] for each in (*w.p, *w.d)] == [{"qos": "a"}] * 2
            header = {"X-Override-Bootstrap-Host": "2.2.2.2", "x-override-bootstrap-room": "5"}
            await w.post("/v1/chat/completions", CHAT, **header)
            for engine in (*w.p, *w.d):
                assert not [name for name in engine.headers[-1] if "override" in name.lower()]

    run(scenario())


def test_sglang_prefills_what_vllm_has_read() -> None:
    async def scenario() -> None:
        async with world("s", "v") as w:
            request = {"model": "m", "prompt": "hello", "logprobs": 2, "cache_salt": "x"}
            request |= {"structured_outputs": {"regex": "a+"}}  # the first token is vLLM's own
            await w.post("/v1/completions", request)
            (prefill,), (decode,) = w.p[0].bodies, w.d[0].bodies
            params = decode.pop("kv_transfer_params")
            assert decode == request
            assert w.d[0].tokenized == [{"model": "m", "prompt": "hello"}]
            room = room_of(prefill)
            assert params["remote_request_id"] == str(room)
            assert params["remote_ranks"] == [["127.0.0.1", 7001, 0, 4, 0]]
            assert prefill["input_ids"] == IDS
            assert prefill["sampling_params"] == {"max_new_tokens": 1, "temperature": 0}
            assert prefill["cache_salt"] == "x"

    run(scenario())


def test_of_replicas_the_one_is_named_that_sglang_gives_the_room_to() -> None:
    states = []
    for number in range(3):
        address = {"remote_engine_id": f"replica-{number}", "remote_host": "10.0.0.1"}
        states.append({"pd_connector": {**address, "remote_port": 7000 + number}})
    told = {"disaggregation_mode": "prefill", "internal_states": states, "model_path": "m"}
    facts = sglang_facts(json.dumps(told).encode())
    assert facts is not None
    prefill = Prefill(Kind.SGLANG, "m", facts.replicas, ("10.0.0.1", BOOTSTRAP_PORT))
    for _ in range(8):
        plan = of_two_kinds({"model": "m", "prompt": "hello"}, prefill, IDS)
        replica = plan.prefill["bootstrap_room"] % 3
        assert plan.decode["kv_transfer_params"]["remote_engine_id"] == f"replica-{replica}"


@pytest.mark.parametrize(("keeps", "sent"), [(False, IDS), (True, IDS[:-1])])
def test_vllm_gets_the_states_before_the_last_token(keeps: bool, sent: list[int]) -> None:
    """It computes that token itself. An SGLang prefill engine computes what it is given."""
    named = {"remote_engine_id": "e", "remote_host": "10.0.0.1", "remote_port": 7000}
    states = [{"pd_connector": {**named, "keeps_states": keeps}}]
    facts = sglang_facts(
        json.dumps({"disaggregation_mode": "prefill", "internal_states": states}).encode()
    )
    assert facts is not None
    prefill = Prefill(Kind.SGLANG, "m", facts.replicas, ("10.0.0.1", BOOTSTRAP_PORT))
    request = {"model": "m", "prompt": "hello"}
    assert of_two_kinds(request, prefill, IDS).prefill["input_ids"] == sent
    assert of_two_kinds(request, prefill, IDS[:1]).prefill["input_ids"] == IDS[:1]


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]], ids=["alone", "in a list"])
def test_a_prompt_of_ids_is_not_tokenised(prompt: list[Any]) -> None:
    async def scenario() -> None:
        async with world("v", "s") as w:
            assert (await w.complete(prompt=prompt)).status == 200
            assert w.p[0].bodies[0]["prompt"] == [1, 2, 3]
            assert not w.d[0].tokenized

    run(scenario())


def test_what_the_engine_cannot_read_is_its_own_words_to_the_client() -> None:
    async def scenario() -> None:
        async with world("v", "s") as w:
            w.d[0].ids = None
            reply = await w.complete()
            assert (reply.status, reply.json["error"]["message"]) == (400, "no such template")
            assert not w.p[0].bodies

    run(scenario())


LOGPROBS = {"tokens": ["a", "b"], "token_logprobs": [0.0, -0.5], "top_logprobs": [{"?": 0.0}, {}]}
FIRST = {"tokens": ["a"], "token_logprobs": [-0.25], "top_logprobs": [{"b": -2.0, "a": -0.25}]}


def answers(*contents: dict[str, Any]) -> Behaviour:
    """These events, or the only one as a whole."""

    async def behave(
        engine: FakeEngine, request: web.Request, sent: dict[str, Any]
    ) -> web.StreamResponse:
        if not sent.get("stream"):
            return web.json_response(contents[0])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for content in contents:
            await response.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        await response.write(DONE)
        return response

    return behave


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, **fields}]}


@pytest.mark.parametrize("streams", [False, True])
def test_the_first_logprob_is_the_one_of_the_engine_that_chose_the_token(streams: bool) -> None:
    async def scenario() -> None:
        async with world("v", "s") as w:
            w.p[0].behave = answers(choice(text="a", logprobs=FIRST))
            w.d[0].behave = answers(choice(text="ab", logprobs=LOGPROBS), choice(text="c"))
            reply = await w.complete(logprobs=1, stream=streams)
            got = (reply.events[0] if streams else reply.json)["choices"][0]["logprobs"]
            assert got["token_logprobs"] == [-0.25, -0.5]
            assert got["top_logprobs"] == [{"a": -0.25}, {}]
            assert w.p[0].bodies[0]["logprobs"] == 1
            if streams:
                assert reply.events[1:] == [choice(text="c"), "[DONE]"]

    run(scenario())


def test_as_many_first_tokens_are_told_as_were_asked_for() -> None:
    """SGLang has one dummy token as often in their place; vLLM tells the chosen one beside the likeliest."""
    told = {"x": -3.0, "a": -0.25, "c": -2.5, "b": -2.0}
    first = {"tokens": ["x"], "token_logprobs": [-3.0], "top_logprobs": [told]}

    async def scenario() -> None:
        async with world("v", "s") as w:
            w.p[0].behave = answers(choice(text="x", logprobs=first))
            w.d[0].behave = answers(choice(text="xb", logprobs=LOGPROBS))
            got = (await w.complete(logprobs=3)).json["choices"][0]["logprobs"]
            assert got["token_logprobs"] == [-3.0, -0.5]
            assert got["top_logprobs"] == [{"a": -0.25, "b": -2.0, "c": -2.5}, {}]

    run(scenario())


@pytest.mark.parametrize("streams", [False, True])
def test_the_same_for_chat(streams: bool) -> None:
    entry = {"token": "a", "bytes": [97], "logprob": 0.0}
    entry |= {"top_logprobs": [{"token": "?", "bytes": [63], "logprob": 0.0}]}
    other = {**entry, "logprob": -3.0}

    async def scenario() -> None:
        async with world("v", "s") as w:
            w.p[0].behave = answers(choice(text="a", logprobs=FIRST))
            part = choice(logprobs={"content": [entry, other]})
            w.d[0].behave = answers(
                *([choice(delta={"role": "assistant"})] if streams else []), part
            )
            request = {**CHAT, "logprobs": True, "top_logprobs": 1, "stream": streams}
            reply = await w.post("/v1/chat/completions", request)
            got = (reply.events[1] if streams else reply.json)["choices"][0]["logprobs"]["content"]
            assert (got[0]["logprob"], got[1]) == (-0.25, other)
            assert got[0]["top_logprobs"] == [{"token": "a", "bytes": [97], "logprob": -0.25}]

    run(scenario())


def test_an_answer_without_that_logprob_is_not_passed_on() -> None:
    async def scenario() -> None:
        async with world("v", "s") as w:
            w.d[0].behave = answers(choice(text="ab", logprobs=LOGPROBS))
            reply = await w.complete(logprobs=1)  # P answers without any
            assert reply.json.get("served_by") == "p0", "vLLM alone, the second time"
            assert await w.metric("retries_total", cause="no_logprobs") == 1

    run(scenario())


ONE_KIND = {
    "grammar": {"response_format": {"type": "json_object"}},
    "logit_processor": {"logits_processors": ["x"]},
    "logprobs": {"logprobs": 100},
}


@pytest.mark.parametrize("cause", ONE_KIND)
def test_a_first_token_that_only_sglang_can_choose_goes_to_a_pair_of_one_kind(cause: str) -> None:
    async def scenario() -> None:
        async with world("vs", "s") as w:
            for _ in range(3):
                await w.complete(**ONE_KIND[cause])
            assert (len(w.p[0].bodies), len(w.p[1].bodies), len(w.d[0].bodies)) == (0, 3, 3)
        async with world("v", "s") as w:  # where there is none, vLLM answers alone
            reply = await w.complete(**ONE_KIND[cause])
            assert reply.json["served_by"] == "p0"
            assert not w.d[0].bodies
            assert await w.metric("flows_total", flow="prefill_alone", cause=cause) == 1

    run(scenario())


@pytest.mark.parametrize(
    "asked", [{"regex": "a+"}, {"lora_path": "style"}, {"custom_logit_processor": "x"}]
)
def test_a_field_that_only_sglang_knows_is_for_its_engines_alone(asked: dict[str, Any]) -> None:
    """vLLM answered alone, without it, and with status 200."""

    async def scenario() -> None:
        async with world("vs", "sv") as w:
            for _ in range(4):
                assert (await w.complete(**asked)).status == 200
            assert (await w.complete(**asked, n=2)).status == 400
            assert not w.p[0].bodies
            assert not w.d[1].bodies
            await w.d[0].die()
            await w.down(w.d[0])
            assert (await w.complete(**asked)).status == 503, "it may come back"
        async with world("v", "s") as w:
            reply = await w.complete(**asked)
            assert reply.status == 400
            assert "only SGLang's engines know it" in reply.json["error"]["message"]
            assert not any(engine.bodies for engine in (*w.p, *w.d))
        async with world("v", "v") as w:
            assert (await w.complete(**asked)).status == 200, (
                "vLLM's way with fields it does not know"
            )

    run(scenario())


def test_several_answers_go_to_an_engine_that_computes_prompts() -> None:
    async def scenario() -> None:
        async with world("vs", "sv") as w:
            await w.complete(n=2)
            assert w.d[1].bodies == [{"model": "m", "prompt": "hello", "n": 2}]
        async with world("s", "sv") as w:
            await w.d[1].die()
            await w.down(w.d[1])
            assert (await w.complete(n=2)).status == 503, "it may come back"

    run(scenario())


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"n": 3}, "n 3: .* send the request n times"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"echo": True, "logprobs": 1}, "logprobs of the prompt"),
        ({"prompt_logprobs": 0}, "logprobs of the prompt"),
    ],
)
def test_what_pairs_of_sglang_do_not_answer_is_refused_with_what_to_do(
    asked: dict[str, Any], told: str
) -> None:
    """`n` ended in a 503, and the logprobs of the prompt were left out without a word."""

    async def scenario() -> None:
        async with world("ss", "s") as w:
            reply = await w.complete(**asked)
            assert reply.status == 400
            assert re.search(told, reply.json["error"]["message"])
            assert not any(engine.bodies for engine in (*w.p, *w.d))
        async with world("v", "s") as w:
            assert (await w.complete(**asked)).json["served_by"] == "p0"

    run(scenario())


async def no_half_of_a_pair(w: World, fake: FakeEngine) -> FakeSglang:
    """This engine of SGLang's, started again without `--disaggregation-mode`."""
    assert isinstance(fake, FakeSglang)
    fake.mode = "null"
    await fake.die()
    await w.down(fake)
    await fake.start()
    await w.up(fake)
    return fake


@pytest.mark.parametrize("prefill", ["s", "v"])
def test_an_engine_of_sglangs_that_is_no_half_of_a_pair_answers_what_pairs_do_not(
    prefill: str,
) -> None:
    """It was sent the name of a transfer, which it does not look at, and the prefill engine's KV waited for nobody."""

    async def scenario() -> None:
        async with world(prefill, "ss") as w:
            alone = await no_half_of_a_pair(w, w.d[1])
            for _ in range(4):
                assert (await w.complete()).json["served_by"] == "d0"
            reply = await w.complete(n=3)
            assert reply.json["served_by"] == "d1"
            assert alone.bodies == [{"model": "m", "prompt": "hello", "n": 3}]
            await w.d[0].die()
            await w.down(w.d[0])
            sent = len(w.p[0].bodies)
            assert (await w.complete()).json["served_by"] == "d1"
            assert len(w.p[0].bodies) == sent
            assert await w.metric("flows_total", flow="decode_alone", cause="whole") == 1

    run(scenario())


def test_an_engine_of_both_sides_is_no_pair_and_shares_requests_with_one_that_is_none() -> None:
    """All went to vLLM's engine, which answered alone."""

    async def scenario() -> None:
        async with world("v", "s", both=True, policy="round_robin") as w:
            await no_half_of_a_pair(w, w.d[0])
            served = [(await w.complete()).json["served_by"] for _ in range(6)]
            assert Counter(served) == {"p0": 3, "d0": 3}
            assert await w.metric("flows_total", flow="disaggregated") == 0

    run(scenario())


def test_an_engine_of_both_sides_without_room_is_passed_by_where_each_answers_alone() -> None:
    """Its refusal was taken for that of the only side that computes prompts, and told to the client."""

    async def scenario() -> None:
        async with world("vv", "s", both=True, policy="round_robin") as w:
            await no_half_of_a_pair(w, w.d[0])
            w.p[0].behave = status(429)
            replies = [await w.complete() for _ in range(6)]
            assert {reply.status for reply in replies} == {200}
            assert {reply.json["served_by"] for reply in replies} == {"p1", "d0"}

    run(scenario())


def test_a_field_of_sglangs_waits_for_the_one_engine_that_knows_it() -> None:
    """It was refused for good where that engine only lacked room."""

    async def scenario() -> None:
        async with world("v", "s") as w:
            alone = await no_half_of_a_pair(w, w.d[0])
            assert (await w.complete(regex="a+")).json["served_by"] == "d0"
            alone.behave = status(503, Retry_After="7")
            assert (await w.complete(regex="a+")).status == 429
            await alone.die()
            await w.down(alone)
            assert (await w.complete(regex="a+")).status == 503, "it may come back"

    run(scenario())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
def test_an_endpoint_that_pairs_of_sglang_do_not_serve_is_refused_with_what_to_do(
    path: str,
) -> None:
    """It ended in a 503."""

    async def scenario() -> None:
        async with world("s", "s") as w:
            reply = await w.post(path, {"model": "m", "input": "a"})
            assert reply.status == 400
            assert (
                f"{path}: pairs of SGLang engines cannot answer it"
                in reply.json["error"]["message"]
            )
            assert not any(engine.bodies for engine in (*w.p, *w.d))

    run(scenario())


def test_the_tokenizer_of_an_sglang_engine_answers() -> None:
    async def scenario() -> None:
        async with world("s", "s") as w:
            reply = await w.post("/tokenize", {"model": "m", "prompt": "hello"})
            assert (reply.status, reply.json["tokens"]) == (200, IDS)
            assert not w.p[0].tokenized

    run(scenario())


@pytest.mark.parametrize(
    "asked", [{"echo": True}, {"prompt": ["a", "b"]}, {"n": 1}, {"best_of": 2}]
)
def test_what_pairs_of_sglang_answer_as_one_engine_goes_to_them(asked: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with world("s", "s") as w:
            assert (await w.complete(**asked)).status == 200
            assert len(w.p[0].bodies) == len(w.d[0].bodies) == 1

    run(scenario())


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_half_of_a_pair_is_not_asked_alone(side: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with world("s", "s") as w:
            dead, left = (w.p[0], w.d[0]) if side == "prefill" else (w.d[0], w.p[0])
            await dead.die()
            await w.down(dead)
            assert (await w.complete()).status == 503
            assert not left.bodies
            assert "and none is left" in caplog.text, "no retry was refused: none was tried"

    run(scenario())


def kv_does_not_come_from(port: int, stream: bool) -> Behaviour:
    """An SGLang decode engine that fails with the prefill engine at this port."""

    async def behave(
        engine: FakeEngine, request: web.Request, sent: dict[str, Any]
    ) -> web.StreamResponse:
        good = answers(choice(text="good"))
        if sent["bootstrap_port"] != port:
            return await good(engine, request, sent)
        error = {"error": {"object": "error", "message": "session_lost", "code": 500}}
        failing = answers(error) if stream else status(500)
        return await failing(engine, request, sent)

    return behave


@pytest.mark.parametrize("streams", [False, True])
def test_kv_that_does_not_come_becomes_another_pair(streams: bool) -> None:
    async def scenario() -> None:
        async with world("vs", "s") as w:
            for bad in (7000, BOOTSTRAP_PORT):
                w.d[0].behave = kv_does_not_come_from(bad, streams)
                for _ in range(2):
                    reply = await w.complete(stream=streams)
                    assert reply.status == 200
                    first = reply.events[0] if streams else reply.json
                    assert first == choice(text="good")
            assert await w.metric("retries_total", cause="status_500") >= 2
            assert w.known(w.d[0]).up

    run(scenario())


def test_where_no_other_pair_is_left_the_client_is_told_how_this_one_failed() -> None:
    async def scenario() -> None:
        async with world("s", "s") as w:
            w.d[0].behave = kv_does_not_come_from(BOOTSTRAP_PORT, False)
            reply = await w.complete()
            assert reply.status == 503
            assert "decode: 1 status_500" in reply.text

    run(scenario())


def test_an_abort_of_sglangs_is_the_operators_wish() -> None:
    """It ends at SIGTERM what it has begun, and says of its own failures that they are errors."""

    async def aborted(
        engine: FakeEngine, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        choice = {"index": 0, "text": "half an", "finish_reason": "abort"}
        content = json.dumps({"choices": [choice]}, separators=(",", ":"))
        return web.Response(text=content, content_type="application/json")

    async def scenario() -> None:
        async with world("s", "ss") as w:
            w.d[0].behave = w.d[1].behave = aborted
            assert (await w.complete()).json["choices"][0]["finish_reason"] == "abort"

    run(scenario())


def test_a_prefill_engine_that_refuses_its_copy_is_replaced() -> None:
    async def scenario() -> None:
        async with world("ss", "s") as w:
            w.p[0].behave = status(429)

            async def waits(
                engine: FakeEngine, request: web.Request, sent: dict[str, Any]
            ) -> web.StreamResponse:
                room = sent["bootstrap_room"]
                taken = w.p[1].bodies
                await until(lambda: room in [b["bootstrap_room"] for b in taken], "it has KV")
                return await answers(choice(text="good"))(engine, request, sent)

            w.d[0].behave = waits
            for _ in range(2):
                assert (await w.complete()).json == choice(text="good")
            assert len(w.p[1].bodies) == 2
            assert w.p[0].bodies, "it was asked, and had no room"

    run(scenario())


def test_an_engine_of_another_kind_may_come_back_at_the_same_address() -> None:
    async def scenario() -> None:
        async with world("s", "v") as w:
            engine = w.p[0]
            known = w.known(engine)
            assert (known.kind, known.role) == (Kind.SGLANG, Role.PREFILL)
            await engine.die()
            await w.down(engine)
            other = Fake("p0", "engine-new")
            other.place = engine.place
            w.p[0] = other
            await other.start()
            await until(lambda: known.kind is Kind.VLLM, "it is known for what it is")
            await until(lambda: known.address is not None, "its address is known")
            await w.complete()
            assert w.p[0].params[0]["transfer_id"]

    run(scenario())
