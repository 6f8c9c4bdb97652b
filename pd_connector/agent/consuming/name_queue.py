# SPDX-License-Identifier: Apache-2.0
"""Holds commands until the host names of their producers are looked up.

Requests can spell a producer's host in several ways. After the queue a producer is known only by its numeric address and
port, so there is one session with it.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from pd_connector.agent.commands import Drop, Hold
from pd_connector.control.resolver import Resolver, UnknownHostError
from pd_connector.errors import Cause
from pd_connector.protocol.consuming.incoming import Load
from pd_connector.protocol.wire.peers import Peer, Source


class Named(NamedTuple):
    """A command with the addresses of its producers. With a cause it cannot be carried out."""

    command: Hold | Load | Drop
    fence: Any
    cause: Cause | None = None
    detail: str = ""


class _Queued(NamedTuple):
    command: Hold | Load
    fence: Any
    deadline: float


class NameQueue:
    """Used by the agent's thread only. Commands of one request keep their order.

    Args:
        permits: whether a host, given by name or address, can be dialled. Other names are not looked up.
        timeout_s: longest wait of a command for addresses, in seconds.
    """

    def __init__(
        self, resolver: Resolver, permits: Callable[[str], bool], timeout_s: float
    ) -> None:
        self._resolver = resolver
        self._permits = permits
        self._timeout_s = timeout_s
        self._queues: dict[str, deque[_Queued]] = {}

    def put(self, command: Hold | Load | Drop, fence: Any, now: float) -> list[Named]:
        """Add a command. Returns the commands that are ready now, in their order."""
        if isinstance(command, Drop):
            dropped = self._queues.pop(command.request, ())
            ended = [Named(q.command, q.fence, command.cause, "dropped") for q in dropped]
            return [*ended, Named(command, None)]
        queue = self._queues.setdefault(command.request, deque())
        queue.append(_Queued(command, fence, now + self._timeout_s))
        return self._take(command.request, now)

    def ready(self, now: float) -> list[Named]:
        """The commands that have become ready, or have waited too long."""
        return [named for request in list(self._queues) for named in self._take(request, now)]

    def close(self) -> None:
        self._resolver.close()

    def _take(self, request: str, now: float) -> list[Named]:
        queue, taken = self._queues[request], list[Named]()
        while queue:
            named = self._name(queue[0], now)
            if named is None:
                return taken
            queue.popleft()
            taken.append(named)
        del self._queues[request]
        return taken

    def _name(self, queued: _Queued, now: float) -> Named | None:
        """The command with the addresses of its producers; None during the look-up."""
        command, fence, deadline = queued
        for peer in command.peers:
            if not self._permits(peer.source.host):
                detail = (
                    f"producer at {peer.source.host!r}, and no key is set: only loopback is "
                    "dialled then. Set PD_CONNECTOR_KEY to one secret on every engine"
                )
                return Named(command, fence, Cause.INSECURE_ADDRESS, detail)
        try:
            addresses = [self._resolver.address(peer.source.host) for peer in command.peers]
        except UnknownHostError as error:
            return Named(command, fence, Cause.UNREACHABLE, str(error))
        if None not in addresses:
            return Named(_with_addresses(command, [a for a in addresses if a]), fence)
        if deadline > now:
            return None
        detail = f"no address within {self._timeout_s:g} s (connect_timeout_s): name server slow?"
        return Named(command, fence, Cause.UNREACHABLE, detail)


def _with_addresses(command: Hold | Load, addresses: list[str]) -> Hold | Load:
    peers = tuple(
        Peer(Source(address, peer.source.port, ""), peer.shard)
        for address, peer in zip(addresses, command.peers, strict=True)
    )
    engine_id = command.peers[0].source.engine_id if command.peers else ""
    return command._replace(peers=peers, engine_id=engine_id)
