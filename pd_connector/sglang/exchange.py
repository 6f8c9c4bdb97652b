# SPDX-License-Identifier: Apache-2.0
"""One HTTP request to a server of another engine, or of this one, that may be none.

Unlike `urllib`, it goes to the address that was permitted and to no other: no redirect is followed, and no proxy
of the environment is asked. It also ends in time, whatever the server does.
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
    """Send one request; returns the answer, with `most_bytes` of its body at most.

    Args:
        timeout_s: for all of it.

    Raises:
        OSError: nobody answers in time.
        ValueError: what answers does not speak HTTP, or the request cannot be written.
    """
    try:
        connection = HTTPConnection(host, port, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.connect()
            with _ended_after(connection.sock, timeout_s) as late:
                try:
                    connection.request(method, path, body, dict(headers or {}))
                    with connection.getresponse() as answer:
                        found = Reply(answer.status, answer.read(most_bytes))
                except (OSError, HTTPException):
                    if not late.is_set():
                        raise
            if late.is_set():
                raise TimeoutError(f"no whole answer within {timeout_s:.1f} s")
            return found
    except OSError:
        raise
    except (HTTPException, OverflowError) as error:
        raise ValueError(f"no answer of an HTTP server: {error!r}") from error


@contextlib.contextmanager
def _ended_after(connected: socket.socket, timeout_s: float) -> Iterator[threading.Event]:
    """Within, the connection is ended after this time; yields an event that says so. The timeout of a socket
    begins again with each byte."""
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
