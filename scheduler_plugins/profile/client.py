# SPDX-License-Identifier: Apache-2.0
"""Completions of a running engine, timed token by token, any number of them at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from pd_connector.errors import PDConnectorError
from pd_connector.hosts import server_url, without_secret
from pd_connector.tools.launch.client import Samples

_POOL_TEXT = "In the beginning nobody knew what the seven quiet machines were counting, or why. "


class AskError(PDConnectorError):
    """An engine does not answer, or answers with an error. The message has the request and the cause."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer; times in seconds, by `time.perf_counter`."""

    status: int
    sent_s: float
    token_s: tuple[float, ...]
    """The time of each token. Tokens that came together have the same time."""
    ended_s: float
    prompt_tokens: int
    cached_tokens: int | None
    """None if the engine does not say."""
    retry_after_s: int
    error: str
    """The error text that came instead of an answer."""

    @property
    def ttft_s(self) -> float:
        """Time to the first token. The answer must have a token."""
        return self.token_s[0] - self.sent_s


class EngineClient:
    """One engine. `connect` makes it."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.model = ""
        self.longest_tokens = 0
        """The most tokens of a prompt and its answer together."""
        self.root = ""
        """Where the engine found the model: a folder, or a name."""
        self._session = session

    async def complete(
        self,
        prompt: Sequence[int] | str,
        max_tokens: int,
        *,
        headers: Mapping[str, str] | None = None,
        **extra: Any,
    ) -> Timed:
        """Stream exactly `max_tokens` tokens, and return their times.

        An answer with another status than 200 is returned, not raised.

        Raises:
            AskError: nothing answers, or the stream breaks off.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            # A busy server puts several tokens into one event. Only the usage tells how many.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **extra,
        }
        sent_s = time.perf_counter()
        try:
            async with self._session.post(
                f"{self.url}/v1/completions", json=body, headers=headers
            ) as response:
                if response.status != 200:
                    return await _refused(response, sent_s)
                return await _stream(response, sent_s)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise AskError(f"{self.url}: no answer ({error!r})") from None

    async def pool(self) -> list[int]:
        """Token ids of some text, from which prompts of exact length are made."""
        body = {"model": self.model, "prompt": _POOL_TEXT, "add_special_tokens": False}
        answer = await self._json("POST", "/tokenize", body)
        try:
            return [int(token) for token in answer["tokens"]]
        except (LookupError, TypeError, ValueError):
            raise AskError(f"{self.url}/tokenize: does not answer as vLLM does: {answer}") from None

    async def metrics(self) -> Samples:
        """All samples of `/metrics`."""
        async with self._session.get(f"{self.url}/metrics") as response:
            return Samples.parse(await response.text())

    async def post(self, path: str) -> int:
        """Send a POST without a body; the status of the answer."""
        async with self._session.post(self.url + path) as response:
            return response.status

    async def _json(self, method: str, path: str, body: Any = None) -> Any:
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                text = await response.text()
                if response.status != 200:
                    hint = "; give the key with --api-key" if response.status == 401 else ""
                    raise AskError(
                        f"{method} {self.url}{path}: {response.status}{hint}: {text[:500]}"
                    )
                return json.loads(text)
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
            raise AskError(
                f"{method} {self.url}{path}: no answer ({str(error) or type(error).__name__}); is this "
                "the base URL of a running vLLM, as http://127.0.0.1:8000?"
            ) from None


@asynccontextmanager
async def connect(url: str, api_key: str | None = None) -> AsyncIterator[EngineClient]:
    """Ask an engine for its model, and keep connections to it.

    Raises:
        AskError: it is not a URL, nothing answers there, or the answer is not like vLLM's.
    """
    try:
        url = server_url(url)
    except ValueError as error:
        raise AskError(f"{without_secret(url)!r}: {error}") from None
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=connector, read_bufsize=1 << 20
    ) as session:
        client = EngineClient(url, session)
        served = await client._json("GET", "/v1/models")
        try:
            first = served["data"][0]
            client.model = str(first["id"])
            client.root = str(first.get("root") or client.model)
            client.longest_tokens = int(first["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError, OverflowError):
            raise AskError(f"{url}/v1/models: does not answer as vLLM does: {served}") from None
        yield client


async def _stream(response: aiohttp.ClientResponse, sent_s: float) -> Timed:
    token_s: list[float] = []
    usage: Mapping[str, Any] = {}
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        now_s = time.perf_counter()
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            return _timed(500, sent_s, [], {}, error=str(event["error"]))
        usage = event.get("usage") or usage
        if event.get("choices"):
            tokens = usage.get("completion_tokens") or len(token_s) + 1
            token_s += [now_s] * (tokens - len(token_s))
    if not token_s:
        return _timed(500, sent_s, [], {}, error="the stream ended without a token")
    return _timed(200, sent_s, token_s, usage)


async def _refused(response: aiohttp.ClientResponse, sent_s: float) -> Timed:
    text = await response.text()
    again = response.headers.get("Retry-After", "")
    seconds = int(again) if again.isdecimal() else 0
    return _timed(response.status, sent_s, [], {}, error=text[:500], retry_after_s=seconds)


def _timed(
    status: int,
    sent_s: float,
    token_s: Sequence[float],
    usage: Mapping[str, Any],
    *,
    error: str = "",
    retry_after_s: int = 0,
) -> Timed:
    details = usage.get("prompt_tokens_details") or {}
    return Timed(
        status,
        sent_s,
        tuple(token_s),
        time.perf_counter(),
        int(usage.get("prompt_tokens") or 0),
        details.get("cached_tokens"),
        retry_after_s,
        error,
    )


async def at(time_s: float) -> None:
    """Wait until this time of `time.perf_counter()`."""
    await asyncio.sleep(max(0.0, time_s - time.perf_counter()))
