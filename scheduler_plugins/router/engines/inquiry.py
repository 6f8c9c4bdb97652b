# SPDX-License-Identifier: Apache-2.0
"""Questions to one engine about itself: one method per question, with one or a few HTTP requests. Keeps no state."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from pd_connector.protocol.wire.params import ProducerAddress
from pd_connector.remedies import handoffs_in, outage_in
from scheduler_plugins.admission import pool_report, report
from scheduler_plugins.admission.pool_report import PoolReport
from scheduler_plugins.router.engines.about import MOST_CHARACTERS
from scheduler_plugins.router.engines.engine_reports import ReportedLoad, from_metrics, from_report
from scheduler_plugins.router.engines.exchange import EngineCall
from scheduler_plugins.router.engines.failures import (
    EXCERPT_BYTES,
    EngineFailedError,
    about_key,
    failure_of,
)
from scheduler_plugins.router.engines.kinds import (
    SERVER_INFO,
    SWITCH_ROLE,
    SglangFacts,
    sglang_facts,
)
from scheduler_plugins.router.engines.ranks import HEADER
from scheduler_plugins.router.engines.traffic import Reading, kv_lines, read
from scheduler_plugins.router.prompt import body, transfer
from scheduler_plugins.router.settings.config import RouterConfig

PROBE_S = 30.0
"""Longest wait for facts that are read once per engine start. A busy engine answers between two steps, and a prefill step can
take seconds."""
VERSION = "/version"
"""vLLM's page with its version."""
BRIEF_S = 1.0
"""Longest wait for an engine's load or models. The limit is short because health checks pause meanwhile."""


class Handover(NamedTuple):
    """How an engine hands KV over."""

    model: str  # the name under which it serves its model
    addresses: tuple[ProducerAddress, ...]  # one a rank; empty: it hands nothing over
    bootstrap_port: int | None = None  # SGLang's


class Models(NamedTuple):
    """What an engine serves."""

    names: frozenset[str]  # of its models and adapters
    context_tokens: int  # most tokens of a prompt and its answer together; 0: not reported
    base: str = ""  # the name of the model itself; empty: not reported


class Arrivals(NamedTuple):
    """An engine's metrics of KV. The first two are of a decode engine."""

    outage: str  # what is wrong if no KV arrives, and what to do; empty if KV arrives
    handoffs: dict[str, int]  # outcomes of requests since its start
    reading: Reading


class Refusal(NamedTuple):
    """An engine did not change its side."""

    message: str
    again: bool  # the engine was not idle, and serves on its old side


