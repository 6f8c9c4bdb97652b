# SPDX-License-Identifier: Apache-2.0
"""Names for a changing set of engines: DNS names, and labels of Kubernetes pods.

| URL | engines |
|---|---|
| `dns+http://prefill.example:8100` | one engine at each address that the name resolves to |
| `k8s+http://NAMESPACE:8100/app=vllm,role=prefill` | one engine in each ready pod with these labels |
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import aiohttp

from pd_connector.hosts import is_host

SCHEMES = ("dns+http", "k8s+http")
LIMIT_S = 5.0
"""Longest wait for a name server, or for the Kubernetes API."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder of a pod with its token and the certificate of the API server."""
HOST_VARIABLE, PORT_VARIABLE = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
API_VARIABLE = "PD_ROUTER_KUBERNETES_API"
"""Base URL of the API server, for a router outside the cluster (`kubectl proxy`)."""


class MembersError(Exception):
    """The engines of a name could not be looked up. The message says what was asked and what came
    back."""


class Selector(NamedTuple):
    """The pods that a URL names."""

    namespace: str
    port: int
    labels: str


def is_name(url: str) -> bool:
    """Whether a URL stands for several engines."""
    return url.startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


def checked_name(side: str, given: str) -> str:
    """The URL in its usual form. Raises ValueError if it is no such URL; the message begins with
    `side`."""
    parts = urlsplit(given)
    try:
        port = parts.port
    except ValueError:
        port = None
    pods = parts.scheme == SCHEMES[1]
    labels = unquote(parts.path).strip("/")
    if (
        not is_host(parts.hostname or "")
        or not port
        or bool(labels) is not pods
        or parts.query
        or parts.fragment
    ):
        form = "k8s+http://NAMESPACE:PORT/LABEL=VALUE" if pods else "dns+http://NAME:PORT"
        raise ValueError(f"{side} {given!r}: must look like {form}")
    return f"{parts.scheme}://{parts.netloc}" + (f"/{labels}" if pods else "")


async def members(url: str, session: aiohttp.ClientSession) -> tuple[str, ...]:
    """Base URLs of the engines that a URL stands for now, in a fixed order.

    Raises:
        MembersError: the lookup failed.
    """
    try:
        async with asyncio.timeout(LIMIT_S):
            addresses = await (_pods(url, session) if url.startswith("k8s") else _resolved(url))
    except TimeoutError:
        raise MembersError(f"{url}: no answer within {LIMIT_S:g} s") from None
    port = urlsplit(url).port
    hosts = (f"[{one}]" if ":" in one else one for one in sorted(set(addresses)))
    return tuple(f"http://{host}:{port}" for host in hosts)


async def _resolved(url: str) -> list[str]:
    parts = urlsplit(url)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            parts.hostname, parts.port, type=socket.SOCK_STREAM
        )
    except OSError as error:
        raise MembersError(f"{url}: the name cannot be resolved: {error}") from None
    return [str(address[0]) for *_, address in found]


async def _pods(url: str, session: aiohttp.ClientSession) -> list[str]:
    parts = urlsplit(url)
    where = f"{_api()}/api/v1/namespaces/{parts.hostname}/pods"
    try:
        async with session.get(
            where,
            params={"labelSelector": parts.path.strip("/")},
            headers=_headers(),
            ssl=_trust(),
        ) as response:
            text = await response.text()
            if response.status != 200:
                raise MembersError(f"{url}: {where} answered {response.status}: {text[:200]}")
            listed = json.loads(text)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise MembersError(f"{url}: {where} did not answer: {error}") from None
    items = listed.get("items") if isinstance(listed, dict) else None
    if not isinstance(items, list):
        raise MembersError(f"{url}: {where} answered with no list of pods")
    return [str(pod["status"]["podIP"]) for pod in items if _is_ready(pod)]


def _is_ready(pod: Any) -> bool:
    """Whether a pod takes requests: it is ready, has an address, and is not being deleted."""
    try:
        ends = "deletionTimestamp" in pod["metadata"]
        conditions = pod["status"].get("conditions", ())
        ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
        return ready and not ends and bool(pod["status"].get("podIP"))
    except (KeyError, TypeError, AttributeError):
        return False


def _api() -> str:
    if given := os.environ.get(API_VARIABLE):
        return given.rstrip("/")
    host, port = os.environ.get(HOST_VARIABLE), os.environ.get(PORT_VARIABLE, "443")
    if not host:
        raise MembersError(
            f"this process is in no pod of Kubernetes: set {API_VARIABLE}, such as http://127.0.0.1:8001"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _headers() -> dict[str, str]:
    token = ACCOUNT / "token"  # read each time, as Kubernetes renews it
    return {"Authorization": f"Bearer {token.read_text().strip()}"} if token.exists() else {}


def _trust() -> ssl.SSLContext | bool:
    certificate = ACCOUNT / "ca.crt"
    return ssl.create_default_context(cafile=certificate) if certificate.exists() else True
