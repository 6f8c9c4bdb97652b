# SPDX-License-Identifier: Apache-2.0
"""`--middleware scheduler_plugins.vllm.AdmissionMiddleware`: gives requests their class, and refuses requests that
cannot be served in time, before any work is done.

vLLM puts this middleware around all others, including its API-key check. So a request without a valid key is passed on
unchanged. The key check refuses it, and its client learns nothing here.
"""

from __future__ import annotations

import gc
import json
import logging
import uuid
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from scheduler_plugins.admission import report
from scheduler_plugins.admission.board import boards_of
from scheduler_plugins.admission.endpoints import GENERATE, POOLING_PATHS
from scheduler_plugins.admission.gate import AdmissionGate
from scheduler_plugins.admission.metrics import metrics
from scheduler_plugins.admission.prompt import prompt_of
from scheduler_plugins.middleware.answers import (
    Answer,
    refusal,
    respond,
    respond_json,
    too_large,
)
from scheduler_plugins.middleware.api_key import may_enter
from scheduler_plugins.middleware.asgi import App, Message, Receive, Scope, Send, headers_of
from scheduler_plugins.middleware.engine_config import cache_tokens, is_half_of_a_pair, with_cache
from scheduler_plugins.middleware.pool import PoolMiddleware
from scheduler_plugins.qos.classes import QosError
from scheduler_plugins.qos.request_id import with_class, without_class
from scheduler_plugins.qos.settings import QOS_KEY, settings_path
from scheduler_plugins.qos.trust import Seen, class_key, shared_key, signed_class


async def read_body(scope: Scope, receive: Receive, most_bytes: int) -> bytes | None:
    """The whole body; None if it is larger than `most_bytes`. If the client disconnects, the body ends there."""
    claimed = headers_of(scope).get("content-length", "")
    if claimed.isdecimal() and int(claimed) > most_bytes:
        return None
    parts, size_bytes = [], 0
    while True:
        message = await receive()
        part = message.get("body", b"")
        parts.append(part)
        size_bytes += len(part)
        if size_bytes > most_bytes:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def decode_body(raw: bytes, path: str, *, in_body: bool) -> dict[str, Any] | None:
    """The body, decoded like FastAPI does; None if the class cannot be written into it.

    The engine refuses such a body too, so no client can avoid its class with one.

    Args:
        in_body: whether the class is written into the body. Endpoints without `vllm_xargs` would accept any value
            there.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    return body if not in_body or _extras(body, path) is not None else None


def put_class(body: dict[str, Any], path: str, qos: str) -> None:
    """Write the class into a body from `decode_body`, where the scheduler finds it."""
    extras = {**(_extras(body, path) or {}), QOS_KEY: qos}
    if path == GENERATE:
        body["sampling_params"] = {**body["sampling_params"], "extra_args": extras}
    else:
        body["vllm_xargs"] = extras


def _extras(body: dict[str, Any], path: str) -> dict[str, Any] | None:
    """The client's further arguments of sampling; None if there is no place for them."""
    if path == GENERATE:
        sampling = body.get("sampling_params")
        extras = (sampling.get("extra_args") or {}) if isinstance(sampling, dict) else None
    else:
        extras = body.get("vllm_xargs") or {}
    return extras if isinstance(extras, dict) else None


def with_length(scope: Scope, length: int) -> Scope:
    dropped = (b"content-length", b"transfer-encoding")
    headers = [pair for pair in scope["headers"] if pair[0].lower() not in dropped]
    # The dictionary `state` is created here, so the copy and the original share it.
    scope.setdefault("state", {})
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def replayed(raw: bytes, receive: Receive) -> Receive:
    """Gives the body once, then the client's later messages, such as its disconnect."""
    waiting: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


INVOCATIONS = "/invocations"
"""SageMaker's endpoint, which generates or pools, depending on the model."""
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    INVOCATIONS,
)
"""Endpoints whose bodies take `vllm_xargs`. `GENERATE` has the same as `sampling_params.extra_args`."""
ADMITTED_PATHS = (*PATHS[:2], GENERATE, INVOCATIONS, *POOLING_PATHS)
"""Endpoints with time predictions. A request to `POOLING_PATHS` carries its class in its id."""
GUARDED = ("/v1/", "/v2/", "/inference/")
"""Endpoints that need the API key, if the server has one."""
BODY_BYTES = 64 << 20
"""Larger bodies are answered with 413. The whole body is in memory while the class is written into it."""

_MOST_DIGITS = 10
"""The most digits of a rank. vLLM reports longer values as errors."""

_log = logging.getLogger(__name__)


