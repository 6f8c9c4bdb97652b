# SPDX-License-Identifier: Apache-2.0
"""The endpoints of a mock engine. Token ids are made without a tokenizer; every token of an answer is the text " word"."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import inf
from typing import Any

import aiohttp
from aiohttp import web

from pd_connector.kv.geometry import MAX_LAYERS, Shard
from pd_connector.protocol.wire.params import (
    ProducerAddress,
    description,
    parse,
    response,
)
from pd_connector.protocol.wire.peers import Peer, Source
from scheduler_plugins.admission.endpoints import GENERATE as GENERATE
from scheduler_plugins.admission.prompt import prompt_of
from scheduler_plugins.order.registry import create
from scheduler_plugins.order.request import Waiting
from scheduler_plugins.queue.prefix_index import FixedCosts
from scheduler_plugins.queue.waiting import WaitingQueue
from scheduler_plugins.router.server import cannot_listen
from scheduler_plugins.sim.engine import SimulatedEngine
from scheduler_plugins.sim.mock.clock import ClockedEngine, Generation
from scheduler_plugins.sim.mock.events import Publisher, WatchedBlocks
from scheduler_plugins.sim.mock.settings import MockSettings
from scheduler_plugins.sim.mock.transfers import KV, Moved, Transfers, arrival

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DONE = b"data: [DONE]\n\n"
WORD = 1
"""The id of every generated token."""


def answer(
    body: Mapping[str, Any],
    path: str,
    tokens: int,
    usage: Mapping[str, Any],
    params: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """A whole answer of `tokens` tokens. `params`: its `kv_transfer_params`."""
    text, choice = " word" * tokens, {"index": 0, "finish_reason": "length"}
    said: dict[str, Any] = {"text": text}
    if path == CHAT:
        said = {"message": {"role": "assistant", "content": text}}
    elif path == GENERATE:
        said = {"token_ids": [WORD] * tokens}
    return {
        **_head(body, path, f"cmpl-{uuid.uuid4().hex}"),
        "choices": [{**choice, **said}],
        "usage": usage,
        "kv_transfer_params": params,
    }


def event(
    body: Mapping[str, Any], path: str, name: str, prompt: Sequence[int] | None, *, last: bool
) -> bytes:
    """One token of a stream. `prompt`: its ids, for the first one."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
    if path == GENERATE:
        return _sent({**_head(body, path, name), "choices": [{**choice, "token_ids": [WORD]}]})
    choice |= {"delta": {"content": " word"}} if path == CHAT else {"text": " word"}
    content = {**_head(body, path, name), "choices": [choice]}
    if body.get("return_token_ids"):
        choice["token_ids"] = [WORD]
        if prompt is not None:
            (content if path == CHAT else choice)["prompt_token_ids"] = prompt
    return _sent(content)


def usage_event(body: Mapping[str, Any], path: str, name: str, usage: Mapping[str, Any]) -> bytes:
    """The chunk before the end mark, with `stream_options.include_usage`."""
    return _sent({**_head(body, path, name), "choices": [], "usage": usage})


def usage_of(prompt_tokens: int, tokens: int, cached: int) -> dict[str, Any]:
    """The field `usage`; as vLLM's with `--enable-prompt-tokens-details`."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _head(body: Mapping[str, Any], path: str, name: str) -> dict[str, Any]:
    if path == GENERATE:
        return {"request_id": name, "model": body.get("model")}
    kind = "chat.completion" if path == CHAT else "text_completion"
    kind += ".chunk" if path == CHAT and body.get("stream") else ""
    return {"id": name, "object": kind, "created": int(time.time()), "model": body.get("model")}


def _sent(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


BYTES_PER_TOKEN = 4
_ID_BYTES = 8


def token_ids(body: Mapping[str, Any]) -> list[int]:
    """The token ids of the first prompt of a request: the given ids, otherwise one per 4 bytes of text. Never empty."""
    prompt = prompt_of(body)
    data = prompt.data
    if prompt.ids:
        ids = array("q")
        ids.frombytes(data[: len(data) // _ID_BYTES * _ID_BYTES])
        return list(ids) or [0]
    return text_ids(data)


def text_ids(data: bytes) -> list[int]:
    """One id per 4 bytes of text; the last piece may be shorter. Ids are below 2**31. Never empty."""
    ids = [
        int.from_bytes(data[at : at + BYTES_PER_TOKEN], "little") & 0x7FFFFFFF
        for at in range(0, len(data), BYTES_PER_TOKEN)
    ]
    return ids or [0]


def block_hashes(ids: Sequence[int], block_tokens: int) -> list[int]:
    """One hash per whole block, which stands for the prompt up to the block's end. 64 bits, unsigned."""
    hashes, previous = list[int](), b"\0" * 8
    for end in range(block_tokens, len(ids) + 1, block_tokens):
        block = array("q", ids[end - block_tokens : end]).tobytes()
        previous = blake2b(block, digest_size=8, key=previous).digest()
        hashes.append(int.from_bytes(previous, "big"))
    return hashes


