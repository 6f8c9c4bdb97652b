# SPDX-License-Identifier: Apache-2.0
"""NIXL over UCX between slabs in host memory: RDMA where there is any, shared memory or TCP else.

The producer writes into the landing slab by itself; a notification that follows the bytes tells
the consumer. Every route is a NIXL agent of its own, because releasing a transfer that is under
way does not stop it: UCX goes on reading its source. Destroying the agent does.

UCX neither encrypts nor authenticates, and whoever reaches its port can do harm: outside of
loopback the network between the engines must be trusted, key or no key. Peers' metadata is
parsed by NIXL's C++ code; NIXL's Python helpers that unpickle are not used.
"""

import itertools
import logging
import os
import secrets
import struct
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from pd_connector.config import is_loopback
from pd_connector.errors import TransportError
from pd_connector.slab import Slab
from pd_connector.transport.base import Landed, Route, Transport, Written

logger = logging.getLogger("pd_connector.transport.nixl")

_NOTE = struct.Struct("<IQ")  # slot, bytes; the header follows
_MAX_HEADER_BYTES = 1 << 16
_BACKEND = "UCX"
_MEMORY = "DRAM"


class _Address(msgspec.Struct, frozen=True, array_like=True):
    name: str
    metadata: bytes
    base: int  # address of the landing slab in its process
    slots: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    slot_bytes: int


@dataclass(slots=True)
class _Agent:
    """A NIXL agent with one registered slab."""

    nixl: Any
    registered: Any

    def close(self) -> None:
        """Destroy it. All handles of transfers must have been released."""
        self.nixl.deregister_memory(self.registered)
        self.registered = None
        self.nixl = None


@dataclass(slots=True)
class _Consumer:
    agent: _Agent
    remote: str
    address: _Address

    def start(self, source: int, target: int, nbytes: int, note: bytes) -> Any:
        """Start a write between two addresses; returns its handle. Raises what NIXL raises."""
        nixl = self.agent.nixl
        handle = nixl.initialize_xfer(
            "WRITE",
            nixl.get_xfer_descs([(source, nbytes, 0)], _MEMORY),
            nixl.get_xfer_descs([(target, nbytes, 0)], _MEMORY),
            self.remote,
            note,
            [_BACKEND],
        )
        try:
            state = nixl.transfer(handle)
        except Exception:
            handle.release()
            raise
        if state == "ERR":
            handle.release()
            raise TransportError("posting failed")
        return handle


