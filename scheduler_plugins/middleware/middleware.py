# SPDX-License-Identifier: Apache-2.0
"""`--middleware scheduler_plugins.vllm.AdmissionMiddleware`: gives requests their class, and fair_share away
what could not be served in time, before any work is done.

vLLM puts the middlewares it is told of around all others, its API-key check among them; so a
request without a valid key is passed on as it is, to be refused there, and learns nothing here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from scheduler_plugins.admission import report
from scheduler_plugins.admission.board import boards_of
from scheduler_plugins.admission.gate import AdmissionGate
from scheduler_plugins.admission.metrics import metrics
from scheduler_plugins.admission.prompt import prompt_of
from scheduler_plugins.admission.report import EngineReport, EventPorts
from scheduler_plugins.middleware.answers import (
    Answer,
    refusal,
    respond,
    respond_json,
    too_large,
)
from scheduler_plugins.middleware.asgi import App, Message, Receive, Scope, Send, headers_of
from scheduler_plugins.middleware.garbage_collector import collect_less
from scheduler_plugins.qos.classes import QosError
from scheduler_plugins.qos.request_id import with_class, without_class
from scheduler_plugins.qos.settings import QOS_KEY, settings_path
from scheduler_plugins.qos.trust import router_key, signed_class

PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/invocations",
)
"""Endpoints whose bodies take `vllm_xargs`."""
POOLING_PATHS = (
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
"""Endpoints that generate nothing. Their class travels in the request's id."""
ADMITTED_PATHS = (*PATHS[:2], "/invocations", *POOLING_PATHS)
"""Endpoints for which time is predicted."""
GUARDED = ("/v1/", "/v2/")
"""Endpoints that ask for the API key, if the server has one."""
PAIR_CONNECTORS = ("PDConnector", "NixlConnector", "MooncakeConnector", "P2pNcclConnector")
"""Connectors with which prefill and decode run in two engines."""
BODY_BYTES = 64 << 20
"""Larger bodies are answered with 413. The whole body is held while the class is written into it."""

_log = logging.getLogger(__name__)


class AdmissionMiddleware:
    """A pure ASGI middleware; see `AdmissionGate` for what it decides by."""

    def __init__(self, app: App, *, gate: AdmissionGate | None = None) -> None:
        """Wrap an application.

        Args:
            gate: made from the engine's configuration, once the server knows it, if left out.
        """
        self._app = app
        self._gate = gate
        self._router_key = router_key()
        self._half = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] == "lifespan":
            await self._begin(scope, receive, send)
            return
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and path.startswith("/metrics"):
            self._gate_of(scope).show()
        if scope["type"] == "http" and path == report.PATH and scope["method"] == "GET":
            await self._tell(scope, send)
            return
        known = path in PATHS or path in POOLING_PATHS
        wanted = scope["type"] == "http" and scope["method"] == "POST" and known
        if not wanted or (path.startswith(GUARDED) and not _may_enter(scope)):
            await self._app(scope, receive, send)
            return
        raw = await _read(scope, receive)
        if raw is None:
            await respond(send, too_large(BODY_BYTES))
            return
        body = _decode(raw)
        if body is None:
            await self._app(scope, _replayed(raw, receive), send)
            return
        await self._serve(scope, path, body, receive, send)

    async def _tell(self, scope: Scope, send: Send) -> None:
        """Tell a router the load of this machine's ranks."""
        if not _may_enter(scope):
            await respond_json(
                send, 401, b'{"error": {"message": "wrong or no API key", "code": 401}}'
            )
            return
        told = self._gate_of(scope).report()
        config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
        await respond_json(send, 200, _with_cache(told, config).encode())

    async def _serve(
        self, scope: Scope, path: str, body: dict[str, Any], receive: Receive, send: Send
    ) -> None:
        gate, headers = self._gate_of(scope), headers_of(scope)
        qos, judged = self._class_of(gate, headers)
        pools = path in POOLING_PATHS
        if pools:
            scope = _with_request_id(scope, with_class(_request_id(headers), qos))
            send = _without_class(send)
        else:
            body["vllm_xargs"] = {**(body.get("vllm_xargs") or {}), QOS_KEY: qos}
        raw = json.dumps(body, separators=(",", ":")).encode()
        scope = _with_length(scope, len(raw))
        receive = _replayed(raw, receive)
        if path not in ADMITTED_PATHS or not gate.on or judged or self._half:
            await self._app(scope, receive, send)
            return
        ticket = gate.ask(qos, prompt_of(body), _rank(headers))
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
        """The request's class, and whether the router has let it in already.

        With a router's key no header counts but the one that the router signed.
        """
        if not self._router_key:
            return gate.class_of(headers), False
        given = signed_class(headers, self._router_key)
        return gate.known_class(given or ""), given is not None

    async def _begin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the settings when the server starts. The start fails if they cannot be used."""
        collect_less()
        try:
            if "app" in scope:
                self._gate_of(scope)
        except (QosError, ValueError) as error:
            await receive()
            _log.error("AdmissionMiddleware cannot start: %s", error)
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await self._app(scope, receive, send)

    def _gate_of(self, scope: Scope) -> AdmissionGate:
        if self._gate is None:
            config = scope["app"].state.vllm_config
            self._gate = AdmissionGate(
                boards_of(config),
                metrics(),
                settings=settings_path(config),
                cache_tokens=_cache_tokens(config),
            )
            self._half = is_half_of_a_pair(config)
            if self._half and self._gate.on:
                _log.warning(
                    "admission is off: this engine is one half of a prefill/decode pair, and sees only its own "
                    "queue. The router judges both halves, by the same classes (router.yaml: classes)"
                )
        return self._gate


def is_half_of_a_pair(config: Any) -> bool:
    """Whether the engine hands KV over to another one, or gets it from there."""
    transfer = getattr(config, "kv_transfer_config", None)
    return getattr(transfer, "kv_connector", None) in PAIR_CONNECTORS


def _with_cache(told: EngineReport, config: Any) -> EngineReport:
    """Add what a router must know to follow the engine's cache."""
    if config is None:
        return told
    ports, events = None, getattr(config, "kv_events_config", None)
    if events is not None and events.enable_kv_cache_events and events.publisher == "zmq":
        ports = EventPorts(events=events.endpoint, replay=events.replay_endpoint)
    cache = config.cache_config
    return replace(
        told,
        block_tokens=cache.block_size or 0,
        blocks=cache.num_gpu_blocks or 0,
        kv_events=ports,
    )