_DEFAULT_MAX_TOKENS = 16
_CONTEXT_TOKENS = 1 << 20
_SHUTDOWN_S = 0.5
"""Time after which streams still open at the end are cut off."""


def _most_tokens(body: Mapping[str, Any]) -> int:
    """Tokens of an answer."""
    fields = {**body, **(body.get("sampling_params") or {})}
    most = fields.get("max_completion_tokens") or fields.get("max_tokens")
    return int(most or _DEFAULT_MAX_TOKENS)


class MockEngine:
    """vLLM's HTTP in front of a `ClockedEngine`. With `kv_transfer_params` it prefills or decodes for another engine,
    like an engine with PDConnector. A decode engine asks the prefill engine's `/mock/kv/ID` when the KV is ready, and
    waits for the duration of the transfer. With SGLang's `bootstrap_room` it is the prefill engine if `bootstrap_port`
    is its own port.
    """

    def __init__(self, settings: MockSettings) -> None:
        """Call this inside a running event loop."""
        self.settings = settings
        self.port = settings.port
        self.cache = WatchedBlocks(settings.cache_blocks, settings.block_tokens)
        queue = WaitingQueue(
            create(settings.order),
            self.cache.hashes,
            page_size=settings.block_tokens,
            costs=FixedCosts(settings.costs),
        )
        self._engine = SimulatedEngine(
            queue,
            self.cache,
            settings.costs,
            page_size=settings.block_tokens,
            decode_apart=settings.decode_apart,
            kv_tokens=settings.kv_tokens,
        )
        self.clock = ClockedEngine(self._engine, settings.speed)
        self._engine_id = f"mock-{uuid.uuid4().hex[:12]}"
        self._moved = Moved(settings.network)
        self._transfers = Transfers(self._moved)
        self._queried_tokens = self._hit_tokens = 0
        self.events: Publisher | None = None
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listen. Afterwards, `port` is the real port."""
        settings = self.settings
        if settings.kv_events:
            self.events = Publisher(settings.kv_events, settings.kv_replay)
            self.cache.publish = self.events.publish
            self._tasks.append(asyncio.create_task(self.events.serve_replay()))
        self._tasks.append(asyncio.create_task(self.clock.run()))
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get(KV + "/{transfer}", self._transfers.tell)
        if settings.sglang:
            for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
                app.router.add_get(path, self._described)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post(COMPLETIONS, self._complete)
        app.router.add_post(CHAT, self._complete)
        app.router.add_post(GENERATE, self._complete)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, settings.host, settings.port, backlog=1024)
        try:
            await site.start()
        except (OSError, UnicodeError) as error:
            problem = cannot_listen(settings.host, settings.port, error)
            raise OSError(f"cannot listen on {problem}") from None
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()
        if self.events is not None:
            self.events.close()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self.settings.model,
            "object": "model",
            "owned_by": "mock",
            "max_model_len": _CONTEXT_TOKENS,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _described(self, request: web.Request) -> web.Response:
        name = self.settings.model
        return web.json_response(
            {"model_path": name, "served_model_name": name, "is_generation": True, "tp_size": 1}
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        given = body.get("prompt")
        ids = text_ids(given.encode()) if isinstance(given, str) else token_ids(body)
        return web.json_response(
            {"tokens": ids, "count": len(ids), "max_model_len": _CONTEXT_TOKENS}
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        used = (
            1 - self._engine.free_kv / self.settings.kv_tokens
            if self.settings.kv_tokens < inf
            else 0.0
        )
        labels = f'model_name="{self.settings.model}",engine="0"'
        rows = {
            "num_requests_running": self.clock.running,
            "num_requests_waiting": self.clock.waiting,
            "kv_cache_usage_perc": used,
            "prefix_cache_queries_total": self._queried_tokens,
            "prefix_cache_hits_total": self._hit_tokens,
        }
        text = "".join(f"vllm:{row}{{{labels}}} {value}\n" for row, value in rows.items())
        size, blocks = self.settings.block_tokens, self.settings.cache_blocks
        cache = f'block_size="{size}",engine="0",num_gpu_blocks="{blocks}"'
        text += self._moved.render(labels)
        return web.Response(text=f"{text}vllm:cache_config_info{{{cache}}} 1.0\n")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
            params = parse(body.get("kv_transfer_params"))
        except ValueError as error:
            return web.json_response({"error": {"message": str(error), "code": 400}}, status=400)
        if params is not None and params.describe:
            described = answer(body, request.path, 1, usage_of(1, 1, 0), description(self._address))
            return web.json_response(described)
        ids = token_ids(body)
        hashes = block_hashes(ids, self.settings.block_tokens)
        self.cache.know(hashes, ids)
        waiting = Waiting(
            id=uuid.uuid4().hex,
            tokens=len(ids),
            block_hashes=hashes,
            arrival_s=self.clock.now_s,
            max_tokens=_most_tokens(body),
        )
        generation = None
        room = body.get("bootstrap_room")
        try:
            if params is not None and params.do_remote_decode:
                transfer = params.transfer_id or waiting.id
                return await self._prefill_for_others(body, request.path, waiting, transfer)
            if room is not None and body.get("bootstrap_port") == self.port:
                return await self._prefill_for_others(body, request.path, waiting, str(room))
            if room is not None:
                host, port = body.get("bootstrap_host"), body.get("bootstrap_port")
                generation = await self._received(waiting, f"{host}:{port}", str(room))
            elif params is not None and params.do_remote_prefill:
                source = f"{params.remote_host}:{params.remote_port}"
                generation = await self._received(waiting, source, str(params.remote_request_id))
            else:
                generation = self.clock.prefill(waiting, hands_over=False)
            if body.get("stream"):
                return await self._stream(request, body, ids, generation)
            async for _ in generation.progress():
                pass
            usage = usage_of(len(ids), waiting.max_tokens, self._count(generation))
            return web.json_response(answer(body, request.path, waiting.max_tokens, usage, None))
        finally:
            if generation is not None:
                self.clock.cancel(generation)

    async def _prefill_for_others(
        self, body: Mapping[str, Any], path: str, waiting: Waiting, transfer: str
    ) -> web.Response:
        generation = self.clock.prefill(waiting, hands_over=True)
        try:
            async for _ in generation.progress():
                pass
        finally:
            self.clock.cancel(generation)
        cached = self._count(generation)
        prefill_s = self.settings.costs.prefill_s(waiting.tokens, cached)
        self._transfers.computed(transfer, waiting.tokens, prefill_s)
        usage = usage_of(waiting.tokens, 1, cached)
        kv = response(self._address, transfer=transfer, pages=(), tokens=waiting.tokens)
        return web.json_response(answer(body, path, 1, usage, kv))

    async def _received(self, waiting: Waiting, source: str, transfer: str) -> Generation:
        """Wait until the KV is computed there, until it has room here, and for the time of its way."""
        assert self._session is not None
        network = self.settings.network
        arrived = await arrival(self._session, source, transfer, network)
        async with self.clock.room(waiting.tokens):
            await asyncio.sleep(arrived.transfer_s / self.clock.speed)
            self._moved.received(arrived, source)
            return self.clock.receive(waiting)

    async def _stream(
        self,
        request: web.Request,
        body: Mapping[str, Any],
        ids: Sequence[int],
        generation: Generation,
    ) -> web.StreamResponse:
        streamed = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        sent, name = 0, f"cmpl-{generation.request.id}"
        async for tokens in generation.progress():
            if not sent:
                await streamed.prepare(request)
            last = generation.request.max_tokens - 1
            events = [
                event(body, request.path, name, None if n else ids, last=n == last)
                for n in range(sent, tokens)
            ]
            sent = tokens
            await streamed.write(b"".join(events))
        cached = self._count(generation)
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = usage_of(generation.request.tokens, sent, cached)
            await streamed.write(usage_event(body, request.path, name, usage))
        await streamed.write(DONE)
        await streamed.write_eof()
        return streamed

    def _count(self, generation: Generation) -> int:
        """Cached tokens of a request. They are counted once for `/metrics`."""
        cached = generation.record.cached_tokens
        self._queried_tokens += generation.request.tokens
        self._hit_tokens += cached
        return cached

    @property
    def _address(self) -> ProducerAddress:
        """The endpoint at which a decode engine asks for KV."""
        source = Source(self.settings.host, self.port, self._engine_id)
        return ProducerAddress(self._engine_id, (Peer(source, Shard(0, MAX_LAYERS, 0, 1)),))
