# SPDX-License-Identifier: Apache-2.0
"""URLs and addresses in settings: their usual form, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from urllib.parse import urlsplit

from pd_connector.hosts import is_loopback, server_url, stray_character, without_secret
from scheduler_plugins.qos.trust import KEY_VARIABLE
from scheduler_plugins.router.settings.members import checked_name, is_name


def is_url(text: str) -> bool:
    """Whether the text is a URL of an HTTP server."""
    if stray_character(text):
        return False
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def host_with_port(address: str) -> str:
    """The host of an address with a port; empty if the address has no port, or a user name or password."""
    if stray_character(address) or "@" in address:
        return ""
    try:
        parts = urlsplit(address)
        return parts.hostname or "" if parts.port else ""
    except ValueError:
        return ""


def base_urls(side: str, given: Sequence[str]) -> tuple[str, ...]:
    """The URLs of one side in their usual form. Raises ValueError as `base_url`, or if one is given twice."""
    urls = tuple(base_url(side, url) for url in given)
    for url in urls:
        if urls.count(url) > 1:
            raise ValueError(f"{side} '{url}': given {urls.count(url)} times; name it once")
    return urls


def check_sides(urls: Mapping[str, Sequence[str]], host: str, port: int) -> None:
    """Raises ValueError if an engine is named on sides that exclude each other, or is the router itself, which listens
    on `host` and `port`. An engine may be both `prefill` and `decode`."""
    here = {host, "127.0.0.1", "localhost", "::1"}
    for side, given in urls.items():
        others = {url for other in urls if other != side for url in urls[other]}
        for url in given:
            if side in ("engine", "cpu_prefill") and url in others:
                raise ValueError(f"{side} {url}: is named on another side, too; name it once")
            if not is_name(url) and urlsplit(url).port == port and urlsplit(url).hostname in here:
                raise ValueError(f"{side} {url}: is this router's own address; name an engine's")


def check_exchange(exchange: str, fellows: Sequence[str], *, has_key: bool) -> None:
    """Raises ValueError if routers cannot exchange their load over these addresses."""
    for name, addresses in (("exchange", (exchange,)), ("fellows", fellows)):
        for address in filter(None, addresses):
            host = host_with_port(address)
            if not address.startswith("tcp://") or not host:
                raise ValueError(
                    f"{name} {without_secret(address)!r}: must look like tcp://10.0.0.1:9100"
                )
            if not (has_key or is_loopback(host)):
                raise ValueError(
                    f"{name} {address}: must be a loopback address without a key; set {KEY_VARIABLE} at all routers"
                )
            if name == "fellows" and address == exchange:
                raise ValueError(
                    f"fellows {address}: is this router's own exchange; name the others'"
                )


def base_url(side: str, given: str) -> str:
    """The URL in the form that names an engine. Raises ValueError if it is not a URL; the message begins with `side`."""
    if is_name(given):
        return checked_name(side, given)
    try:
        return server_url(given)
    except ValueError as error:
        raise ValueError(f"{side} {without_secret(given)!r}: {error}") from None


def checked_events(
    given: Mapping[str, tuple[str, str | None]], urls: Collection[str]
) -> dict[str, tuple[str, str | None]]:
    """Endpoints of KV events, by the engines' URLs in their usual form.

    Args:
        urls: base URLs of all engines.

    Raises:
        ValueError: no engine has such a URL, or an endpoint is none of ZeroMQ's.
    """
    endpoints = {}
    for engine, (endpoint, replay) in given.items():
        url = base_url("kv_events", engine)
        if url not in urls:
            raise ValueError(
                f"kv_events {engine}: no engine has this URL; write it as in --prefill, --decode or --engine"
            )
        for address in (endpoint, replay):
            if address is not None and (
                stray_character(address)
                or (address.startswith("tcp://") and "@" in address)
                or not address.startswith(("tcp://", "ipc://"))
            ):
                shown = without_secret(address)
                raise ValueError(f"kv_events {shown!r}: must look like tcp://host:port")
        endpoints[url] = (endpoint, replay)
    return endpoints
