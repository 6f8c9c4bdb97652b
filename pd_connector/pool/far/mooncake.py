# SPDX-License-Identifier: Apache-2.0
"""Mooncake Store, through its own client.

    mooncake://MASTER[:PORT][?protocol=tcp|rdma][&devices=NAME,NAME][&host=ADDRESS][&admin=PORT]

The client lends no memory. It listens on all addresses without authentication, so Mooncake belongs into a closed network, and a
key is always needed. Objects are copied out of the client's memory before they are opened: others can write there.
"""

from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, parse_qs

from pd_connector.pool.far.base import FarStore
from pd_connector.pool.far.mooncake_client import (
    MISSING,
    PORT,
    MooncakeDistributedStore,
    new_client,
)

_ADMIN_PORT = 9003
"""Port of the master's HTTP server, unless it was started with another `--metrics_port`."""
_KNOWN = {"protocol": ("tcp", "rdma"), "devices": None, "host": None, "admin": None}
_BUFFER_BYTES = 256 << 20
"""Memory of the client through which objects pass. It is touched when it is needed."""
_PREFIX = "pd:"


class MooncakeStore(FarStore):
    """Names become keys `pd:NAME`. Existing objects are not overwritten: `put` reports them as stored, once they are complete."""

    package = "mooncake-transfer-engine (on a CPU: mooncake-transfer-engine-non-cuda)"
    most_bytes = _BUFFER_BYTES // 2

    @classmethod
    def problem(cls, address: SplitResult) -> str:
        if MooncakeDistributedStore is None:
            return (
                f"Mooncake's client cannot be imported ({MISSING}): pip install {cls.package}; if a library such as "
                "libibverbs.so.1 is missing, apt install libibverbs1 libnl-3-200 libnl-route-3-200"
            )
        if not address.hostname:
            return f"names no master: write mooncake://HOST:{PORT}"
        if address.path.strip("/") or address.username or address.password:
            return "has a path, user or password: Mooncake has none; write mooncake://HOST:PORT"
        for name, (value, *_) in parse_qs(address.query, keep_blank_values=True).items():
            if name not in _KNOWN:
                return f"?{name}=: is not known; there are {', '.join(_KNOWN)}"
            if (values := _KNOWN[name]) and value not in values:
                return f"?{name}={value}: must be {' or '.join(values)}"
            if name == "admin" and not (value.isdecimal() and 0 < int(value) < 1 << 16):
                return f"?admin={value}: must be the port of the master's HTTP server, such as {_ADMIN_PORT}"
        return ""

    @classmethod
    def admin_port(cls, address: SplitResult) -> int:
        """The port of the master's HTTP server."""
        return int(parse_qs(address.query).get("admin", [str(_ADMIN_PORT)])[0])

    @classmethod
    def hosts(cls, address: SplitResult) -> list[str]:
        return [address.hostname or "", "every address, on which Mooncake's client listens"]

    def __init__(self, address: SplitResult, deadline_s: float) -> None:
        self._client: Any = new_client(address, deadline_s, _BUFFER_BYTES)

    def has(self, names: Sequence[str]) -> list[int]:
        keys = [_PREFIX + name for name in names]
        there = self._client.batch_is_exist(keys)
        if any(answer < 0 for answer in there):
            raise ConnectionError(f"Mooncake's master answers {min(there)}")
        listed = [key for key, is_there in zip(keys, there, strict=True) if is_there]
        # One call for all of them: engines wait for look-ups.
        copies = self._client.batch_get_replica_desc(listed) if listed else {}
        in_memory = {key: whole_in_memory(copies.get(key, ())) for key in listed}
        sizes = {
            key: int(whole[0].size) if whole else max(0, self._client.get_size(key))
            for key, whole in in_memory.items()
        }
        return [sizes.get(key, 0) for key in keys]

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        read = []
        for name, buffer in zip(names, buffers, strict=True):
            handle = self._client.get_buffer(_PREFIX + name)
            size = handle.size() if handle is not None else 0
            if 0 < size <= len(buffer):
                with memoryview(handle) as data:
                    buffer[:size] = data.cast("B")
                read.append(size)
            else:
                read.append(0)
        return read

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        keys = [_PREFIX + name for name in names]
        taken = [self._client.put(key, each) == 0 for key, each in zip(keys, data, strict=True)]
        # It also answers 0 while another put of the object is unfinished. If that put's client has died, nothing is kept.
        there = self._client.batch_is_exist(keys)
        return [done and is_there > 0 for done, is_there in zip(taken, there, strict=True)]

    def remove(self, names: Sequence[str]) -> None:
        # By force: each object that was asked for has a lease.
        self._client.batch_remove([_PREFIX + name for name in names], True)

    def close(self) -> None:
        self._client.close()


def whole_in_memory(copies: Sequence[Any]) -> list[Any]:
    """Where the complete copies of an object are that are in memory, from Mooncake's replica descriptors."""
    return [
        copy.get_memory_descriptor().buffer_descriptor
        for copy in copies
        if copy.is_memory_replica() and copy.status.name == "COMPLETE"
    ]
