# SPDX-License-Identifier: Apache-2.0
"""Host names, addresses and ZeroMQ endpoints."""

import errno
import socket
from collections.abc import Iterable
from typing import Any

import zmq

from pd_connector.hosts import numeric_address

_BACKLOG = 1024
_POLLIN = int(zmq.POLLIN)  # operations on flags take microseconds


def numeric(host: str) -> str:
    """The numeric address of `host` on this machine's resolver, IPv4 first.

    Raises:
        OSError: the name does not resolve.
    """
    if (address := numeric_address(host)) is not None:
        return str(address)
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a part between dots is empty, or too long
        raise OSError(f"{host!r} cannot be a host name: {error}") from None
    entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(entries[0][4][0])


def endpoint(host: str, port: int | str) -> str:
    """The ZeroMQ endpoint of a TCP port; `*` as port lets the system choose one to bind."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def bound(host: str, port: int, backlog: int = _BACKLOG) -> socket.socket:
    """A socket that listens on a numeric address, also while old connections to its port linger; port 0 lets the system
    choose. Raises OSError."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(backlog)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def bound_within(host: str, ports: range) -> socket.socket:
    """A socket that listens on the first of these ports that is free; as `bound`.

    Raises:
        OSError: no port is free, or the address is not of this machine.
    """
    for port in ports:
        try:
            return bound(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    span = f"port {ports[0]} is" if len(ports) == 1 else f"ports {ports[0]}-{ports[-1]} are all"
    raise OSError(errno.EADDRINUSE, f"{span} taken: each rank on this host needs one of its own")


def readable(polled: zmq.Socket[bytes]) -> bool:
    """Whether a receive would not wait. (`polled.get(zmq.EVENTS)` takes twice as long.)"""
    return bool(zmq.zmq_poll([(polled, _POLLIN)], 0))


def readable_among(polled: Iterable[zmq.Socket[bytes]]) -> list[zmq.Socket[bytes]]:
    """The sockets whose receive would not wait. One call for many sockets costs a third of single calls."""
    ready: list[Any] = zmq.zmq_poll([(each, _POLLIN) for each in polled], 0)
    return [polled for polled, _ in ready]
