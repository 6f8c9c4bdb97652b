# SPDX-License-Identifier: Apache-2.0
"""`--middleware scheduler_plugins.vllm.PoolMiddleware`: `GET /pd/pool` tells routers what the KV pool of this host has.
`AdmissionMiddleware` answers it, too."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any
from urllib.parse import parse_qs

from msgspec.structs import replace

from pd_connector.errors import ConfigError, PoolError
from pd_connector.pool.advertised import find_engine
from pd_connector.pool.carrier.asking import CarrierLink
from pd_connector.pool.carrier.messages import FarPage
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.settings import memory_folder
from pd_connector.pool.store.base import FAR
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space
from scheduler_plugins.admission.pool_report import PATH, PoolEvent, PoolReport
from scheduler_plugins.middleware.answers import Refusal, respond, respond_json
from scheduler_plugins.middleware.api_key import may_enter
from scheduler_plugins.middleware.asgi import App, Receive, Scope, Send
from scheduler_plugins.middleware.engine_config import pool_engine

_NUMBER = re.compile(r"-?[0-9]{1,19}")
_MOST = (1 << 63) - 1
"""Largest number of a journal, which grows by 2^40 with each generation of the books."""
CARRIER_S = 0.25
"""Longest wait for the carrier, in seconds. A router waits 1 s for the page, most of which is about this host's own pool."""
_MOST_SILENT = 8
"""Pages in a row for which a silent carrier is taken to reach the far store of before."""


class PoolMiddleware:
    """A pure ASGI middleware. It reads the store as commands do: the budgets and chunks are the engines' business.

    Args:
        engine: the engine's id in the pool, where vLLM's configuration does not tell it.
    """

    def __init__(self, app: App, engine: str = "") -> None:
        self._app = app
        self._engine = engine
        self._opened: tuple[LocalStore, _Carrier] | None = None
        self._opening = threading.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path != PATH or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        answer = await self._answer(scope)
        if isinstance(answer, Refusal):
            await respond(send, answer)
        else:
            await respond_json(send, 200, answer.encode())

    async def _answer(self, scope: Scope) -> PoolReport | Refusal:
        if not may_enter(scope):
            return _refusal(401, "wrong or no API key")
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        after, of = query.get("after", [""])[-1], query.get("of", [""])[-1]
        if after and not (_NUMBER.fullmatch(after) and abs(int(after)) <= _MOST):
            return _refusal(400, f"after {after[:32]!r}: must be `next` of the page before, or 0")
        if of not in ("", FAR):
            return _refusal(400, f"of {of[:32]!r}: must be {FAR}, or be left out")
        config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
        engine = self._engine or pool_engine(config)
        if engine is None:
            return _refusal(
                404, 'this engine has no KV pool: set "pool": true in kv_connector_extra_config'
            )
        try:
            return await asyncio.to_thread(self._report, engine, after, of)
        except (ConfigError, PoolError, OSError) as error:
            return _refusal(503, f"the pool cannot be read: {error}")

    def _report(self, engine: str, after: str, of: str) -> PoolReport | Refusal:
        """In a thread: the store's files are read. A request that is cancelled meanwhile leaves the opened store to the next."""
        with self._opening:
            if self._opened is None:
                self._opened = LocalStore(Space(memory_folder(), 0), visits=True), _Carrier()
        return _report(*self._opened, engine, after, of)


class _Carrier:
    """The carrier of this host, with the far store that it has told of last. Any thread may use it."""

    def __init__(self) -> None:
        self._link = CarrierLink(memory_folder())
        self._far, self._silent = "", 0

    def far(self) -> str:
        """Id of the far store; empty without a carrier, or while it does not know it."""
        status = self._link.status(CARRIER_S)
        return self._remembered(None if status is None else status.mark)

    def page(self, after: int) -> FarPage | None:
        """A page of the far store, without events while the carrier is silent; None without a carrier."""
        page = self._link.far_page(after, CARRIER_S)
        far = self._remembered(None if page is None else page.far)
        return page or (FarPage(far, [], after) if far else None)

    def _remembered(self, reported: str | None) -> str:
        """The id that the carrier tells, or has told before: a busy one may be late."""
        if reported is not None:
            self._far, self._silent = reported, 0
        elif not self._link.is_there or self._silent >= _MOST_SILENT:
            self._far = ""
        else:
            self._silent += 1
        return self._far


def _report(
    store: LocalStore, carrier: _Carrier, engine: str, after: str, of: str
) -> PoolReport | Refusal:
    store.restore_folders()
    advertised = find_engine(store.advertised(), engine)
    if advertised is None:
        return _refusal(
            503,
            "this engine has not told its model yet, or its weights have changed: the pool is not used",
        )
    report = PoolReport(
        store=store.id,
        model=advertised.model,
        chunk_tokens=CHUNK_TOKENS,
        chunk_bytes=advertised.chunk_bytes,
        bytes_per_s=advertised.bytes_per_s,
    )
    if not after:
        return replace(report, far=carrier.far())
    if of:
        return _far_page(report, carrier.page(int(after)))
    page = store.journal(int(after))
    events = tuple(PoolEvent(event.number, event.key.hex(), event.tier) for event in page.events)
    return replace(report, events=events, next=page.next, whole=page.whole, more=page.more)


def _far_page(report: PoolReport, page: FarPage | None) -> PoolReport:
    if page is None:
        return report
    events = tuple(
        PoolEvent(page.next, key.hex(), FAR if there else "") for key, there in page.events
    )
    return replace(
        report, far=page.far, events=events, next=page.next, whole=page.whole, more=page.more
    )


def _refusal(status: int, message: str) -> Refusal:
    error: dict[str, Any] = {"message": message, "code": status}
    return Refusal(status, {}, error)
