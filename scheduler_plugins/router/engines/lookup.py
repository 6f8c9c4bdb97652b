# SPDX-License-Identifier: Apache-2.0
"""Looks up the host names of engines. While name servers do not answer, engines keep their last addresses."""

from __future__ import annotations

import asyncio
import logging
import socket

from aiohappyeyeballs import AddrInfoType
from aiohttp.abc import AbstractResolver, ResolveResult

logger = logging.getLogger(__name__)

KNOWN_S = 10.0
"""The addresses of a name are looked up again after this time."""
PATIENCE_S = 0.5
"""Longest wait for a lookup if older addresses are known."""
_SERVERS_AWAY = (socket.EAI_AGAIN, socket.EAI_FAIL)
"""Errors that say nothing of the name. All others mean that it is gone."""

_Key = tuple[str, int]  # host and port


class Names(AbstractResolver):
    """The addresses of host names. Each name is looked up by one thread at a time: a name server that hangs must not take
    all threads. It is aiohttp's resolver, too."""

    def __init__(self) -> None:
        self._cached: dict[_Key, tuple[float, list[AddrInfoType]]] = {}
        self._asking: dict[_Key, asyncio.Task[list[AddrInfoType]]] = {}
        self._failing: set[str] = set()  # hosts whose lookup fails

    async def addresses(self, host: str, port: int) -> list[AddrInfoType]:
        """The addresses of a host. Raises OSError: the name is gone, or it has never been resolved."""
        if numeric := _numeric(host, port):
            return numeric
        key, now_s = (host, port), asyncio.get_running_loop().time()
        until_s, old = self._cached.get(key, (0.0, []))
        if now_s < until_s:
            return old
        if key not in self._asking:
            self._asking[key] = asyncio.create_task(self._ask(key), name=f"look up {host}")
            self._asking[key].add_done_callback(lambda task: self._ended(key, task))
        asking = asyncio.shield(self._asking[key])
        if not old:
            return await asking
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await asking
        except TimeoutError:
            return old

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=port,
                family=kind,
                proto=proto,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, _, proto, _, address in await self.addresses(host, port)
            if family in (kind, socket.AF_UNSPEC)
        ]

    async def close(self) -> None:
        """Give up all lookups."""
        for task in list(self._asking.values()):
            task.cancel()

    def _ended(self, key: _Key, task: asyncio.Task[list[AddrInfoType]]) -> None:
        self._asking.pop(key, None)
        if not task.cancelled():
            task.exception()  # perhaps nobody waits any more

    async def _ask(self, key: _Key) -> list[AddrInfoType]:
        host, port = key
        loop = asyncio.get_running_loop()
        _, old = self._cached.get(key, (0.0, []))
        try:
            addresses: list[AddrInfoType] = [
                *await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            ]
        except socket.gaierror as error:
            if not old or error.errno not in _SERVERS_AWAY:
                self._cached.pop(key, None)
                raise
            addresses = old
            if host not in self._failing:
                self._failing.add(host)
                logger.warning("%s cannot be looked up, its last addresses stay: %s", host, error)
        else:
            if host in self._failing:
                self._failing.discard(host)
                logger.info("%s can be looked up again", host)
        self._cached[key] = loop.time() + KNOWN_S, addresses
        return addresses


def _numeric(host: str, port: int) -> list[AddrInfoType]:
    """The address if `host` is numeric; empty if it is a name. Does no lookup."""
    try:
        flags = socket.AI_NUMERICHOST
        return [*socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)]
    except socket.gaierror:
        return []