class NixlTransport(Transport):
    """See the module.

    Args:
        landing: slab that peers write into.
        sending: slab that all payloads given to `write` lie in.
        host: what this engine listens on; UCX is kept to loopback if that is loopback.
    """

    name = "nixl"
    one_sided = True

    def __init__(self, landing: Slab, sending: Slab, host: str = "127.0.0.1") -> None:
        self._landing = landing
        self._sending = sending
        self._host = host
        # Peers are believed by this name, so it must not be guessed.
        self._name = f"pd-{secrets.token_hex(16)}"
        self._numbers = itertools.count(1)  # of writes, routes and sources
        self._written: list[Written] = []
        self._writes: dict[int, tuple[int, Any]] = {}  # token: route, handle
        self._routes: dict[int, _Consumer] = {}
        self._expected: dict[int, str] = {}
        self._api = _import_api()
        self._receiver = self._make_agent(self._name, landing)
        self._address = _Address(
            self._name,
            self._receiver.nixl.get_agent_metadata(),
            landing.address,
            landing.slots,
            landing.slot_bytes,
        )

    def address(self) -> bytes:
        return msgspec.msgpack.encode(self._address)

    def connect(self, consumer: bytes) -> Route:
        address = _read_address(consumer)
        route = next(self._numbers)
        agent = self._make_agent(f"{self._name}/{route}", self._sending)
        try:
            remote = agent.nixl.add_remote_agent(address.metadata).decode()
        except Exception as error:
            agent.close()
            raise TransportError(f"nixl cannot reach the consumer: {error!r}") from error
        self._routes[route] = _Consumer(agent, remote, address)
        return route

    def disconnect(self, route: Route) -> None:
        assert isinstance(route, int)
        consumer = self._routes.pop(route, None)
        if consumer is None:
            return
        for token in [t for t, (its_route, _) in self._writes.items() if its_route == route]:
            self._end(token, "nixl write: the consumer was disconnected")
        consumer.agent.close()

    def expect(self, producer: bytes) -> Hashable:
        source = next(self._numbers)
        self._expected[source] = _read_address(producer).name
        return source

    def dismiss(self, source: Hashable) -> None:
        assert isinstance(source, int)
        self._expected.pop(source, None)

    def write(self, route: Route, header: bytes, payload: memoryview, slot: int) -> int:
        assert isinstance(route, int)
        consumer = self._routes.get(route)
        if consumer is None:
            raise TransportError("nixl transport: no such consumer (any more)")
        landing = consumer.address
        if slot >= landing.slots or payload.nbytes > landing.slot_bytes:
            raise TransportError(
                f"nixl: slot {slot} and {payload.nbytes} bytes; the consumer has {landing.slots} "
                f"slots of {landing.slot_bytes} bytes"
            )
        if len(header) > _MAX_HEADER_BYTES:
            raise TransportError(
                f"nixl: header of {len(header)} bytes, at most {_MAX_HEADER_BYTES}"
            )
        source = self._source(payload)
        target = landing.base + slot * landing.slot_bytes
        try:
            note = _NOTE.pack(slot, payload.nbytes) + header
            handle = consumer.start(source, target, payload.nbytes, note)
        except Exception as error:  # NIXL's exceptions have no common base
            raise TransportError(f"nixl write cannot start: {error!r}") from error
        token = next(self._numbers)
        self._writes[token] = route, handle
        return token

    def poll(self) -> tuple[list[Written], list[Landed]]:
        for token, (route, handle) in list(self._writes.items()):
            try:
                state = self._routes[route].agent.nixl.check_xfer_state(handle)
            except Exception as error:
                self._end(token, f"nixl write: {error!r}")
                continue
            if state != "PROC":
                self._end(token, "" if state == "DONE" else "nixl write failed")
        written, self._written = self._written, []
        return written, self._take_notes()

    @property
    def pollables(self) -> list[object]:
        return []

    @property
    def restless(self) -> bool:
        # NIXL's own progress thread would spin on one core for ever.
        return bool(self._writes or self._expected)

    def close(self) -> None:
        for route in list(self._routes):
            self.disconnect(route)
        self._expected.clear()
        if self._receiver.nixl is not None:
            self._receiver.close()

    def _make_agent(self, name: str, slab: Slab) -> _Agent:
        options = {"engine_config": "NET_DEVICES=lo"} if is_loopback(self._host) else {}
        try:
            settings = self._api.nixl_agent_config(enable_prog_thread=False, backends=[])
            agent = self._api.nixl_agent(name, settings)
            agent.create_backend(_BACKEND, options)
            region = [(slab.address, slab.nbytes, 0, "")]
            return _Agent(agent, agent.register_memory(region, _MEMORY, [_BACKEND]))
        except Exception as error:
            raise TransportError(
                f"nixl agent with backend {_BACKEND} cannot be made: {error!r}; "
                "`pd-connector doctor` shows UCX's devices"
            ) from error

    def _source(self, payload: memoryview) -> int:
        address = int(np.frombuffer(payload, dtype=np.uint8).ctypes.data)
        inside = address - self._sending.address
        if not 0 <= inside <= self._sending.nbytes - payload.nbytes:
            raise TransportError("nixl: the payload does not lie in the sending slab")
        return address

    def _end(self, token: int, problem: str) -> None:
        _, handle = self._writes.pop(token)
        try:
            handle.release()
        except Exception as error:
            logger.warning("nixl does not release a transfer: %r", error)
        self._written.append(Written(token, not problem, problem))

    def _take_notes(self) -> list[Landed]:
        try:
            notes = self._receiver.nixl.get_new_notifs([_BACKEND])
        except Exception as error:  # such as a sender's name that is no text
            logger.warning("nixl notifications lost: %r", error)
            return []
        believed = set(self._expected.values())
        landed: list[Landed] = []
        for sender, its_notes in notes.items():
            if sender.rpartition("/")[0] in believed:
                landed += [arrival for note in its_notes if (arrival := self._read_note(note))]
        return landed

    def _read_note(self, note: bytes) -> Landed | None:
        if not _NOTE.size <= len(note) <= _NOTE.size + _MAX_HEADER_BYTES:
            return None
        slot, nbytes = _NOTE.unpack_from(note)
        if slot >= self._landing.slots or nbytes > self._landing.slot_bytes:
            return None
        return Landed(note[_NOTE.size :], slot, self._landing.slot(slot, nbytes))


def _import_api() -> Any:
    try:
        from nixl import _api
    except ImportError as error:
        raise TransportError(
            f"transport nixl: {error}. Install it with `pip install 'pd-connector[nixl]'`, or "
            "take it out of the config key transports"
        ) from error
    if "NIXL_LOG_LEVEL" not in os.environ:  # it tells of every agent, on standard output
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return _api


def _read_address(address: bytes) -> _Address:
    try:
        return msgspec.msgpack.decode(address, type=_Address)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TransportError(f"nixl address of a peer cannot be read: {error}") from None
