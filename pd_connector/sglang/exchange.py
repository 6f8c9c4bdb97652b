# SPDX-License-Identifier: Apache-2.0
"""One HTTP request to a server of this engine or another, which may not be an HTTP server.

Unlike `urllib`, it connects only to the permitted address: it follows no redirect, and uses no proxy of the
environment. It also ends in time, whatever the server does.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple


class Reply(NamedTuple):
    """Status and body of an answer."""

    status: int
    body: bytes


def exchange(
    host: str,
    port: int,
    path: str,
    *,
    timeout_s: float,
    most_bytes: int,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """Send one request; returns the answer, with at most `most_bytes` of its body.

    Args:
        timeout_s: for the whole exchange.

    Raises:
        OSError: no server answers in time.
        ValueError: the server does not speak HTTP, or the request cannot be written.
    """
    try:
        connection = HTTPConnection(host, port, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.connect()
            with _ended_after(connection.sock, timeout_s) as late:
                try:
                    connection.request(method, path, body, dict(headers or {}))
                    with connection.getresponse() as answer:
                        reply = Reply(answer.status, answer.read(most_bytes))
                except (OSError, HTTPException):
                    if not late.is_set():
                        raise
            if late.is_set():
                raise TimeoutError(f"no complete answer within {timeout_s:.1f} s")
            return reply
    except OSError:
        raise
    except (HTTPException, OverflowError) as error:
        raise ValueError(f"the answer is not HTTP: {error!r}") from error


@contextlib.contextmanager
def _ended_after(connected: socket.socket, timeout_s: float) -> Iterator[threading.Event]:
    """A context that closes the connection after this time; yields an event that is then set. A socket's own timeout
    starts again with each byte."""
    late = threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
