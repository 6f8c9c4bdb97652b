# SPDX-License-Identifier: Apache-2.0
"""Ways to bring a prompt's KV from one process to another: our agent, NIXL page by page, or plain TCP."""

import abc
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pd_connector.tools.wire import (
    PAGE_BYTES,
    POLL_S,
    TIMEOUT_S,
    MoveError,
    WireAgent,
    WireCache,
)
from pd_connector.transport.nixl.library import import_nixl, persistently

_BUFFER_BYTES = 1 << 20


class Mover(abc.ABC):
    """One side of a transfer."""

    @abc.abstractmethod
    def address(self) -> dict[str, Any]:
        """The address that the other side needs."""

    @abc.abstractmethod
    def meet(self, peer: Mapping[str, Any]) -> None:
        """Learn the other side's `address()`."""

    @abc.abstractmethod
    def offer(self, number: int) -> None:
        """As the producer: offer the whole prompt for one fetch, as transfer `number`."""

    @abc.abstractmethod
    def fetch(self, number: int) -> int:
        """As the consumer: fetch transfer `number`, and wait until it has arrived.

        Returns:
            The number of descriptors; plain TCP has one.

        Raises:
            MoveError: it did not arrive.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything except the cache."""


AnyMover = Mover | WireAgent


class PagePerDescriptor(Mover):
    """NIXL, used as vLLM's NixlConnector does (`nixl/base_worker.py`, `nixl/pull_worker.py`). Each layer is a region,
    and each of its pages a descriptor in a prepared list. The consumer reads its prompt's pages straight into its own
    pages. A progress thread polls in both processes."""

    def __init__(self, role: str, cache: WireCache) -> None:
        os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # as vLLM does
        try:
            api = import_nixl()
        except ImportError as error:
            raise MoveError(f"{error}: the baseline needs NIXL, `pd-connector[nixl]`") from error
        self._cache = cache
        self._bases = [layer.data_ptr() for layer in cache.layers]
        settings = api.nixl_agent_config(num_threads=4, capture_telemetry=True)
        name = f"{role}-{os.getpid()}-{time.monotonic_ns()}"
        self._nixl = persistently(lambda: api.nixl_agent(name, settings))
        regions = [(base, cache.nbytes // len(self._bases), 0, "") for base in self._bases]
        self._registered = self._nixl.register_memory(regions, "DRAM", ["UCX"])
        self._lists: list[Any] = []

    def address(self) -> dict[str, Any]:
        return {"metadata": self._nixl.get_agent_metadata(), "bases": self._bases}

    def meet(self, peer: Mapping[str, Any]) -> None:
        remote = self._nixl.add_remote_agent(peer["metadata"])
        for owner, bases in (("NIXL_INIT_AGENT", self._bases), (remote, peer["bases"])):
            table = descriptors(bases, self._cache.page_count, PAGE_BYTES, 0)
            every = self._nixl.get_xfer_descs(table, "DRAM")
            self._lists.append(self._nixl.prep_xfer_dlist(owner, every))

    def offer(self, number: int) -> None:
        self._nixl.get_new_notifs()

    def fetch(self, number: int) -> int:
        here, there = self._lists
        mine, theirs = (places(self._cache, side) for side in ("consumer", "producer"))
        note = f"transfer {number}:1".encode()
        handle = self._nixl.make_prepped_xfer("READ", here, mine, there, theirs, notif_msg=note)
        state = self._nixl.transfer(handle)
        deadline = time.monotonic() + TIMEOUT_S
        while state == "PROC":
            if time.monotonic() > deadline:
                raise MoveError(f"a read has not ended within {TIMEOUT_S:g} s")
            time.sleep(POLL_S)
            state = self._nixl.check_xfer_state(handle)
        self._nixl.release_xfer_handle(handle)
        if state != "DONE":
            raise MoveError(f"NIXL says {state}")
        return len(mine)

    def close(self) -> None:
        for prepared in self._lists:
            self._nixl.release_dlist_handle(prepared)
        self._nixl.deregister_memory(self._registered)
        self._nixl = None


def descriptors(
    bases: Sequence[int], page_count: int, page_bytes: int, device: int
) -> npt.NDArray[np.uint64]:
    """Address, length and device of every page of every layer, `[layers * pages, 3]`.

    Args:
        bases: address of each layer.
    """
    offsets = np.arange(page_count, dtype=np.uint64) * np.uint64(page_bytes)
    table = np.empty((len(bases), page_count, 3), np.uint64)
    table[:, :, 0] = np.asarray(bases, np.uint64)[:, None] + offsets
    table[:, :, 1] = page_bytes
    table[:, :, 2] = device
    return table.reshape(-1, 3)


def places(cache: WireCache, side: str) -> list[int]:
    """Places of the prompt's pages among these descriptors, layer by layer."""
    count, pages = cache.page_count, cache.tables[side]
    return [layer * count + page for layer in range(len(cache.layers)) for page in pages]


class PlainTcp(Mover):
    """The same number of bytes over one TCP connection, between two buffers: the link's own rate."""

    def __init__(self, role: str, cache: WireCache, host: str) -> None:
        self._nbytes = cache.nbytes
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._host = host
        self._listener = socket.create_server((host, 0)) if role == "producer" else None
        self._connection: socket.socket | None = None

    def address(self) -> dict[str, Any]:
        return {
            "host": self._host,
            "port": self._listener.getsockname()[1] if self._listener else 0,
        }

    def meet(self, peer: Mapping[str, Any]) -> None:
        if self._listener is None:
            self._connection = socket.create_connection((peer["host"], peer["port"]), TIMEOUT_S)

    def offer(self, number: int) -> None:
        if self._connection is None:
            assert self._listener is not None
            self._connection, _ = self._listener.accept()
            self._connection.settimeout(TIMEOUT_S)

    def serve(self) -> None:
        """As the producer: wait for the request, and send."""
        assert self._connection is not None
        self._connection.recv(1)
        left = self._nbytes
        while left:
            left -= self._connection.send(self._buffer[:left])

    def fetch(self, number: int) -> int:
        assert self._connection is not None
        self._connection.sendall(b"1")
        left = self._nbytes
        while left:
            got = self._connection.recv_into(self._buffer[:left])
            if not got:
                raise MoveError("the connection was closed")
            left -= got
        return 1

    def close(self) -> None:
        for each in (self._connection, self._listener):
            if each is not None:
                each.close()


def make_mover(
    kind: str, role: str, cache: WireCache, host: str, settings: Mapping[str, Any]
) -> AnyMover:
    """The side `role` of a mover of this kind: `ours`, `pages` or `plain`."""
    if kind == "ours":
        return WireAgent(role, cache, {"host": host, **settings})
    return PagePerDescriptor(role, cache) if kind == "pages" else PlainTcp(role, cache, host)
