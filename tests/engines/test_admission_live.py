# SPDX-License-Identifier: Apache-2.0
"""The middleware in front of a real engine, a profile of it, its KV events, its streams. One engine for all."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, cast

import pytest
import zmq.asyncio
from harness import wait_until
from recipes import COMPILE_NOTHING, MODEL, NAME_ARGS, WORKER_IN_CORE
from support.engine_nursery import fork_engine
from typer.testing import CliRunner

from pd_bench.scheduler.live import MIDDLEWARE, OURS
from pd_connector.tools.cli.app import app
from pd_connector.tools.launch import VllmEngine
from scheduler_plugins.cost.profile import load
from scheduler_plugins.profile.client import Timed, connect
from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.engine_reports import ReportedLoad, from_report
from scheduler_plugins.router.index.follower import EventFollower
from scheduler_plugins.router.index.hashes import prompt_extras, token_bytes
from scheduler_plugins.router.index.prefixes import Prefixes
from scheduler_plugins.router.index.prompt_keys import PromptKeys
from scheduler_plugins.router.metrics import Metrics
from scheduler_plugins.router.prompt.body import CHAT
from scheduler_plugins.router.request.resume import StreamRecord
from scheduler_plugins.router.tokens.agreement import difference
from scheduler_plugins.router.tokens.token_worker import examine

KEY = "engine-test-key"
ARGS = ("--api-key", KEY, "--max-num-batched-tokens", "512")
SETTINGS = """
scheduler:
  qos_classes:
    - {name: premium, reserved_fraction: 0.4, priority: 2, slo: {ttft_ms: 400}}
    - {name: free, reserved_fraction: 0.6, priority: 1}
request_router:
  routes:
    - {match: {header: "x-customer-tier: premium"}, qos: premium}
    - {match: {}, qos: free}
"""
PREMIUM = {"x-customer-tier": "premium"}


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    folder = tmp_path_factory.mktemp("admission")
    (folder / "scheduler.yaml").write_text(SETTINGS)
    settings = json.dumps({"pd_scheduler": str(folder / "scheduler.yaml")})
    events, replay = free_ports(2)
    kv_events = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    engine = VllmEngine(
        MODEL,
        connector=None,
        args=[
            *NAME_ARGS,
            *OURS,
            *MIDDLEWARE,
            "--additional-config",
            settings,
            "--kv-events-config",
            json.dumps(kv_events),
            *ARGS,
        ],
        env={**COMPILE_NOTHING, **WORKER_IN_CORE},
        log_path=folder / "engine.log",
    )
    engine.popen = fork_engine
    with engine:
        yield engine.wait_ready()


def ask(engine: VllmEngine, prompts: list[list[int]], headers: dict[str, str]) -> list[Timed]:
    """Send all prompts at once, for a token each."""

    async def run() -> list[Timed]:
        async with connect(engine.base_url, KEY) as client:
            return await asyncio.gather(
                *(client.complete(prompt, 1, headers=headers) for prompt in prompts)
            )

    return asyncio.run(run())


def raw(engine: VllmEngine, body: Any, headers: dict[str, str]) -> tuple[int, dict[str, str], Any]:
    """Status, headers and decoded body of a POST that need not be answered with 200."""
    connection = HTTPConnection(engine.host, engine.port, timeout=120)
    given = {"Content-Type": "application/json", **headers}
    connection.request("POST", "/v1/completions", json.dumps(body), given)
    response = connection.getresponse()
    found = dict(response.getheaders()), json.loads(response.read())
    connection.close()
    return response.status, *found


def own(tokens: int, number: int) -> list[int]:
    """A prompt that begins like no other."""
    return [32 + (number // 90**place) % 90 for place in range(3)] + [40] * (tokens - 3)


def test_a_profile_fits_the_engine_and_the_scheduler_can_load_it(
    engine: VllmEngine, tmp_path: Path
) -> None:
    """First, so that admission finds a model that knows the engine's costs."""
    out = tmp_path / "cost.json"
    options = ["--longest-tokens", "2000", "--most-batch", "4", "--repeats", "1", "--api-key", KEY]
    result = CliRunner().invoke(
        app, ["profile", "--url", engine.base_url, "--out", str(out), *options]
    )
    assert result.exit_code == 0, result.output
    model = load(out)
    assert model.known
    assert model.prefill_s(2000) > model.prefill_s(2000, 1600) > 0
    assert model.decode_step_s(1, 100) > 0