class AdmissionMiddleware:
    """A pure ASGI middleware. `AdmissionGate` makes its decisions."""

    def __init__(self, app: App, *, gate: AdmissionGate | None = None) -> None:
        """Wrap an application.

        Args:
            gate: by default, made from the engine's configuration when the server knows it.
        """
        self._app = PoolMiddleware(app)
        self._gate = gate
        self._half = False
        self._loads = True
        self._seen = Seen()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] == "lifespan":
            await self._begin(scope, receive, send)
            return
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and path.startswith("/metrics"):
            self._gate_of(scope).show()
        if scope["type"] == "http" and path == report.PATH and scope["method"] == "GET":
            await self._report_load(scope, send)
            return
        has_class = path in (*PATHS, GENERATE, *POOLING_PATHS)
        handled = scope["type"] == "http" and scope["method"] == "POST" and has_class
        if not handled or (path.startswith(GUARDED) and not may_enter(scope)):
            await self._app(scope, receive, send)
            return
        raw = await read_body(scope, receive, BODY_BYTES)
        if raw is None:
            await respond(send, too_large(BODY_BYTES))
            return
        pools = path in POOLING_PATHS or (path == INVOCATIONS and self._pools(scope))
        body = decode_body(raw, path, in_body=not pools)
        if body is None:
            await self._app(scope, replayed(raw, receive), send)
            return
        await self._serve(scope, path, body, receive, send, pools=pools)

    async def _report_load(self, scope: Scope, send: Send) -> None:
        """Tell a router the load of this machine's ranks."""
        if not may_enter(scope):
            await respond_json(
                send, 401, b'{"error": {"message": "wrong or no API key", "code": 401}}'
            )
            return
        report_of_ranks = self._gate_of(scope).report()
        config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
        await respond_json(send, 200, with_cache(report_of_ranks, config).encode())

    async def _serve(
        self,
        scope: Scope,
        path: str,
        body: dict[str, Any],
        receive: Receive,
        send: Send,
        *,
        pools: bool,
    ) -> None:
        gate, headers = self._gate_of(scope), headers_of(scope)
        qos, judged = self._class_of(gate, headers)
        if pools:
            scope = _with_request_id(scope, with_class(_request_id(headers), qos))
            send = _without_class(send)
        else:
            put_class(body, path, qos)
        raw = json.dumps(body, separators=(",", ":")).encode()
        scope = with_length(scope, len(raw))
        receive = replayed(raw, receive)
        if path not in ADMITTED_PATHS or not gate.on or judged or self._half:
            await self._app(scope, receive, send)
            return
        prompt = prompt_of(body)
        if not self._loads:  # overrides the client's value
            prompt = prompt._replace(ready=False)
        ticket = gate.ask(qos, prompt, _rank(headers))
        if not ticket.decision.admit:
            await respond(send, refusal(ticket, gate.promised(qos)))
            return
        state = scope.setdefault("state", {})
        answer = Answer(gate, ticket, send, state, generates=not pools)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            answer.ended()

    def _class_of(self, gate: AdmissionGate, headers: Mapping[str, str]) -> tuple[str, bool]:
        """The request's class, and whether the router has already admitted it.

        With a router's key, only the header that the router signed counts.
        """
        if not self._class_key:
            return gate.class_of(headers), False
        given = signed_class(headers, self._class_key, self._seen)
        return gate.known_class(given or ""), given is not None

    async def _begin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the settings when the server starts. If they are invalid, the start fails."""
        collect_less()
        try:
            _ = self._class_key
            if "app" in scope:
                self._gate_of(scope)
        except (QosError, ValueError) as error:
            await receive()
            _log.error("AdmissionMiddleware cannot start: %s", error)
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await self._app(scope, receive, send)

    @cached_property
    def _class_key(self) -> bytes:
        """The key that signs classes; empty: no router signs. Raises ValueError: the secret could be guessed."""
        return class_key(shared_key())

    @staticmethod
    def _pools(scope: Scope) -> bool:
        """Whether the engine's model generates nothing."""
        config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
        return getattr(getattr(config, "model_config", None), "runner_type", None) == "pooling"

    def _gate_of(self, scope: Scope) -> AdmissionGate:
        if self._gate is None:
            config = scope["app"].state.vllm_config
            self._gate = AdmissionGate(
                boards_of(config),
                metrics(),
                settings=settings_path(config),
                cache_tokens=cache_tokens(config),
            )
            self._half = is_half_of_a_pair(config)
            self._loads = getattr(config, "kv_transfer_config", None) is not None
            if self._half and self._gate.on:
                _log.warning(
                    "admission is off: this engine is one half of a prefill/decode pair, and sees only its own "
                    "queue. The router judges both halves, by the same classes (router.yaml: classes)"
                )
        return self._gate


def _request_id(headers: Mapping[str, str]) -> str:
    """The client's id of the request, or a new one."""
    return headers.get("x-request-id") or uuid.uuid4().hex


def _rank(headers: Mapping[str, str]) -> int | None:
    """The data-parallel rank that the client chose; vLLM reads the same header."""
    chosen = headers.get("x-data-parallel-rank", "")
    return int(chosen) if chosen.isdecimal() and len(chosen) < _MOST_DIGITS else None


def _with_request_id(scope: Scope, request_id: str) -> Scope:
    headers = [pair for pair in scope["headers"] if pair[0].lower() != b"x-request-id"]
    return {
        **scope,
        "headers": [*headers, (b"x-request-id", request_id.encode("latin-1", "replace"))],
    }


def _without_class(send: Send) -> Send:
    """Puts the client's id into answers (vLLM's --enable-request-id-headers)."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [
                (name, without_class(value.decode("latin-1")).encode("latin-1"))
                if name.lower() == b"x-request-id"
                else (name, value)
                for name, value in message.get("headers", ())
            ]
        await send(message)

    return sending


OLDEST_EVERY = 200
"""Collections of the middle generation per collection of the oldest generation; CPython's default is 10. Each of the
former comes after 7,000 new containers, so the latter comes after 1.4 million new containers. These are several
thousand more requests, or garbage, which can cost about 100 MB of memory."""


def collect_less() -> None:
    """Have Python's garbage collector traverse the oldest generation less often. A higher value that is already set stays.

    An open request is hundreds of objects, none of them garbage. While the number of requests grows, CPython traverses
    all these objects every few seconds. Every answer waits for that: 0.1 to 0.3 s with 2,000 open requests. So a flood
    from one class of users delays the first tokens of other classes, and the engine's scheduler cannot prevent it.
    """
    first, second, third = gc.get_threshold()
    gc.set_threshold(first, second, max(third, OLDEST_EVERY))
