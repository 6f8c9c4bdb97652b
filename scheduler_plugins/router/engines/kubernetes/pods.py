# SPDX-License-Identifier: Apache-2.0
"""The pods of one name (`k8s+http`, `pool+http`): listed once, and then watched."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, NamedTuple

import aiohttp

from pd_connector.pauses import doubled_s
from scheduler_plugins.router.engines.kubernetes.api import (
    MembersError,
    StatusError,
    events,
    read,
)
from scheduler_plugins.router.settings.members import POOL, parts_of

logger = logging.getLogger(__name__)

LIST_S = 5.0
"""Pause between two lists, where a watch is forbidden."""
LISTS_S = 300.0
"""Time after which a forbidden watch is tried again."""
STEADY_S = 1.0
"""A connection that lived longer was not a failure to connect."""
RESUMED = 3
"""A watch that failed more often in a row is not resumed: the pods are listed again. A server that was restored from a
backup does not know the version."""
FIRST_S, LONGEST_S = 0.25, 30.0
"""Shortest and longest pause between two tries. Each is twice the one before."""
_POOLS = (
    "/apis/inference.networking.k8s.io/v1",
    "/apis/inference.networking.x-k8s.io/v1alpha2",
)
"""APIs of the Gateway API's inference extension, the newest first."""


class Selected(NamedTuple):
    """Which pods, and which of their ports."""

    labels: str
    ports: tuple[int, ...]


class Pods:
    """Follows the ready pods of one name.

    After a LIST, the API server reports each change (a watch). A watch that ends is resumed where it ended. If the
    server has forgotten that point (410), the pods are listed again. Where a watch is forbidden, they are listed
    every `LIST_S`.

    Args:
        tell: called with the engines' base URLs when they may have changed.
        complain: called with a message when nothing can be learnt for now.
    """

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        tell: Callable[[Collection[str]], None],
        complain: Callable[[str], None],
    ) -> None:
        self._url = url
        self._name = parts_of(url)
        self._session = session
        self._on_urls = tell
        self._complain = complain
        self._selected = Selected(self._name.labels, (self._name.port or 0,))
        self._ready: dict[str, str] = {}  # the pod's name to its address
        self._version: str | None = None  # None: list again
        self._forbidden_logged = False

    async def follow(self) -> None:
        """Follow the pods until cancelled."""
        loop = asyncio.get_running_loop()
        failed = 0
        while True:
            begun_s = loop.time()
            try:
                await self._select()
                if self._version is None:
                    await self._list()
                if not await self._watch():
                    await self._list_repeatedly()
            except MembersError as error:
                self._failed(error, before=failed)
            failed = 0 if loop.time() - begun_s > STEADY_S else failed + 1
            await asyncio.sleep(_pause_s(failed))

    def _failed(self, error: MembersError, *, before: int) -> None:
        """A list or a watch failed. If a watch broke for the first time, it is resumed and nothing is logged.

        Args:
            before: failures in a row before this one.
        """
        status = error.status if isinstance(error, StatusError) else None
        if status == HTTPStatus.GONE:
            self._version = None
            return
        busy = status == HTTPStatus.TOO_MANY_REQUESTS or (status or 500) >= 500
        if before >= RESUMED or not busy:
            self._version = None
        if before == 0 and self._version is not None:
            return
        self._complain(f"{self._url}: {error}")

    async def _select(self) -> None:
        """Find out which pods belong to an InferencePool. If that has changed, they are listed again."""
        if self._name.scheme != POOL:
            return
        selected = await self._of_pool()
        if selected != self._selected:
            self._selected, self._version = selected, None

    async def _of_pool(self) -> Selected:
        for api in _POOLS:
            path = f"{api}/namespaces/{self._name.host}/inferencepools/{self._name.pool}"
            try:
                spec = (await read(self._session, path)).get("spec", {})
            except StatusError as error:
                if error.status == HTTPStatus.NOT_FOUND:
                    continue
                raise
            return _selected(spec, self._name.labels)
        raise MembersError(f"no InferencePool {self._name.pool} in namespace {self._name.host}")

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{self._name.host}/pods"

    async def _list(self) -> None:
        listed = await read(self._session, self._path, labelSelector=self._selected.labels)
        items = listed.get("items")
        if not isinstance(items, list):
            raise MembersError(f"{self._path} answered with no list of pods")
        self._ready = {name: address for name, address in map(_ready, items) if address}
        self._version = _version(listed)
        self._tell()

    async def _list_repeatedly(self) -> None:
        if not self._forbidden_logged:
            self._forbidden_logged = True
            logger.warning(
                "%s: the account is not allowed to watch pods, so they are listed every %g s: give it the verb `watch`",
                self._url,
                LIST_S,
            )
        for _ in range(max(1, round(LISTS_S / LIST_S))):
            await asyncio.sleep(LIST_S)
            try:
                await self._list()
            except MembersError as error:
                self._complain(f"{self._url}: {error}")
        self._version = None

    async def _watch(self) -> bool:
        """Apply events until the server ends the watch. Returns whether it permits one."""
        params = {"labelSelector": self._selected.labels, "resourceVersion": self._version or ""}
        try:
            async with aclosing(events(self._session, self._path, **params)) as stream:
                async for event in stream:
                    if event:
                        self._apply(str(event.get("type")), event["object"])
                    else:
                        self._tell()  # the server is there again
        except StatusError as error:
            if error.status != HTTPStatus.FORBIDDEN:
                raise
            return False
        return True

    def _apply(self, kind: str, pod: Mapping[str, Any]) -> None:
        self._version = _version(pod) or self._version
        if kind == "BOOKMARK":
            return
        name, address = _ready(pod)
        if kind == "DELETED":
            address = ""
        if self._ready.get(name, "") != address:
            self._ready.pop(name, None)
            if address:
                self._ready[name] = address
            self._tell()

    def _tell(self) -> None:
        addresses = sorted(set(self._ready.values()))
        hosts = [f"[{address}]" if ":" in address else address for address in addresses]
        self._on_urls([f"http://{host}:{port}" for host in hosts for port in self._selected.ports])


def _pause_s(failed: int) -> float:
    """Pause after this number of failures in a row. The first try after a failure comes at once."""
    if failed < 2:
        return 0.0
    return doubled_s(FIRST_S, failed - 2, LONGEST_S) * random.uniform(0.5, 1.0)


def _selected(spec: Mapping[str, Any], labels: str) -> Selected:
    """The pods and ports that the spec of an InferencePool names, and that have these labels, too."""
    try:
        selector = spec["selector"].get("matchLabels", spec["selector"])
        selectors = [*(f"{name}={value}" for name, value in sorted(selector.items())), labels]
        ports = [target["number"] for target in spec.get("targetPorts", ())] or [
            spec["targetPortNumber"]
        ]
        return Selected(",".join(filter(None, selectors)), tuple(map(int, ports)))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise MembersError("the InferencePool names no labels or no ports of pods") from None


def _version(resource: Mapping[str, Any]) -> str | None:
    metadata = resource.get("metadata")
    version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    return str(version) if version else None


def _ready(pod: Any) -> tuple[str, str]:
    """A pod's name, and its address if it takes requests: it is ready, and not being deleted."""
    try:
        name = str(pod["metadata"]["name"])
        ends = "deletionTimestamp" in pod["metadata"]
        conditions = pod["status"].get("conditions", ())
        ready = any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in conditions
        )
        return name, str(pod["status"].get("podIP") or "") if ready and not ends else ""
    except (KeyError, TypeError, AttributeError):
        return "", ""