def test_the_header_reaches_the_class_in_the_scheduler(engine: VllmEngine) -> None:
    def answered(qos: str) -> float:
        name = "pd_scheduler:engine_ttft_seconds_count"
        return engine.metrics().total(name, qos=qos)

    before = {qos: answered(qos) for qos in ("premium", "free")}
    ask(engine, [own(50, n) for n in range(5)], PREMIUM)
    ask(engine, [own(50, n) for n in range(5, 8)], {})
    sent = {"premium": 5, "free": 3}

    def told() -> bool:
        # The engine posts every 50 ms at most, and what it did since when it has something to do.
        time.sleep(0.1)
        sent["free"] += 1
        ask(engine, [own(50, 8 + sent["free"])], {})
        return all(answered(qos) - before[qos] == count for qos, count in sent.items())

    wait_until(told, lambda: f"answers by class, beyond {before}: {sent}")


def test_a_client_cannot_name_its_class_in_the_body(engine: VllmEngine) -> None:
    def admitted(qos: str) -> float:
        return engine.metrics().total("pd_scheduler:admitted_total", qos=qos)

    before = admitted("premium"), admitted("free")
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "vllm_xargs": {"qos": "premium"}}
    status, _, _ = raw(engine, body, {"Authorization": f"Bearer {KEY}"})
    assert status == 200
    assert (admitted("premium"), admitted("free")) == (before[0], before[1] + 1)


def test_a_request_without_a_key_learns_nothing(engine: VllmEngine) -> None:
    before = engine.metrics().total("pd_scheduler:admitted_total")
    status, headers, body = raw(engine, {"model": "tiny", "prompt": "a", "max_tokens": 1}, PREMIUM)
    assert (status, body) == (401, {"error": "Unauthorized"})
    assert "retry-after" not in {name.lower() for name in headers}
    assert engine.metrics().total("pd_scheduler:admitted_total") == before


def test_overload_of_a_class_with_a_promise_is_answered_with_429(engine: VllmEngine) -> None:
    """Each prompt takes about 0.1 s, and thrice as long beside other engines: of forty at once only the first few can have
    0.4 s."""
    answers = ask(engine, [own(750, 100 + n) for n in range(40)], PREMIUM)
    refused = [one for one in answers if one.status == 429]
    served = [one for one in answers if one.status == 200]
    assert len(refused) >= 20
    assert served
    assert all(one.retry_after_s >= 1 for one in refused)
    assert all("class 'premium'" in one.error for one in refused)
    name = "pd_scheduler:rejected_total"
    assert engine.metrics().total(name, qos="premium", cause="ttft") >= len(refused)


def test_a_class_without_a_promise_is_not_turned_away(engine: VllmEngine) -> None:
    answers = ask(engine, [own(1500, 200 + n) for n in range(20)], {})
    assert [one.status for one in answers] == [200] * 20


def test_what_waits_is_in_the_metrics_by_class(engine: VllmEngine) -> None:
    def waiting() -> float:
        return engine.metrics().total("pd_scheduler:waiting", qos="free")

    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, engine, [own(1500, 300 + n) for n in range(30)], {})
        wait_until(waiting, "requests of class `free` waiting", 60.0)
        asked.result()
    assert engine.metrics().has("pd_scheduler:admission_ttft_seconds_sum")
    assert engine.metrics().has("pd_scheduler:engine_predicted_ttft_seconds_sum")


def told(engine: VllmEngine) -> ReportedLoad:
    """What the engine tells a router."""
    connection = HTTPConnection(engine.host, engine.port, timeout=60)
    connection.request("GET", "/pd/load", headers={"Authorization": f"Bearer {KEY}"})
    found = from_report(connection.getresponse().read(), "127.0.0.1")
    connection.close()
    assert found is not None
    return found


def test_a_router_is_told_the_load_and_where_events_are(engine: VllmEngine) -> None:
    ask(engine, [own(100, 400)], {})
    found = told(engine)
    assert found.queued_s is not None
    assert found.block_tokens > 0
    assert found.blocks > 0
    assert found.kv_events is not None


