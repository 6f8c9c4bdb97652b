# SPDX-License-Identifier: Apache-2.0
"""Embeddings, scores and the like have a class and admission, as generations have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from admission_fakes import Bench, metric
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugins.admission.endpoints import POOLING_PATHS
from scheduler_plugins.admission.prompt import prompt_of
from scheduler_plugins.qos.request_id import class_in, with_class, without_class

PREMIUM = [("X-Customer-Tier", "premium")]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def engine_id(bench: Bench) -> str:
    """The id that the engine would see: vLLM adds to the header's at both ends."""
    found = [v for k, v in bench.server.scopes[-1]["headers"] if k.lower() == b"x-request-id"]
    assert len(found) == 1
    return f"embd-{found[0].decode()}-0-1f2e3d4c"


@pytest.mark.parametrize("path", POOLING_PATHS)
def test_a_header_becomes_the_class_in_the_id(bench: Bench, path: str) -> None:
    bench.post({"input": "a"}, path, PREMIUM)
    assert class_in(engine_id(bench)) == "premium"
    assert bench.server.last_body == {"input": "a"}, "nothing is added to the body"


def test_a_client_does_not_choose_its_class(bench: Bench) -> None:
    bench.post({"input": "a"}, "/v1/embeddings", [("X-Request-Id", "qos:premium:x")])
    assert class_in(engine_id(bench)) == "free"


@pytest.mark.parametrize("odd", [5, "x", [1], {"qos": "premium"}, None])
def test_a_client_does_not_choose_it_by_a_field_that_these_endpoints_do_not_know(
    bench: Bench, odd: object
) -> None:
    body = {"input": "a", "vllm_xargs": odd}
    bench.post(body, "/v1/embeddings", [("X-Request-Id", "qos:premium:x")])
    assert class_in(engine_id(bench)) == "free"


def test_nor_where_one_endpoint_serves_all_models(bench: Bench) -> None:
    for headers, qos in (([("X-Request-Id", "qos:premium:x")], "free"), (PREMIUM, "premium")):
        bench.post({"input": "a"}, "/invocations", headers, runner="pooling")
        assert class_in(engine_id(bench)) == qos
    bench.post({"prompt": "a"}, "/invocations", PREMIUM)
    assert bench.server.last_body["vllm_xargs"] == {"qos": "premium"}


@given(name=st.text(min_size=1), given_id=st.text(max_size=20))
def test_any_class_survives_any_id(name: str, given_id: str) -> None:
    marked = with_class(given_id, name)
    assert class_in(f"score-{marked}-3-abcdef01") == name
    assert without_class(marked) == given_id
    assert class_in(given_id) == "" or "qos:" in given_id


def test_the_client_gets_its_own_id_back(bench: Bench) -> None:
    async def echo(scope, receive, send) -> None:
        headers = [pair for pair in scope["headers"] if pair[0] == b"x-request-id"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}", "more_body": False})

    bench.middleware._app = echo
    got = bench.post({"input": "a"}, "/v1/embeddings", [("x-request-id", "mine")])
    assert got.headers["x-request-id"] == "mine"


def test_what_could_not_be_served_in_time_is_turned_away(bench: Bench) -> None:
    refused = metric("rejected_total", qos="premium", cause="ttft")
    bench.board.write(waiting_s=4.0)
    body = {"input": list(range(300))}
    got = bench.post(body, "/v1/embeddings", PREMIUM)
    assert (got.status, bench.server.bodies) == (429, [])
    assert int(got.headers["retry-after"]) >= 3
    assert metric("rejected_total", qos="premium", cause="ttft") == refused + 1
    assert bench.post(body, "/v1/embeddings").status == 200, "nothing is promised to this class"


def test_the_margin_and_the_length_are_learnt_from_answers(bench: Bench) -> None:
    answered = {"data": [{"embedding": [0.5] * 300}], "usage": {"prompt_tokens": 400}}
    bench.server.pieces = [(0.9, json.dumps(answered).encode())]
    bench.board.write()
    text = "x" * 400  # a token each: four times as many as are guessed at first
    seen = metric("admission_ttft_seconds_count", qos="premium")
    first = bench.gate.memory.tokens(prompt_of({"input": text}))
    for _ in range(30):
        assert bench.post({"input": text}, "/v1/embeddings", PREMIUM).status == 200
        bench.clock.now_s += 1.0
    assert metric("admission_ttft_seconds_count", qos="premium") == seen + 30
    assert first == 100
    assert bench.gate.memory.tokens(prompt_of({"input": text})) > 350


@pytest.mark.parametrize(
    ("body", "size_bytes"),
    [
        ({"input": "abcd"}, 4),
        ({"input": ["ab", "cd"]}, 4),
        ({"input": [1, 2, 3]}, 24),
        ({"texts": ["ab"]}, 2),
        ({"query": "ab", "documents": ["c", "de"]}, 9),  # the query with each, and what parts them
        ({"text_1": "ab", "text_2": "cd"}, 5),
        ({"data_1": ["a", "b"], "data_2": ["c", "d"]}, 6),
        ({"query": "ab", "documents": []}, 0),
        ({"queries": 3, "documents": {}}, 0),
    ],
)
def test_the_prompt_is_found_where_the_endpoint_has_it(body: dict, size_bytes: int) -> None:
    assert prompt_of(body).size_bytes == size_bytes