class Inquiry:
    """Asks one engine. Every method raises EngineFailedError if the engine does not answer the question."""

    def __init__(
        self, url: str, config: Callable[[], RouterConfig], session: aiohttp.ClientSession
    ) -> None:
        """`config`: returns the current settings, which may change."""
        self._url = url
        self._config = config
        self._session = session

    async def health(self) -> None:
        """Return if the engine can serve."""
        call = EngineCall("GET", "/health", {})
        status, raw = await self._answer(call, self._config().health_timeout_s)
        if b'"disaggregates"' in raw:  # perhaps this router itself, under another name
            raise EngineFailedError(
                "status", "a pd-router answers there, not an engine: name the URLs of its engines"
            )
        _good(call, status, raw)

    async def sglang_facts(self) -> SglangFacts | None:
        """Facts that an SGLang engine reports; None if the engine is not SGLang."""
        try:
            raw = await self._ask(EngineCall("GET", SERVER_INFO, self._headers()))
        except EngineFailedError as failure:
            if failure.cause != "status":
                raise EngineFailedError(failure.cause, f"{SERVER_INFO}: {failure}") from None
            return None  # vLLM has no such page
        return sglang_facts(raw)

    async def models(self) -> Models:
        """Models and adapters of the engine."""
        listed = await self._listed(BRIEF_S)
        names = frozenset(name for entry in listed if (name := _name(entry)) is not None)
        base = next((name for entry in listed if (name := _name(entry)) and not _parent(entry)), "")
        return Models(names, max(map(_context_tokens, listed), default=0), base[:MOST_CHARACTERS])

    async def vllm_version(self) -> str:
        """The version of a vLLM engine; empty: not reported."""
        answer = decoded(await self._ask(EngineCall("GET", VERSION, self._headers()), BRIEF_S))
        version = answer.get("version") if isinstance(answer, dict) else None
        return version[:MOST_CHARACTERS] if isinstance(version, str) else ""

    async def report(self) -> ReportedLoad | None:
        """Load by our scheduler's report; None if the report cannot be read."""
        raw = await self._ask(EngineCall("GET", report.PATH, self._headers()), BRIEF_S)
        return from_report(raw, urlsplit(self._url).hostname or "")

    async def store(self, after: int | None = None, of: str = "") -> PoolReport | None:
        """The engine's place in the KV pool of its host; None if it uses none.

        Args:
            after: `next` of the page before, to get a page of the store's journal; 0: its first page.
            of: `far` for a page of the far store that its host's carrier reaches.
        """
        query = "" if after is None else f"?after={after}" + (f"&of={of}" if of else "")
        call = EngineCall("GET", pool_report.PATH + query, self._headers())
        status, raw = await self._answer(call, BRIEF_S, pool_report.MOST_BYTES)
        if status == 404:
            return None
        try:
            return pool_report.decode(_good(call, status, raw))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise EngineFailedError("malformed", f"{pool_report.PATH}: {error}") from None

    async def load_by_metrics(self) -> ReportedLoad | None:
        """Load by the engine's metrics; None if the metrics have none."""
        return from_metrics(await self._ask(EngineCall("GET", "/metrics", {}), BRIEF_S))

    async def arrivals(self) -> Arrivals:
        """KV that the engine has sent and received."""
        raw = await self._ask(EngineCall("GET", "/metrics", {}), self._config().health_timeout_s)
        text = kv_lines(raw)
        outage = outage_in(text)
        problem = f"{outage.finding}. What to do: {outage.advice}" if outage else ""
        return Arrivals(problem, handoffs_in(text), read(text, asyncio.get_running_loop().time()))

    async def vllm_handover(self, ranks: int) -> Handover:
        """How a vLLM engine hands KV over.

        Args:
            ranks: number of data-parallel ranks. Each rank is asked.
        """
        listed = await self._listed(None)
        model = _name(listed[0]) if listed else None
        if model is None:
            raise EngineFailedError("status", "/v1/models names no model")
        return Handover(model, await addresses_of(self._ask, self._headers(), model, ranks))

    async def sglang_handover(self) -> Handover:
        """How an SGLang engine hands KV over."""
        facts = sglang_facts(await self._ask(EngineCall("GET", SERVER_INFO, self._headers())))
        if facts is None:
            raise EngineFailedError("status", f"{SERVER_INFO} no longer answers as SGLang's does")
        return Handover(facts.model, facts.replicas, facts.bootstrap_port)

    async def switch_role(self, role: str, limit_s: float) -> Refusal | None:
        """Have an SGLang engine change its side; None: it has."""
        content = msgspec.json.encode({"new_role": role, "decode_cuda_graph_memory_gb": 0})
        call = EngineCall("POST", SWITCH_ROLE, self._headers(), (content,))
        status, raw = await self._answer(call, limit_s)
        answer = decoded(raw) if status in (200, 400) else None
        if not isinstance(answer, dict):
            raise EngineFailedError("status", f"{SWITCH_ROLE} answered {status}")
        if answer.get("success") is True:
            return None
        message = str(answer.get("message"))
        return Refusal(message, answer.get("safe_to_restore") is True and "not idle" in message)

    async def _listed(self, limit_s: float | None) -> list[object]:
        """Models and adapters of the engine; adapters follow their model."""
        call = EngineCall("GET", "/v1/models", self._headers())
        answer = decoded(await self._ask(call, limit_s))
        data = answer.get("data") if isinstance(answer, dict) else None
        return data if isinstance(data, list) else []

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._config().api_key:
            headers["Authorization"] = f"Bearer {self._config().api_key}"
        return headers

    async def _ask(self, call: EngineCall, limit_s: float | None = None) -> bytes:
        """The body of an answer 200. Without a limit, `PROBE_S` holds."""
        return _good(call, *await self._answer(call, PROBE_S if limit_s is None else limit_s))

    async def _answer(
        self, call: EngineCall, limit_s: float, most_bytes: int | None = None
    ) -> tuple[int, bytes]:
        """Status and body of any answer."""
        try:
            async with (
                asyncio.timeout(limit_s),
                self._session.request(
                    call.method,
                    self._url + call.path,
                    headers=call.headers,
                    data=b"".join(call.body) if call.body else None,
                ) as response,
            ):
                raw = bytearray()
                async for piece in response.content.iter_any():
                    raw += piece
                    if most_bytes is not None and len(raw) > most_bytes:
                        raise EngineFailedError(
                            "malformed", f"{call.path} answered more than {most_bytes} bytes"
                        )
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise EngineFailedError("timeout", f"no answer within {limit_s:g} s") from None
            raise failure_of(error) from None
        return response.status, bytes(raw)


