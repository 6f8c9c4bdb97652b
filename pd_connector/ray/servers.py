# SPDX-License-Identifier: Apache-2.0
"""The deployments of a prefill/decode application: two of engines, and the ingress that clients call.

Ray's own decode server fails a request if its prefill fails (`_concurrent_decode` in Ray's `pd_server.py`), and waits
without limit for a prefill replica (`choose_replica`). Here the decode replica computes the prompt itself in both
cases, and counts it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionRequest,
    ErrorResponse,
)
from ray.llm._internal.serve.core.ingress.ingress import OpenAiIngress
from ray.llm._internal.serve.serving_patterns.data_parallel.dp_server import DPServer
from ray.llm._internal.serve.serving_patterns.prefill_decode.pd_server import (
    PDDecodeServer,
    PDOrchestratorMixin,
    PDPrefillServer,
)
from ray.serve._private.http_util import session_id_from_headers
from ray.serve.metrics import Counter

from pd_connector.ray.backend import PDConnectorBackend
from pd_connector.ray.carried import why_alone


class BindingPatience:
    """Lets requests wait for a prefill replica. After a failed wait only one request at a time waits.

    Without this limit, each request would wait its full time while no prefill replica exists.

    Args:
        patience_s: the longest wait of one request, in seconds. After a failed wait, other requests do not
            wait during the next `patience_s`.
        clock: monotonic seconds.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._no_wait_before = -1.0
        self._absent = False

    def take_s(self) -> float:
        """Seconds that the calling request may wait; 0: it must not wait."""
        if not self._absent:
            return self._patience_s
        now = self._clock()
        if now < self._no_wait_before:
            return 0.0
        self._no_wait_before = now + 2 * self._patience_s  # this request tries for all others
        return self._patience_s

    def bound(self) -> None:
        """A request has found a prefill replica."""
        self._absent = False

    def failed(self) -> None:
        """A request waited, and got no replica."""
        self._absent = True
        self._no_wait_before = self._clock() + self._patience_s


logger = logging.getLogger("ray.serve")

_POLL_S = 0.2
_SHARE_OF_SHUTDOWN = 0.8
"""The share of `graceful_shutdown_timeout_s` in which leases may end; then Serve kills the replica."""

_prefills_under_way: set["asyncio.Task[None]"] = set()
"""Tasks whose request has already ended. Without a reference, Python may collect a task."""


class ConcurrentDecode:
    """Answers requests with the KV of a prefill replica, or without it."""

    _prefill_handle: Any
    _patience: BindingPatience | None = None
    _outcomes: Counter | None = None

    async def _pd_handle_request(
        self, request: Any, raw_request_info: Any = None
    ) -> AsyncGenerator[Any, None]:
        """Send a request to both engines, and return the decode engine's answer."""
        method = "chat" if isinstance(request, ChatCompletionRequest) else "completions"
        cause = why_alone(request)
        if cause is not None:
            async for chunk in self._alone(method, request, raw_request_info, cause):
                yield chunk
            return
        async with contextlib.AsyncExitStack() as stack:
            prefill = getattr(self._prefill_of(raw_request_info), method)
            selection = await self._bind(stack, prefill, request)
            if selection is None:
                answer = self._alone(method, request, raw_request_info, "unbound")
            elif self._backend().address_of(selection.replica_metadata) is None:
                await stack.aclose()  # its place is free for others
                answer = self._alone(method, request, raw_request_info, "unreachable")
            else:
                answer = self._together(
                    method, prefill, selection, stack, request, raw_request_info
                )
            async with contextlib.aclosing(answer):
                async for chunk in answer:
                    yield chunk

    def _prefill_of(self, raw_request_info: Any) -> Any:
        """The handle of the prefill deployment, with the routing options of this request's headers."""
        handle = self._prefill_handle
        adapter = serve.get_multiplexed_model_id()
        if adapter:
            handle = handle.options(multiplexed_model_id=adapter)
        if raw_request_info is not None:
            session = session_id_from_headers(raw_request_info.headers)
            if session:
                handle = handle.options(session_id=session)
        return handle

    async def _bind(
        self, stack: contextlib.AsyncExitStack, prefill: Any, request: Any
    ) -> Any | None:
        """A prefill replica with room for the request, kept until the stack ends. None: no replica was free in
        time."""
        if self._patience is None:
            self._patience = BindingPatience(self._backend().config.connect_timeout_s)
        wait_s = self._patience.take_s()
        if wait_s == 0.0:
            return None
        try:
            async with asyncio.timeout(wait_s):
                selection = await stack.enter_async_context(prefill.choose_replica(request))
        except Exception as error:  # no free replica in time, a full queue, or a failed deployment
            self._patience.failed()
            logger.warning("no prefill replica within %.1f s: %r", wait_s, error)
            return None
        self._patience.bound()
        return selection

    async def _together(
        self,
        method: str,
        prefill: Any,
        selection: Any,
        place: contextlib.AsyncExitStack,
        request: Any,
        raw_request_info: Any,
    ) -> AsyncGenerator[Any, None]:
        """Run both engines at the same time. If the prefill fails before the first token has come, the request starts
        again on the decode engine alone. An answer does not wait for a prefill replica that hangs."""
        backend = self._backend()
        peer = selection.replica_metadata
        shaped = backend.prepare_prefill_request(request=request, peer=peer)
        decode = backend.prepare_decode_request(request=request, peer=peer, prefill_response=None)
        response = prefill.dispatch(selection, shaped, raw_request_info)
        failed = asyncio.create_task(_why_failed(response), name="pd-prefill")
        local = self._local(method, decode, raw_request_info)
        try:
            first = asyncio.ensure_future(anext(local, None))
            try:
                await asyncio.wait({first, failed}, return_when=asyncio.FIRST_COMPLETED)
                why = failed.result() if failed.done() else None
                if why is None:
                    chunk = await first
            finally:
                await _end(first)
            if why is None:
                self._count("handed_over")
                while chunk is not None:
                    yield chunk
                    chunk = await anext(local, None)
                return
            logger.warning(
                "prefill replica %s failed (%s): request %s is computed here",
                selection.replica_id,
                why,
                request.request_id,
            )
        finally:
            if not failed.done():
                _keep_until(failed, place.pop_all())
            await local.aclose()
        async for chunk in self._alone(method, request, raw_request_info, "prefill_failed"):
            yield chunk

    async def _alone(
        self, method: str, request: Any, raw_request_info: Any, cause: str
    ) -> AsyncGenerator[Any, None]:
        """The decode engine also computes the prompt."""
        self._count(cause)
        alone = request.model_copy(deep=True)
        alone.kv_transfer_params = None  # a client's own transfer parameters are not trusted
        local = self._local(method, alone, raw_request_info)
        async with contextlib.aclosing(local):
            async for chunk in local:
                yield chunk

    async def _local(
        self, method: str, request: Any, raw_request_info: Any
    ) -> AsyncGenerator[Any, None]:
        """The answer of this replica's engine."""
        ask = getattr(super(PDOrchestratorMixin, self), method)
        answer = await ask(request, raw_request_info)
        try:
            async for chunk in answer:
                yield chunk
        finally:
            await answer.aclose()

    def _backend(self) -> PDConnectorBackend:
        backend = self._get_connector_backend()  # type: ignore[attr-defined]
        assert isinstance(backend, PDConnectorBackend), f"{backend}: wanted PDConnector's"
        return backend

    def _count(self, outcome: str) -> None:
        if self._outcomes is None:
            type(self)._outcomes = Counter(
                "pd_connector_serve_requests",
                "Requests of a decode replica, by where their prompt was computed: `handed_over` by a "
                "prefill replica; any other outcome says why the decode replica computed it.",
                tag_keys=("outcome",),
            )
        assert self._outcomes is not None
        self._outcomes.inc(1, tags={"outcome": outcome})