def test_events_of_the_engine_say_what_it_has_cached(engine: VllmEngine) -> None:
    """Blocks are found by the hashes of a prompt's tokens; a prompt with a salt has blocks of its own."""
    where, size = told(engine).kv_events, told(engine).block_tokens
    assert where is not None
    view = BackendEngine(engine.base_url, Role.PREFILL, Metrics(), reported_block_tokens=size)
    prefixes, prompt = Prefixes(), own(10 * size + 3, 500)
    keys = PromptKeys((), token_bytes(prompt))
    salted = PromptKeys((), token_bytes(prompt), prompt_extras("", "salt"))

    async def scenario() -> None:
        context = zmq.asyncio.Context()
        follower = EventFollower(view.name, *where, prefixes, context)
        task = asyncio.create_task(follower.run())

        async def found(asked: PromptKeys, blocks: int) -> None:
            async with asyncio.timeout(60):
                while prefixes.match(asked, [view], 64, 0.0) != [blocks]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

        async with connect(engine.base_url, KEY) as client:
            await client.complete(prompt, 1)
        await found(keys, 10)
        assert prefixes.match(salted, [view], 64, 0.0) == [0]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "cache_salt": "salt"}
        headers = {"Authorization": f"Bearer {KEY}"}
        status, _, _ = await asyncio.to_thread(raw, engine, body, headers)
        assert status == 200
        await found(salted, 10)
        # What was cached before this follower came was replayed from the first batch on.
        assert follower.first == 0
        assert follower.dropped == 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)

    asyncio.run(scenario())


def test_the_routers_tokens_are_the_engines(engine: VllmEngine, tmp_path: Path) -> None:
    """Files that read special tokens otherwise are seen, so that no ids are sent then."""

    async def ask(_: Any, path: str, asked: dict[str, Any]) -> object:
        connection = HTTPConnection(engine.host, engine.port, timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        connection.request("POST", path, json.dumps(asked), headers)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer

    def found(folder: Path) -> str | None:
        examined = examine(str(folder))
        return asyncio.run(difference(ask, cast(Any, None), examined, "tiny"))

    assert found(MODEL) == ""
    ignored = shutil.ignore_patterns("*.safetensors")
    folder = shutil.copytree(MODEL, tmp_path / "model", ignore=ignored)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["split_special_tokens"] = False
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "and the model's files as" in str(found(folder))


def streamed(
    engine: VllmEngine, body: dict[str, Any], path: str = "/v1/completions"
) -> list[bytes]:
    """The events of a stream."""
    connection = HTTPConnection(engine.host, engine.port, timeout=120)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200
    events = [one + b"\n\n" for one in response.read().split(b"\n\n") if one]
    connection.close()
    return events


def said(events: list[bytes]) -> str:
    """The text of the events."""
    data = [json.loads(event.removeprefix(b"data: ")) for event in events if b"[DONE]" not in event]
    choices = [choice for one in data for choice in one["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        for choice in choices
    )


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_stream_that_is_cut_goes_on_with_the_same_text(engine: VllmEngine, cut: int) -> None:
    """Greedy: the events up to the cut, and what a request for the rest brings, are the whole answer."""
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 40, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    record = StreamRecord(body, "/v1/completions")
    events = streamed(engine, {**body, **record.asks})
    sent = [record.feed(event) for event in events[:cut]]
    rest = record.next_body()
    assert rest is not None
    record.resume()
    sent += [record.feed(event) for event in streamed(engine, {**rest, **record.asks})]
    assert said(sent) == said(streamed(engine, body))
    assert b"token_ids" not in b"".join(sent)


def test_a_chat_without_a_limit_that_is_cut_goes_on_to_the_end_of_the_context(
    engine: VllmEngine,
) -> None:
    """vLLM takes 16 tokens where a completion names no limit."""
    connection = HTTPConnection(engine.host, engine.port, timeout=60)
    connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    [model] = json.loads(connection.getresponse().read())["data"]
    connection.close()
    # Most of the context is the prompt, a token each byte, so that the answer is short.
    told = [{"role": "user", "content": "x" * (model["max_model_len"] - 100)}]
    body = {"model": "tiny", "messages": told, "temperature": 0, "ignore_eos": True, "stream": True}
    record = StreamRecord(body, CHAT)
    record.context_tokens = model["max_model_len"]
    events = streamed(engine, {**body, **record.asks}, CHAT)
    sent = [record.feed(event) for event in events[:9]]
    rest = record.next_body()
    assert rest is not None
    assert rest["max_tokens"] > 16
    record.resume()
    sent += [record.feed(event) for event in streamed(engine, {**rest, **record.asks})]
    assert said(sent) == said(streamed(engine, body, CHAT))
