# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes API server for tests: LIST and WATCH of pods over HTTP, by the rules of the real one.

Each change has a resource version. A watch sends the changes after the version that it names, one JSON object a line.
Versions that were compacted are gone: the watch gets an ERROR event of code 410, with status 200, or status 410. A pod
that loses a selected label is DELETED for that watch. Bookmarks only carry a version. A watch ends after
`timeoutSeconds`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web


def pod(name: str, address: str, *, ready: bool = True, **labels: str) -> dict[str, Any]:
    """A pod in the form of the API."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "serving", "labels": labels or {"app": "vllm"}},
        "status": {
            "podIP": address,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def status(code: int, reason: str, message: str) -> dict[str, Any]:
    """An error in the form of the API."""
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }


def selects(selector: str, one: dict[str, Any]) -> bool:
    """Whether an equality-based selector matches a pod."""
    wanted = dict(part.split("=", 1) for part in selector.split(",") if part)
    labels = one["metadata"]["labels"]
    return all(labels.get(name) == value for name, value in wanted.items())


class FakeKubernetes:
    """The server. Use it as an async context manager."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.pools: dict[str, dict[str, Any]] = {}
        """InferencePools of the namespace, by their path under /apis."""
        self.token = ""
        """The only accepted token; empty: no token is needed."""
        self.forbids_watch = False
        self.refuses_watch = 0
        """Status with which each watch is refused; 0: none is."""
        self.ends_at_once = False
        """Whether a watch ends as soon as it has begun."""
        self.gone_as_status = False
        """Whether a version that is gone is answered with status 410, and not with an event."""
        self.asked: list[tuple[str, dict[str, str]]] = []
        self._version = 100
        self._compacted = 0
        self._log: list[tuple[int, str, dict[str, Any], dict[str, Any] | None]] = []
        self._changed = asyncio.Condition()
        self._watching: list[web.Request] = []
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def watches(self) -> int:
        """Watches that are open."""
        return len(self._watching)

    def count(self, kind: str) -> int:
        """How often the pods were asked for: `list` or `watch`."""
        return sum(
            path.endswith("/pods") and ("watch" in query) is (kind == "watch")
            for path, query in self.asked
        )

    async def __aenter__(self) -> FakeKubernetes:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._pods)
        app.router.add_get("/apis/{path:.*}", self._pool)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        self.cut()
        if self._runner is not None:
            await self._runner.cleanup()

    def cut(self) -> None:
        """Reset the connections of all watches, in the middle of a line if it so happens."""
        for request in list(self._watching):
            if request.transport is not None:
                request.transport.abort()
        self._watching = []

    async def put(self, *pods: dict[str, Any]) -> None:
        """Add pods, or change them."""
        for one in pods:
            name = one["metadata"]["name"]
            kind = "MODIFIED" if name in self.pods else "ADDED"
            await self._log_change(kind, one, self.pods.get(name))

    async def remove(self, name: str) -> None:
        await self._log_change("DELETED", self.pods[name], self.pods[name])

    async def bookmark(self) -> None:
        """Another object of the cluster has changed: watches hear of the new version only."""
        await self._log_change("BOOKMARK", {"kind": "Pod", "metadata": {}}, None)

    def compact(self) -> None:
        """Forget all changes up to now."""
        self._compacted = self._version
        self._log.clear()

    async def _log_change(
        self, kind: str, one: dict[str, Any], before: dict[str, Any] | None
    ) -> None:
        self._version += 1
        one = {**one, "metadata": {**one["metadata"], "resourceVersion": str(self._version)}}
        if kind == "DELETED":
            del self.pods[one["metadata"]["name"]]
        elif kind != "BOOKMARK":
            self.pods[one["metadata"]["name"]] = one
        self._log.append((self._version, kind, one, before))
        async with self._changed:
            self._changed.notify_all()

    def _refusal(self, request: web.Request) -> web.Response | None:
        self.asked.append((request.path, dict(request.query)))
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response(status(401, "Unauthorized", "Unauthorized"), status=401)
        if self.refuses_watch and "watch" in request.query:
            code = self.refuses_watch
            return web.json_response(status(code, "Busy", "not now"), status=code)
        if self.forbids_watch and "watch" in request.query:
            message = 'pods is forbidden: User "router" cannot watch resource "pods"'
            return web.json_response(status(403, "Forbidden", message), status=403)
        return None

    async def _pool(self, request: web.Request) -> web.Response:
        if refusal := self._refusal(request):
            return refusal
        if found := self.pools.get(request.match_info["path"]):
            return web.json_response(found)
        return web.json_response(status(404, "NotFound", "not found"), status=404)

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        if refusal := self._refusal(request):
            return refusal
        selector = request.query.get("labelSelector", "")
        if request.query.get("watch") in ("1", "true", "True"):
            return await self._watch(request, selector)
        items = [one for one in self.pods.values() if selects(selector, one)]
        metadata = {"resourceVersion": str(self._version)}
        return web.json_response({"kind": "PodList", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, selector: str) -> web.StreamResponse:
        sent = int(request.query["resourceVersion"])
        gone = status(410, "Expired", f"too old resource version: {sent} ({self._compacted})")
        if sent < self._compacted and self.gone_as_status:
            return web.json_response(gone, status=410)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        if sent < self._compacted:
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        self._watching.append(request)
        try:
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", 1800))):
                while not self.ends_at_once:
                    changes, sent = [c for c in self._log if c[0] > sent], self._version
                    for _, kind, one, before in changes:
                        if seen := self._seen(kind, one, before, selector):
                            line = json.dumps({"type": seen, "object": one}).encode() + b"\n"
                            await response.write(line)
                    async with self._changed:
                        await self._changed.wait_for(lambda sent=sent: self._version > sent)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._watching = [one for one in self._watching if one is not request]
        return response

    @staticmethod
    def _seen(
        kind: str, one: dict[str, Any], before: dict[str, Any] | None, selector: str
    ) -> str | None:
        """What a watch with this selector calls a change; None: it does not see it."""
        if kind == "BOOKMARK":
            return kind
        had = before is not None and selects(selector, before)
        has = kind != "DELETED" and selects(selector, one)
        if had and has:
            return "MODIFIED"
        return "ADDED" if has else "DELETED" if had else None
