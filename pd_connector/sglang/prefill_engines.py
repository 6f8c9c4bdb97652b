# SPDX-License-Identifier: Apache-2.0
"""Where prefill engines are: from the address in a request to the ranks that have its KV.

A request names its prefill engine by the host and port of SGLang's registry, a plain HTTP server. The registry returns
the control port of one rank of each data-parallel replica. Any rank returns all ranks of its replica over its own,
authenticated control channel: the registry is trusted only for that first address. The address may also be a control
port itself, which is how engines other than SGLang are reached.

Look-ups happen in threads of their own: the engine's thread never waits for a peer.
"""

import socket
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from pd_connector.agent.consuming.discovery import ask_ranks
from pd_connector.config import Config
from pd_connector.errors import Cause, PDConnectorError
from pd_connector.protocol.wire.peers import Peer
from pd_connector.sglang.registry import ENGINE, ask_row, split

_RETRY_S = 0.2
_GREETING = b"\xff"
"""The first byte of ZeroMQ's protocol, which both sides send at once."""
_GREETING_S = 0.1
AT_ONCE = 16
"""Look-ups that run side by side. Each ends within `connect_timeout_s`, so invented addresses rarely delay others."""
_POLL_S = 0.02
MOST_FAILED = 256
"""Most failed look-ups that are remembered; above it the failed ones are forgotten. Their requests may have been
aborted, so that the result is never read."""
MAX_REPLICAS = 256
"""Most replicas of an engine that are looked up; a registry may name more."""


def look_up_often(queue: Any) -> None:
    """Have SGLang's queue of a decode engine ask every `_POLL_S` seconds, without limit, whether a look-up has ended.
    By default the queue asks once a second and gives up after 15 times, so the first request to a prefill engine would
    wait a second. A look-up ends by itself within `connect_timeout_s`."""
    queue._ensure_retry_interval = _POLL_S
    queue._max_ensure_retries = sys.maxsize


class LookupResult(NamedTuple):
    """The end of a look-up: all ranks of each replica of the engine, or why they are unknown."""

    replicas: tuple[tuple[Peer, ...], ...]
    problem: tuple[Cause, str] | None = None


class PrefillEngines:
    """Known prefill engines, by address `host:port`. Used by the engine's thread."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="pd-discovery")
        self._lookups: dict[str, Future[LookupResult]] = {}

    def look_up(self, address: str) -> LookupResult | None:
        """The look-up's result for this address; None while it runs."""
        if address not in self._lookups:
            if len(self._lookups) >= MOST_FAILED:
                self._forget_failed()
            self._lookups[address] = self._threads.submit(_find, address, self._config)
        lookup = self._lookups[address]
        return lookup.result() if lookup.done() else None

    def forget(self, address: str) -> None:
        """Look up again at the next request."""
        lookup = self._lookups.get(address)
        if lookup is not None and lookup.done():
            del self._lookups[address]

    def _forget_failed(self) -> None:
        ended = [item for item in self._lookups.items() if item[1].done()]
        for address, lookup in ended:
            if lookup.result().problem is not None:
                del self._lookups[address]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _find(address: str, config: Config) -> LookupResult:
    deadline = time.monotonic() + config.connect_timeout_s
    try:
        host, port = split(address)
        if problem := forbidden(host, config):
            return LookupResult((), (Cause.INSECURE_ADDRESS, problem))
        replicas = []
        for rank, control in _control_ports(host, port, deadline):
            if problem := forbidden(rank, config):
                return LookupResult(
                    (), (Cause.INSECURE_ADDRESS, f"registry at {address}: {problem}")
                )
            replicas.append(ask_ranks(config, rank, control, deadline))
        return LookupResult(tuple(replicas))
    except PDConnectorError as error:
        cause = getattr(error, "cause", Cause.UNREACHABLE)
        return LookupResult((), (cause, f"prefill engine at {address}: {error}"))
    except Exception as error:  # any server can listen there, with any answer
        return LookupResult((), (Cause.UNREACHABLE, f"prefill engine at {address}: {error!r}"))


def forbidden(host: str, config: Config) -> str:
    """Why this address must not be dialled; empty if it may. Neither a request nor a registry can make an engine dial an
    arbitrary address."""
    if not config.is_peer(host):
        return f"prefill engine at {host!r}: not within {list(config.peers)} (config key peers)"
    if not config.permits(host):
        return f"prefill engine at {host!r}: without a key only loopback is asked; set one on every engine"
    return ""


def _control_ports(host: str, port: int, deadline: float) -> list[tuple[str, int]]:
    """Host and control port of one rank of each replica. The address is the engine's registry or a control port.

    Raises OSError if no server answers until the deadline; ValueError if the server is neither.
    """
    engine = _ask(host, port, ENGINE, deadline)
    if engine is None:
        return [(host, port)]
    replicas = int(engine.get("dp_size") or 1)
    if not 0 < replicas <= MAX_REPLICAS:
        raise ValueError(f"its registry names {replicas} replicas: wanted 1 to {MAX_REPLICAS}")
    if replicas > 1 and not engine.get("follow_bootstrap_room", True):
        raise ValueError(
            f"it has {replicas} replicas, and a bootstrap room does not identify one: start it with "
            "--load-balance-method follow_bootstrap_room"
        )
    rows = [_ask(host, port, replica, deadline) for replica in range(replicas)]
    try:
        return [(str(row["rank_ip"]), int(row["rank_port"])) for row in rows if row is not None]
    except (KeyError, TypeError) as error:
        raise ValueError(f"it answers without rank_ip and rank_port: {error!r}") from None


def _ask(host: str, port: int, replica: int, deadline: float) -> dict[str, Any] | None:
    """A registry's row of a replica, or of the engine; None if a control port listens there instead. Raises as
    `_control_ports` does, in time."""
    while True:
        left_s = deadline - time.monotonic()
        try:
            if replica == ENGINE and greets(host, port, max(left_s, _RETRY_S)):
                return None
            return ask_row(host, port, replica, max(left_s, _RETRY_S))
        except OSError:  # the server may be starting
            if left_s <= 0:
                raise
        time.sleep(_RETRY_S)


def greets(host: str, port: int, timeout_s: float) -> bool:
    """Whether the server speaks first, as a control channel does. An HTTP server waits."""
    with socket.create_connection((host, port), timeout_s) as connection:
        connection.settimeout(_GREETING_S)
        try:
            return connection.recv(1) == _GREETING
        except TimeoutError:
            return False
