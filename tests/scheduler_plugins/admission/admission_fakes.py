# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the server behind the middleware, the engine's board, and the clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY

from scheduler_plugins.admission.gate import AdmissionGate
from scheduler_plugins.admission.load import ClassLoad, LoadReport
from scheduler_plugins.admission.metrics import metrics
from scheduler_plugins.admission.post import Posted
from scheduler_plugins.cost.model import CostModel
from scheduler_plugins.middleware.middleware import AdmissionMiddleware
from scheduler_plugins.queue.work import BUCKETS, bucket_of

SETTINGS = """
scheduler:
  qos_classes:
    - {name: premium, reserved_fraction: 0.4, priority: 2, slo: {ttft_ms: 1000}}
    - {name: free, reserved_fraction: 0.6, priority: 1}
request_router:
  routes:
    - {match: {header: "x-customer-tier: premium"}, qos: premium}
    - {match: {}, qos: free}
"""
MODEL = CostModel(a=1e-3, d0=0.01, d1=1e-3)
"""A thousand tokens a second."""


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class FakeBoard:
    """A board on which the test writes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.post: Posted | None = None

    def posted(self) -> Posted | None:
        return self.post

    def write(
        self, *, waiting_s: float = 0.0, classes: Sequence[str] = ("premium", "free")
    ) -> None:
        """A report of now: `waiting_s` of work, in requests of a quarter of a second, waits in `premium`."""
        work = [0.0] * BUCKETS
        work[bucket_of(0.25)] = waiting_s
        none = (0.0,) * BUCKETS
        loads = {
            name: ClassLoad(round(waiting_s / 0.25), 0, tuple(work), none, 0.0)
            if name == "premium"
            else ClassLoad(0, 0, none, none, 0.0)
            for name in classes
        }
        report = LoadReport(MODEL, 0.0, loads)
        self.post = Posted(pid=1, written_s=self._clock(), idle=not waiting_s, report=report)


@dataclass
class Server:
    """The application behind the middleware; counts what reaches it."""

    clock: Clock
    status: int = 200
    pieces: Sequence[tuple[float, bytes]] = ((0.0, b"{}"),)
    """Pieces of the body: seconds until each comes, and its bytes."""
    streamed: bool = False
    usage: Any = None
    bodies: list[bytes] = field(default_factory=list)
    scopes: list[Any] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.scopes.append(scope)
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message["body"])
            more = message["more_body"]
        self.bodies.append(b"".join(parts))
        kind = b"text/event-stream" if self.streamed else b"application/json"
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for n, (wait_s, piece) in enumerate(self.pieces):
            self.clock.now_s += wait_s
            more = n + 1 < len(self.pieces)
            await send({"type": "http.response.body", "body": piece, "more_body": more})
        if self.usage is not None:
            metadata = SimpleNamespace(final_usage_info=self.usage)
            scope["state"]["request_metadata"] = metadata

    @property
    def last_body(self) -> Any:
        return json.loads(self.bodies[-1])


def usage(prompt: int, completion: int, cached: int | None = None) -> Any:
    """What vLLM leaves in the request's state."""
    details = None if cached is None else SimpleNamespace(cached_tokens=cached)
    return SimpleNamespace(
        prompt_tokens=prompt, completion_tokens=completion, prompt_tokens_details=details
    )


@dataclass
class Got:
    """What the client got."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]


class Bench:
    """A middleware between a client and a server, with everything at hand."""

    def __init__(
        self, folder: Path | None, *, settings: str = SETTINGS, cache: int = 0, ranks: int = 1
    ) -> None:
        self.clock = Clock()
        self.boards = [FakeBoard(self.clock) for _ in range(ranks)]
        self.board = self.boards[0]
        self.server = Server(self.clock)
        self.settings = None
        if folder is not None:
            self.settings = folder / "settings.yaml"
            self.settings.write_text(settings)
        self.gate = AdmissionGate(
            self.boards,
            metrics(),
            settings=self.settings,
            cache_tokens=cache,
            clock=self.clock,
        )
        self.middleware = AdmissionMiddleware(self.server, gate=self.gate)

    def post(
        self,
        body: Any,
        path: str = "/v1/completions",
        headers: Sequence[tuple[str, str]] = (),
        *,
        api_keys: Sequence[str] = (),
        runner: str = "generate",
    ) -> Got:
        """Send a request; `body` is encoded unless it is bytes. `runner`: what vLLM calls the model's kind."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(raw)).encode()),
                *((name.encode(), value.encode()) for name, value in headers),
            ],
            "app": SimpleNamespace(
                state=SimpleNamespace(
                    args=SimpleNamespace(api_key=list(api_keys)),
                    vllm_config=SimpleNamespace(model_config=SimpleNamespace(runner_type=runner)),
                )
            ),
        }
        return asyncio.run(self._send(scope, raw))

    def premium(self, tokens: int = 100, **extra: Any) -> Got:
        """A request of class `premium` with a prompt of `tokens` token ids."""
        body = {"prompt": list(range(tokens)), "max_tokens": 1, **extra}
        return self.post(body, headers=[("x-customer-tier", "premium")])

    async def _send(self, scope: Any, raw: bytes) -> Got:
        half = len(raw) // 2
        coming = [
            {"type": "http.request", "body": raw[:half], "more_body": True},
            {"type": "http.request", "body": raw[half:], "more_body": False},
        ]
        sent: list[Any] = []

        async def receive() -> Any:
            return coming.pop(0) if coming else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.middleware(scope, receive, send)
        start, *rest = sent
        pairs = {name.decode(): value.decode() for name, value in start["headers"]}
        return Got(start["status"], pairs, b"".join(message["body"] for message in rest))


def metric(name: str, **labels: str) -> float:
    """Value of a metric in the registry; 0 while there is none."""
    return REGISTRY.get_sample_value(f"pd_scheduler:{name}", labels) or 0.0
