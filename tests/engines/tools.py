# SPDX-License-Identifier: Apache-2.0
"""What the engine tests say about a pair: counters that moved, clients that leave, pages of a cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from harness import (
    Answer,
    Prompt,
    Service,
    request_body,
    url_of,
)

from pd_connector.tools.launch import Client, VllmEngine

TOLERANCE = 1e-3
"""Distance of logprobs that one engine has from itself when it computes the same prompt in other
portions, in float32; a damaged page moves them much further, as
`test_one_damaged_page_moves_the_logprobs` shows."""


class Delta:
    """How far a counter has moved since."""

    def __init__(self, engine: VllmEngine, name: str, labels: Mapping[str, str]) -> None:
        self._engine = engine
        self._name = name
        self._labels = labels
        self._before = self._now()
        self.amount = 0.0

    def so_far(self) -> float:
        self.amount = self._now() - self._before
        return self.amount

    def _now(self) -> float:
        return self._engine.metrics().total(self._name, **self._labels)


@contextmanager
def delta(engine: VllmEngine, name: str, **labels: str) -> Iterator[Delta]:
    """`amount` is, after the block, how far the counter has moved within it."""
    moved = Delta(engine, name, labels)
    yield moved
    moved.so_far()


def probe(engine: VllmEngine, method: str, *args: Any) -> Any:
    """Call a method of `probe.Probe` on the engine's only worker."""
    (result,) = probe_all(engine, method, *args)
    return result


def probe_all(engine: VllmEngine, method: str, *args: Any) -> list[Any]:
    """Call a method of `probe.Probe` on each of the engine's workers."""
    body = {"method": method, "args": list(args)}
    return list(Client(engine.base_url).post("/collective_rpc", body)["results"])


@contextmanager
def leaving_client(
    target: Service | str, prompt: Prompt, max_tokens: int = 32, **extra: Any
) -> Iterator[None]:
    """A client that sends a request, and closes its connection when the block ends."""
    connection = HTTPConnection(urlsplit(url_of(target)).netloc)
    body = json.dumps(request_body(target, prompt, max_tokens, **extra))
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    try:
        yield
    finally:
        connection.close()


def streamed_chat(target: Service | str, messages: Sequence[Mapping[str, str]]) -> Answer:
    """A streamed chat answer of 32 tokens, put together from its events."""
    body = request_body(target, "", 32, logprobs=True, top_logprobs=5)
    del body["prompt"]
    body |= {"messages": list(messages), "stream": True, "cache_salt": "streamed chat"}
    connection = HTTPConnection(urlsplit(url_of(target)).netloc, timeout=300)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    lines = response.read().decode().splitlines()
    connection.close()
    assert response.status == 200, lines
    assert lines[-2] == "data: [DONE]"
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    found = [
        entry
        for choice in choices
        for entry in (choice.get("logprobs") or {"content": []})["content"]
    ]
    return Answer(
        tuple(entry["token"] for entry in found),
        tuple(entry["logprob"] for entry in found),
        tuple({top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in found),
        "".join(choice["delta"].get("content") or "" for choice in choices),
        {},
    )