async def _why_failed(response: AsyncIterator[Any]) -> str | None:
    """Read a prefill's answer to its end; returns why it failed, or None."""
    try:
        async for chunk in response:
            if isinstance(chunk, ErrorResponse):
                return str(chunk.error.message)
    except (Exception, asyncio.CancelledError) as error:
        # The replica or its node died, or Serve cancelled the response because its client has gone.
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def _keep_until(prefill: "asyncio.Task[str | None]", place: contextlib.AsyncExitStack) -> None:
    """Give back a prefill replica's place after its prefill. Ray requires that a dispatched response is read to its
    end first."""

    async def leave() -> None:
        await prefill
        await place.aclose()

    task = asyncio.create_task(leave(), name="pd-prefill-end")
    _prefills_under_way.add(task)
    task.add_done_callback(_prefills_under_way.discard)


async def _end(task: "asyncio.Future[Any]") -> None:
    """Cancel a task if it has not ended, and wait for its end."""
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


class LeaseKeeper:
    """A prefill replica that ends only after its KV has been fetched, or when Serve stops waiting."""

    async def __del__(self) -> None:
        """Serve calls and awaits this when it stops a replica after the last request."""
        engine = getattr(self, "engine", None)
        if engine is not None:
            await _leases_end(engine)
        await super().__del__()  # type: ignore[misc]


async def _leases_end(engine: Any) -> None:
    """Wait until no decode replica fetches KV of this engine."""
    config = serve.get_replica_context()._deployment_config
    end = time.monotonic() + _SHARE_OF_SHUTDOWN * config.graceful_shutdown_timeout_s
    warned = False
    while time.monotonic() < end:
        try:
            left = max(await engine.collective_rpc("outgoing_transfers"), default=0)
        except Exception as error:  # the engine has died, or its worker extension lacks this
            logger.warning(
                "stopping without waiting: the transfers that are left are unknown: %r", error
            )
            return
        if not left:
            return
        if not warned:
            warned = True
            logger.info("stopping when decode replicas have fetched KV: transfers left: %d", left)
        await asyncio.sleep(_POLL_S)
    logger.warning(
        "stopping although decode replicas have not fetched all KV: they compute the rest"
    )


class PrefillServer(LeaseKeeper, PDPrefillServer):
    """Ray's prefill server."""


class DecodeServer(ConcurrentDecode, PDDecodeServer):
    """Ray's decode server."""


class DPPrefillServer(PrefillServer, DPServer):
    """Ray's prefill server with data-parallel engines."""


class DPDecodeServer(DecodeServer, DPServer):
    """Ray's decode server with data-parallel engines."""


class SecondChanceIngress(OpenAiIngress):
    """Ray's ingress, with a retry. If a decode replica dies before it has answered anything, its request is sent once
    more: to another replica, or to the replica that Serve starts in its place.

    There is one retry only: a request that kills its replicas would otherwise kill all of them.
    """

    async def _get_response(
        self, *, body: Any, call_method: str, raw_request: Any = None
    ) -> AsyncGenerator[Any, None]:
        ask = super()._get_response
        begun = False
        try:
            answer = ask(body=body, call_method=call_method, raw_request=raw_request)
            async with contextlib.aclosing(answer):
                async for chunk in answer:
                    begun = True
                    yield chunk
            return
        except RayActorError as error:
            if begun:  # the client has part of an answer that no other replica can continue
                raise
            logger.warning(
                "the replica died before it answered; its request goes to another: %s", error
            )
        again = ask(body=body, call_method=call_method, raw_request=raw_request)
        async with contextlib.aclosing(again):
            async for chunk in again:
                yield chunk
