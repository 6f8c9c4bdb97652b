# SPDX-License-Identifier: Apache-2.0
"""Fake SGLang engines that change their sides, and refuse or die when a test wants it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web
from router_fakes import FakeEngine


class Switching(FakeEngine):
    """An SGLang engine that can change its side."""

    def __init__(self, name: str, mode: str) -> None:
        super().__init__(name, f"engine-{name}")
        self.started = mode
        """The side of its start."""
        self.mode, self.switches = mode, True
        self.asked: list[str] = []
        self.refusals: list[dict[str, Any]] = []
        """What it answers before it obeys."""
        self.then = ""
        """What it does instead of obeying: `die`, `die switched`, `other` (it says yes and stays)."""
        self.meanwhile: Callable[[], None] = lambda: None
        """Called while it switches."""

    def routes(self, app: web.Application) -> None:
        super().routes(app)
        app.router.add_get("/server_info", self._info)
        app.router.add_post("/pd_role_switch", self._switch)

    async def _info(self, request: web.Request) -> web.StreamResponse:
        address = {"remote_engine_id": self.engine_id, "remote_host": "127.0.0.1"}
        address |= {"remote_port": 7001}
        ours = {"side": self.mode, **(address if self.mode == "prefill" else {})}
        told = {
            "disaggregation_mode": self.started,
            "disaggregation_bootstrap_port": 1,
            "served_model_name": "m",
            "enable_pd_role_switch": self.switches,
            "internal_states": [{"pd_connector": ours}],
        }
        return web.json_response(told)

    async def _switch(self, request: web.Request) -> web.StreamResponse:
        role = (await request.json())["new_role"]
        self.asked.append(role)
        assert self.running == 0, "it is idle"
        self.meanwhile()
        if self.refusals:
            return web.json_response({"success": False, **self.refusals.pop(0)}, status=400)
        if self.then.startswith("die"):
            self.mode = role if self.then == "die switched" else self.mode
            assert request.transport is not None
            request.transport.abort()
        elif self.then != "other":
            self.mode = role
        return web.json_response({"success": True, "message": "ok"})