def _good(call: EngineCall, status: int, raw: bytes) -> bytes:
    """The body, if the status is 200. Raises EngineFailedError."""
    if status != 200:
        said = " ".join(raw[:EXCERPT_BYTES].decode("utf-8", "replace").split())
        problem = f"{call.path} answered {status}: {said or '-'}{about_key(status)}"
        raise EngineFailedError("status", problem)
    return raw


def _context_tokens(listed: object) -> int:
    """Context length of one listed model or adapter; 0: not reported (adapters have their model's context)."""
    tokens = listed.get("max_model_len") if isinstance(listed, dict) else None
    return tokens if type(tokens) is int else 0


def _parent(listed: object) -> object:
    """The model that a listed adapter belongs to; None for a model."""
    return listed.get("parent") if isinstance(listed, dict) else None


def _name(listed: object) -> str | None:
    """Name of one listed model or adapter."""
    name = listed.get("id") if isinstance(listed, dict) else None
    return name if isinstance(name, str) else None


Ask = Callable[[EngineCall], Awaitable[bytes]]
"""Sends a call to the engine. Returns the body of an answer 200; raises EngineFailedError for any other answer."""


async def addresses_of(
    ask: Ask, headers: Mapping[str, str], model: str, ranks: int
) -> tuple[ProducerAddress, ...]:
    """The address of each data-parallel rank behind the engine's URL; empty if the engine hands nothing over.

    Raises:
        EngineFailedError: the engine did not answer, or a different rank answered.
    """
    if ranks < 2:
        address = await _address_of(ask, headers, model)
        return () if address is None else (address,)
    answered: list[ProducerAddress] = []
    # Rank 0 is asked twice. An engine that ignores the header sends the two requests to different ranks.
    for rank in (0, *range(ranks)):
        address = await _address_of(ask, {**headers, HEADER: str(rank)}, model)
        if address is None:
            return ()
        answered.append(address)
    again, *addresses = answered
    if again != addresses[0] or len({address.engine_id for address in addresses}) < ranks:
        raise EngineFailedError(
            "status",
            f"its {ranks} data-parallel ranks cannot be distinguished by {HEADER}: give each a URL of its own "
            "(--data-parallel-external-lb)",
        )
    return tuple(addresses)


async def _address_of(ask: Ask, headers: Mapping[str, str], model: str) -> ProducerAddress | None:
    question = body.encode(transfer.probe(model))
    raw = await ask(EngineCall("POST", body.COMPLETIONS, dict(headers), question))
    return transfer.address_in(decoded(raw))


def decoded(raw: bytes) -> object:
    """The JSON value in `raw`. Raises EngineFailedError if it is not JSON."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise EngineFailedError("status", "its answer is not JSON") from None
