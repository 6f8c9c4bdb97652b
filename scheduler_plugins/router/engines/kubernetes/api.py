# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes API: where it is, with which credentials, and its answers."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

LIMIT_S = 5.0
"""Longest wait for an answer of the API server, or of a name server."""
WATCH_S = 60.0
"""The API server ends a watch after this time. A connection that died silently is noticed then."""
MOST_BYTES = 4 << 20
"""Longest line of a watch. The API server stores objects of 1.5 MiB at most."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder of a pod with its token and the certificate of the API server."""
HOST_VARIABLE, PORT_VARIABLE = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
API_VARIABLE = "PD_ROUTER_KUBERNETES_API"
"""Base URL of the API server, for a router outside the cluster (`kubectl proxy`)."""


class MembersError(Exception):
    """The engines of a name could not be looked up. The message has the query and the
    answer."""


class StatusError(MembersError):
    """The API server answered with an error."""

    def __init__(self, where: str, status: int, text: str) -> None:
        super().__init__(f"{where} answered {status}: {' '.join(text.split())[:200]}")
        self.status = status


class Access(NamedTuple):
    """The address of the API server, and the credentials for it."""

    base: str
    headers: Mapping[str, str]
    trust: ssl.SSLContext | bool


async def read(session: aiohttp.ClientSession, path: str, **params: str) -> dict[str, Any]:
    """GET an object or a list.

    Raises:
        MembersError: it could not be read; StatusError if there is an answer.
    """
    where = path
    limit = aiohttp.ClientTimeout(total=LIMIT_S)
    try:
        access = await _access()
        where = f"{access.base}{path}"
        async with session.get(
            where, params=params, headers=access.headers, ssl=access.trust, timeout=limit
        ) as response:
            text = await response.text()
            if response.status != 200:
                raise StatusError(where, response.status, text)
            value = json.loads(text)
    except TimeoutError:
        raise MembersError(f"{where} did not answer within {LIMIT_S:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise MembersError(f"{where} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise MembersError(f"{where} answered with no object")
    return value


async def events(
    session: aiohttp.ClientSession, path: str, **params: str
) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a watch, until the server ends it. The first is `{}`: the server has accepted the watch.

    Raises:
        MembersError: the watch could not be started, or broke; StatusError if the server says why.
    """
    where = path
    limit = aiohttp.ClientTimeout(
        total=None, sock_connect=LIMIT_S, sock_read=WATCH_S + LIMIT_S, ceil_threshold=LIMIT_S
    )
    watch = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": f"{WATCH_S:.0f}"}
    try:
        access = await _access()
        where = f"{access.base}{path}"
        async with session.get(
            where,
            params={**params, **watch},
            headers=access.headers,
            ssl=access.trust,
            timeout=limit,
            read_bufsize=MOST_BYTES // 2,  # aiohttp refuses lines of twice this length
        ) as response:
            if response.status != 200:
                raise StatusError(where, response.status, await response.text())
            yield {}
            async for line in response.content:
                yield _event(where, json.loads(line))
    except TimeoutError:
        raise MembersError(f"{where} said nothing for {WATCH_S + LIMIT_S:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise MembersError(f"the watch of {where} broke: {error}") from None


def _event(where: str, event: Any) -> dict[str, Any]:
    """The event. Raises StatusError: it is an error; ValueError: it is not an event."""
    if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
        raise ValueError(f"not an event: {str(event)[:200]}")
    if event.get("type") == "ERROR":
        status = event["object"]
        raise StatusError(where, int(status.get("code") or 0), str(status.get("message")))
    return event


async def _access() -> Access:
    if given := os.environ.get(API_VARIABLE):
        return Access(given.rstrip("/"), _headers(), _trust())
    host, port = os.environ.get(HOST_VARIABLE), os.environ.get(PORT_VARIABLE, "443")
    if not host:
        return await _kubeconfig()
    return Access(f"https://{f'[{host}]' if ':' in host else host}:{port}", _headers(), _trust())


def _headers() -> dict[str, str]:
    token = ACCOUNT / "token"  # read each time, as Kubernetes renews it
    return {"Authorization": f"Bearer {token.read_text().strip()}"} if token.exists() else {}


def _trust() -> ssl.SSLContext | bool:
    certificate = ACCOUNT / "ca.crt"
    return ssl.create_default_context(cafile=certificate) if certificate.exists() else True


async def _kubeconfig() -> Access:
    """What `kubectl` would use here, read by the official client's code for each kind of credentials."""
    try:
        from kubernetes_asyncio.client import Configuration
        from kubernetes_asyncio.config import ConfigException, load_kube_config
    except ModuleNotFoundError:
        raise MembersError(
            f"this process does not run in a Kubernetes pod: set {API_VARIABLE}, such as http://127.0.0.1:8001, or "
            "pip install 'pd-connector[kubernetes]' to use the kubeconfig"
        ) from None
    configuration = Configuration()
    try:
        await load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=configuration)
        token = await configuration.get_api_key_with_prefix("BearerToken")
        trust = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if configuration.cert_file:
            trust.load_cert_chain(configuration.cert_file, configuration.key_file)
    except (ConfigException, OSError, ValueError) as error:
        raise MembersError(
            f"this process does not run in a Kubernetes pod, and its kubeconfig cannot be used: {error}"
        ) from None
    if not configuration.verify_ssl:
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    return Access(configuration.host.rstrip("/"), {"Authorization": token} if token else {}, trust)
