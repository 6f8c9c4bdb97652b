# SPDX-License-Identifier: Apache-2.0
"""Names for a changing set of engines: DNS names, and labels of Kubernetes pods.

| URL | engines |
|---|---|
| `dns+http://prefill.example:8100` | one engine at each address that the name resolves to |
| `k8s+http://NAMESPACE:8100/app=vllm,role=prefill` | one engine in each ready pod with these labels |
| `pool+http://NAMESPACE/NAME` | the pods and ports of an InferencePool; `/LABEL=VALUE` behind it takes fewer pods |
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from pd_connector.hosts import is_host, stray_character, without_secret

DNS, PODS, POOL = "dns+http", "k8s+http", "pool+http"
FORMS = {
    DNS: "dns+http://NAME:PORT",
    PODS: "k8s+http://NAMESPACE:PORT/LABEL=VALUE",
    POOL: "pool+http://NAMESPACE/NAME",
}


class Name(NamedTuple):
    """The parts of such a URL."""

    scheme: str
    host: str
    """The DNS name, or the namespace."""
    port: int | None
    pool: str
    """Name of the InferencePool."""
    labels: str
    """Label selector of pods."""


def is_name(url: str) -> bool:
    """Whether a URL stands for several engines."""
    return url.startswith(tuple(f"{scheme}://" for scheme in FORMS))


def parts_of(url: str) -> Name:
    """The parts of a URL. Raises ValueError: its port is not a number."""
    parts = urlsplit(url)
    path = unquote(parts.path).strip("/")
    pool, _, labels = path.partition("/") if parts.scheme == POOL else ("", "", path)
    return Name(parts.scheme, parts.hostname or "", parts.port, pool, labels)


def checked_name(side: str, given: str) -> str:
    """The URL in its usual form. Raises ValueError if it is no such URL; the message begins with
    `side`."""
    parts, shown = urlsplit(given), without_secret(given)
    if stray := stray_character(given) or stray_character(unquote(given)):
        raise ValueError(f"{side} {shown!r}: must look like {FORMS[parts.scheme]}; {stray}")
    try:
        name: Name | None = parts_of(given)
    except ValueError:
        name = None
    if name is None or not _is_whole(name) or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{side} {shown!r}: must look like {FORMS[parts.scheme]}")
    path = "/".join(filter(None, (name.pool, name.labels)))
    return f"{parts.scheme}://{parts.netloc}" + (f"/{path}" if path else "")


def _is_whole(name: Name) -> bool:
    if not is_host(name.host):
        return False
    if name.scheme == POOL:
        return name.port is None and bool(name.pool) and "=" not in name.pool
    return bool(name.port) and bool(name.labels) is (name.scheme == PODS)
