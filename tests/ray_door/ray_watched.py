# SPDX-License-Identifier: Apache-2.0
"""Our classes as a test's application has them: with a control, and with a memory of what was decided."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from contextvars import ContextVar
from random import Random
from typing import Any, ClassVar

from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.llm._internal.serve.core.server import llm_server
from ray.llm._internal.serve.engines.vllm import vllm_models
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import DefaultConnectorBackend
from ray.llm._internal.serve.serving_patterns.prefill_decode.pd_server import PDOrchestratorMixin

from pd_connector.ray.servers import DecodeServer
from scheduler_plugins.ray import PolicyRequestRouter
from scheduler_plugins.router.policies.base import Decision, Request, View

TWO_STEPS = "in two steps"
"""The field `user` of a request that the control takes."""
RAYS_SERVER = "by Ray's own server"
"""That of a request which Ray's decode server answers with our backend, as after `register()`."""
_two_steps: ContextVar[bool] = ContextVar("two_steps", default=False)


class QuickStart(CallbackBase):
    """Leaves out of a replica's start what a model of one rank on this disk does not need: a download task, an actor
    that counts usage, and a process for the worker. Each would import vLLM, which takes nine seconds of a core."""

    async def on_before_node_init(self) -> None:
        self.ctx.run_init_node = False
        llm_server.push_telemetry_report_for_all_models = lambda **_: None
        vllm_models.EXECUTOR_BACKEND_MP = "uni"


class Memory:
    """What a process remembers."""

    decided: ClassVar[dict[str, str]] = {}
    routed: ClassVar[list[tuple[str, str, str]]] = []


def memory() -> type[Memory]:
    """This process's. Ray sends classes with copies of the globals that they use."""
    return importlib.import_module("ray_watched").Memory


class WatchedRouter(PolicyRequestRouter):
    """Our router; what its policy decides is kept, by Serve's id of the request."""

    def initialize_state(self, **kwargs: Any) -> None:
        super().initialize_state(**kwargs)
        decide = self._fleet._policy.decide

        def watched(request: Request, view: View, now_s: float, random: Random) -> Decision:
            decision = decide(request, view, now_s, random)
            memory().decided[request.id] = decision.p
            return decision

        self._fleet._policy.decide = watched


class WithControl(DecodeServer):
    """Our decode server, which does what Ray's does with its default backend where a request says so, and
    remembers by the field `user` what was decided for a request, and which prefill replica it got."""

    async def _bind(self, stack: Any, prefill: Any, request: Any) -> Any:
        selection = await super()._bind(stack, prefill, request)
        if selection is not None:
            wanted = memory().decided[selection._request_metadata.internal_request_id]
            memory().routed.append((request.user, wanted, selection.replica_id))
        return selection

    def routes(self) -> list[tuple[str, str, str]]:
        return list(memory().routed)

    async def _pd_handle_request(
        self, request: Any, raw_request_info: Any = None
    ) -> AsyncIterator[Any]:
        _two_steps.set(request.user == TWO_STEPS)
        rays = request.user in (TWO_STEPS, RAYS_SERVER)
        handle = PDOrchestratorMixin if rays else DecodeServer
        async for chunk in handle._pd_handle_request(self, request, raw_request_info):
            yield chunk

    def _get_connector_backend(self) -> Any:
        if _two_steps.get():
            return DefaultConnectorBackend(self._llm_config)
        return super()._get_connector_backend()
