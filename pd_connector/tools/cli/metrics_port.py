# SPDX-License-Identifier: Apache-2.0
"""Answers Prometheus on a port: `GET /metrics`, and nothing else.

prometheus_client's own server has no limits: a stranger who connects and says nothing keeps a thread for ever. Here a connection
has a deadline, a size, and a place among a fixed number.
"""

import contextlib
import logging
import re
import socket
import threading
import time

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from pd_connector.errors import ConfigError

logger = logging.getLogger(__name__)

_MOST_CONNECTIONS = 16
"""Further ones are closed at once."""
_MOST_REQUEST = 8192
_WITHIN_S = 5.0
"""Longest time from a connection to its end, in seconds."""
_PAUSE_S = 0.2
"""After an error of the listener, such as no descriptor left, in seconds."""


class MetricsPort:
    """Listens until it is closed.

    Args:
        address: `HOST:PORT`, or `[HOST]:PORT` for IPv6; port 0 is a free one.
        collector: what is shown. Any thread may ask it.

    Attributes:
        port: on which it listens.

    Raises:
        ConfigError: there is no such address here, or the port is taken.
    """

    def __init__(self, address: str, collector: Collector) -> None:
        host, port = _host_and_port(address)
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        self._places = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._ends = threading.Event()
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--metrics {address}: cannot listen there ({why}): name an address of this machine and a free port"
            ) from None
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="pd-metrics", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._ends.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._ends.is_set():
            try:
                channel, _ = self._listener.accept()
            except OSError:
                self._ends.wait(_PAUSE_S)
                continue
            if not self._places.acquire(blocking=False):
                channel.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(channel,), daemon=True).start()
            except RuntimeError as error:  # no thread can be started
                logger.warning("metrics: a connection is not served: %r", error)
                self._places.release()
                channel.close()

    def _serve(self, channel: socket.socket) -> None:
        try:
            with channel, contextlib.suppress(OSError):
                until_s = time.monotonic() + _WITHIN_S
                if request := _request(channel, until_s):
                    answer = self._answer(request)
                    channel.settimeout(max(0.001, until_s - time.monotonic()))
                    channel.sendall(answer)
        except Exception:
            logger.exception("metrics: a request failed")
        finally:
            self._places.release()

    def _answer(self, request: bytes) -> bytes:
        method, path = [*request.split(b"\r\n", 1)[0].split(b" "), b"", b""][:2]
        if path.partition(b"?")[0] != b"/metrics":
            return _response("404 Not Found", "text/plain", b"only /metrics is here\n")
        if method != b"GET":
            return _response("405 Method Not Allowed", "text/plain", b"only GET\n")
        return _response("200 OK", CONTENT_TYPE_LATEST, generate_latest(self._registry))


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and re.fullmatch("[0-9]{1,5}", port) and int(port) < 1 << 16):
        raise ConfigError(
            f"--metrics {address!r}: must be HOST:PORT, such as 127.0.0.1:9105, or 0.0.0.0:9105 for all addresses of this machine"
        )
    return host, int(port)


def _request(channel: socket.socket, until_s: float) -> bytes:
    """A request's head; empty if it did not come whole. Raises OSError."""
    data = b""
    while b"\r\n\r\n" not in data:
        channel.settimeout(max(0.001, until_s - time.monotonic()))
        part = channel.recv(4096)
        if not part or len(data) > _MOST_REQUEST:
            return b""
        data += part
    return data


def _response(status: str, kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
