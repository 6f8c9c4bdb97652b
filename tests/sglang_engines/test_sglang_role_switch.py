# SPDX-License-Identifier: Apache-2.0
"""Two real SGLang engines change their sides: by themselves, and by the router, which drains them first."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from sglang_engines.sglang_handoffs import LENGTHS
from sglang_engines.sglang_harness import (
    Answer,
    EnginePool,
    SglangEngine,
    assert_idle,
    assert_same,
    handed_over,
    received_bytes,
    text,
)
from sglang_engines.sglang_recipes import CHUNKED, RADIX, SHORT_LEASE, Recipe

from pd_connector.tools.launch import RouterProcess, stop_services
from pd_connector.tools.launch.client import HttpError
from pd_connector.tools.launch.sglang import SWITCH_ARG

KEY = "0123456789abcdef-operator-of-a-test"
P, D = (
    Recipe(role, args=(*CHUNKED, *RADIX, SWITCH_ARG), config=SHORT_LEASE)
    for role in ("prefill", "decode")
)

Pair = tuple[SglangEngine, SglangEngine]


@pytest.fixture
def pair(engines: EnginePool) -> Pair:
    engines.start_ahead(P, D)
    return engines.pair(P, D)


@pytest.fixture
def wanted(engines: EnginePool, pair: Pair) -> list[Answer]:
    return engines.reference([text(length) for length in LENGTHS])


def switch(engine: SglangEngine, role: str) -> None:
    engine.client.post("/pd_role_switch", {"new_role": role, "decode_cuda_graph_memory_gb": 0})


def side(engine: SglangEngine) -> str:
    told = json.loads(engine.client.get("/server_info"))
    return str(told["internal_states"][0]["pd_connector"]["side"])


def test_engines_that_change_their_sides_and_back_hand_over_as_before(
    pair: Pair, wanted: list[Answer]
) -> None:
    p, d = pair
    for turn in range(3):
        before = received_bytes(d)
        for length, answer in zip(LENGTHS, wanted, strict=True):
            assert_same(handed_over(p, d, text(length), cache_salt=f"turn {turn}"), answer)
        assert received_bytes(d) > before, f"KV moves after {turn} changes"
        assert_idle(p, d)
        switch(p, "decode")
        switch(d, "prefill")
        assert (side(p), side(d)) == ("decode", "prefill")
        p, d = d, p
    switch(p, "decode")
    switch(d, "prefill")


def test_the_router_drains_engines_and_swaps_their_sides(
    pair: Pair, wanted: list[Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At its start, because they are on other sides than its file says; after an edit of the file; by its API."""
    p, d = pair
    monkeypatch.setenv("PD_ROUTER_ADMIN_KEY", KEY)
    router = RouterProcess([d.base_url], [p.base_url])
    port, file = router.reserve(), tmp_path / "router.yaml"
    router.args += ["--admin-port", str(port), "--config", str(file)]

    def write(prefill: SglangEngine, decode: SglangEngine, **more: object) -> None:
        sides = [("prefill", prefill), ("decode", decode)]
        engines = [{"url": engine.base_url, "role": role, **more} for role, engine in sides]
        file.write_text(json.dumps({"engines": engines, "roles": "fixed"}))

    def switched(prefill: SglangEngine, decode: SglangEngine) -> None:
        until_s = time.monotonic() + 120
        while (side(prefill), side(decode)) != ("prefill", "decode"):
            assert time.monotonic() < until_s, router.log_path
            time.sleep(0.2)
        router.wait_ready()
        assert [ask(length) for length in LENGTHS] == [16] * len(LENGTHS)

    def swap(prefill: SglangEngine, decode: SglangEngine) -> None:
        roles = [(prefill, "prefill"), (decode, "decode")]
        changes = [{"url": engine.base_url, "role": role} for engine, role in roles]
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        url = f"http://127.0.0.1:{port}/engines/role"
        with urlopen(Request(url, json.dumps(changes).encode(), headers), timeout=120) as answer:
            told = {one["url"]: one["role"] for one in json.load(answer)["engines"]}
        assert told == {engine.base_url: role for engine, role in roles}

    def ask(length: int) -> int:
        body = {"model": "m", "prompt": text(length), "max_tokens": 16, "ignore_eos": True}
        try:
            answer = router.client.post("/v1/completions", body | {"temperature": 0})
        except HttpError as error:
            return error.status
        return int(answer["usage"]["completion_tokens"])

    write(d, p, may=["prefill", "decode"])
    try:
        router.start()
        router.wait_ready()
        switched(prefill=d, decode=p)
        write(p, d)
        switched(prefill=p, decode=d)
        with ThreadPoolExecutor(4) as threads:
            under_way = [threads.submit(ask, 300 + n) for n in range(4)]
            swap(d, p)
            ended = {future.result() for future in under_way}
        # Between the two drains no engine is left for some; none of those that had one is lost.
        assert ended <= {16, 503}
        assert (side(p), side(d)) == ("decode", "prefill")
        assert [ask(length) for length in LENGTHS] == [16] * len(LENGTHS)
        swap(p, d)
        assert [ask(length) for length in LENGTHS] == [16] * len(LENGTHS)
        assert_idle(p, d)
    finally:
        stop_services([router])