def _cache_tokens(config: Any) -> int:
    """Tokens that fit into the prefix caches of all ranks; 0 if there are none."""
    cache_config = config.cache_config
    if not cache_config.enable_prefix_caching:
        return 0
    blocks: int = (cache_config.num_gpu_blocks or 0) * cache_config.block_size
    one_rank: int = cache_config.kv_cache_size_tokens or blocks
    return one_rank * len(boards_of(config))


def _may_enter(scope: Scope) -> bool:
    """Whether vLLM's own key check, which runs after this middleware, will pass the request."""
    state = getattr(scope.get("app"), "state", None)
    given = getattr(getattr(state, "args", None), "api_key", None) or ()
    keys = [key for key in given or [os.environ.get("VLLM_API_KEY")] if key]
    if not keys:
        return True
    # If there are several such headers, vLLM reads the first.
    found = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
    scheme, _, token = (found[0].decode("latin-1") if found else "").partition(" ")
    return scheme.lower() == "bearer" and _is_one_of(token, keys)


def _is_one_of(token: str, keys: Sequence[str]) -> bool:
    """Compare in constant time, so that the time tells nothing about the keys."""
    wanted = hashlib.sha256(token.encode()).digest()
    matches = [
        secrets.compare_digest(wanted, hashlib.sha256(key.encode()).digest()) for key in keys
    ]
    return any(matches)


async def _read(scope: Scope, receive: Receive) -> bytes | None:
    """The whole body; None if it is larger than `BODY_BYTES`. A client that leaves ends it."""
    claimed = headers_of(scope).get("content-length", "")
    if claimed.isdecimal() and int(claimed) > BODY_BYTES:
        return None
    parts, size_bytes = [], 0
    while True:
        message = await receive()
        part = message.get("body", b"")
        parts.append(part)
        size_bytes += len(part)
        if size_bytes > BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def _decode(raw: bytes) -> dict[str, Any] | None:
    """The body, read as FastAPI does; None if a class cannot be written into it.

    The engine refuses such a body too, so nobody can avoid their class with one.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or not isinstance(body.get("vllm_xargs") or {}, dict):
        return None
    return body


def _request_id(headers: Mapping[str, str]) -> str:
    """The client's id of the request, or a new one."""
    return headers.get("x-request-id") or uuid.uuid4().hex


def _rank(headers: Mapping[str, str]) -> int | None:
    """The data-parallel rank that the client chose; vLLM reads the same header."""
    chosen = headers.get("x-data-parallel-rank", "")
    return int(chosen) if chosen.isdecimal() else None


def _with_request_id(scope: Scope, request_id: str) -> Scope:
    headers = [pair for pair in scope["headers"] if pair[0].lower() != b"x-request-id"]
    return {
        **scope,
        "headers": [*headers, (b"x-request-id", request_id.encode("latin-1", "replace"))],
    }


def _without_class(send: Send) -> Send:
    """Answers have the id that the client gave (vLLM's --enable-request-id-headers)."""

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


def _with_length(scope: Scope, length: int) -> Scope:
    dropped = (b"content-length", b"transfer-encoding")
    headers = [pair for pair in scope["headers"] if pair[0].lower() not in dropped]
    # The dictionary `state` is created here, so that the copy and the original share it.
    scope.setdefault("state", {})
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def _replayed(raw: bytes, receive: Receive) -> Receive:
    """Gives the body once, then what the client sends after it: that it disconnects."""
    waiting: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
