# SPDX-License-Identifier: Apache-2.0
"""Ways to bring a prompt's KV from one process to another: our agent, NIXL page by page, or plain TCP."""

import abc
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pd_connector.agent.agent import Agent
from pd_connector.config import Config
from pd_connector.errors import PDConnectorError
from pd_connector.kv.geometry import Geometry
from pd_connector.kv.model import ModelFacts
from pd_connector.pages.paged_cache import PagedCache
from pd_connector.protocol.consuming.incoming import Finished, Load
from pd_connector.protocol.producing.outgoing import Offer
from pd_connector.protocol.wire.peers import Peer, Source
from pd_connector.tools.bench.wire.cache import WireCache
from pd_connector.transport.nixl.library import import_nixl, persistently

POLL_S = 0.0005
TIMEOUT_S = 120.0

_IDENTITY = b"wire"
_ENGINE = "bench"
_BUFFER_BYTES = 1 << 20
_WAIT_S = 0.1


class BenchCache(Protocol):
    """A cache whose prompt is moved: its tokens, the pages that hold them, and its geometry."""

    tokens: int

    @property
    def pages(self) -> Sequence[int]:
        """The pages that hold the prompt, in its order."""

    @property
    def geometry(self) -> Geometry:
        """What the cache looks like."""

    def paged(self) -> PagedCache:
        """The cache as an agent takes it."""


class MoveError(PDConnectorError):
    """KV did not arrive."""


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
            The number of descriptors. For ours these are chunks, or pieces if it reads pages in place; plain TCP
            has one.

        Raises:
            MoveError: it did not arrive.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything except the cache."""


class Ours(Mover):
    """A real agent, with the given settings."""

    def __init__(self, role: str, cache: BenchCache, settings: Mapping[str, Any]) -> None:
        self._cache = cache
        self._config = Config.load(settings)
        self._peer: Peer | None = None
        self._agent = Agent(
            self._config,
            _ENGINE,
            ModelFacts(b"model", b"model"),
            cache.paged(),
            produces=role == "producer",
            consumes=role == "consumer",
        )

    def address(self) -> dict[str, Any]:
        return {"host": self._config.host, "port": self._agent.port}

    def meet(self, peer: Mapping[str, Any]) -> None:
        source = Source(peer["host"], peer["port"], _ENGINE)
        self._peer = Peer(source, self._cache.geometry.shard)

    def offer(self, number: int) -> None:
        self._agent.outcomes()
        name, tokens = f"transfer {number}", self._cache.tokens
        pages = (tuple(self._cache.pages),)
        self._agent.submit(Offer(name, name, pages, _IDENTITY, tokens, tokens, final=True))

    def fetch(self, number: int) -> int:
        assert self._peer is not None, "the other side is known"
        name, tokens = f"transfer {number}", self._cache.tokens
        pages = (tuple(self._cache.pages),)
        load = Load(name, name, (self._peer,), _IDENTITY, 0, tokens, pages, wait=True)
        self._agent.submit(load)
        deadline = time.monotonic() + TIMEOUT_S
        while not (ended := self._agent.outcomes()):
            if time.monotonic() > deadline:
                raise MoveError(f"nothing has ended within {TIMEOUT_S:g} s")
            # Waits as the worker of an idle engine does. Until the agent has the load, there is nothing to wait
            # for.
            time.sleep(POLL_S)
            self._agent.wait_for_outcome(_WAIT_S)
        (finished,) = ended
        assert isinstance(finished, Finished)
        if finished.cause is not None:
            raise MoveError(f"{finished.cause}: {finished.detail}")
        snapshot = self._agent.telemetry.take()
        pulled = snapshot.counts.get(("pulled_pieces", ()), 0) if snapshot else 0
        return int(pulled) or finished.chunks

    def close(self) -> None:
        self._agent.close()


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
            every = self._nixl.get_xfer_descs(self._cache.descriptors(bases), "DRAM")
            self._lists.append(self._nixl.prep_xfer_dlist(owner, every))

    def offer(self, number: int) -> None:
        self._nixl.get_new_notifs()

    def fetch(self, number: int) -> int:
        here, there = self._lists
        mine, theirs = (self._numbers(side) for side in ("consumer", "producer"))
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

    def _numbers(self, side: str) -> list[int]:
        """Places of the prompt's pages in the prepared list, layer by layer."""
        count, pages = self._cache.page_count, self._cache.tables[side]
        return [layer * count + page for layer in range(len(self._bases)) for page in pages]


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
        for one in (self._connection, self._listener):
            if one is not None:
                one.close()


def make_mover(
    kind: str, role: str, cache: WireCache, host: str, settings: Mapping[str, Any]
) -> Mover:
    """The side `role` of a mover of this kind: `ours`, `pages` or `plain`."""
    if kind == "ours":
        return Ours(role, cache, {"host": host, **settings})
    return PagePerDescriptor(role, cache) if kind == "pages" else PlainTcp(role, cache, host)
