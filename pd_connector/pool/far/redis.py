# SPDX-License-Identifier: Apache-2.0
"""Redis or Valkey: one server, or a cluster, with TLS and ACL.

    redis://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE][?cluster=1]
    rediss://...[?ca=FILE]     TLS, verified against the system's authorities, or those of FILE

Set `maxmemory` and `maxmemory-policy allkeys-lru` at the server: it evicts, the carrier does not.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qs, unquote

from pd_connector.errors import ConfigError
from pd_connector.pool.far.base import FarStore

if TYPE_CHECKING:
    import redis
else:
    try:
        import redis
    except ImportError:
        redis = None

_PORT = 6379
_PREFIX = "pd:"
_KNOWN = ("cluster", "ca")
_FULL_S = 1.0
"""A server that is full refuses an object only after it was sent. For this time, in seconds, it is sent no other one."""
_OTHER_NODES = "the cluster's other nodes, which it names itself"


class RedisStore(FarStore):
    """Names become keys `pd:NAME`, so an ACL can permit `~pd:*`. Commands: STRLEN, GET, SET, UNLINK."""

    package = "pd-connector[redis]"
    most_bytes = 512 << 20  # of a string

    @classmethod
    def problem(cls, address: SplitResult) -> str:
        if redis is None:
            return f"needs the package redis: pip install '{cls.package}'"
        if not address.hostname:
            return f"names no host: write {address.scheme}://HOST:{_PORT}"
        if (database := address.path.strip("/")) and not database.isdecimal():
            return f"/{database}: must be the number of a database, such as /0"
        given = parse_qs(address.query, keep_blank_values=True)
        if unknown := [name for name in given if name not in _KNOWN]:
            return f"?{unknown[0]}=: is not known; there are {', '.join(_KNOWN)}"
        if given.get("cluster", ["1"]) != ["1"]:
            return "?cluster=: must be 1, or be left out"
        if "cluster" in given and database not in ("", "0"):
            return f"/{database}: a cluster has database 0 only"
        if files := given.get("ca"):
            if address.scheme != "rediss":
                return "?ca=: needs rediss://, which is TLS"
            if not Path(files[0]).is_file():
                return f"?ca={files[0]}: there is no such file"
        return ""

    @classmethod
    def hosts(cls, address: SplitResult) -> list[str]:
        own = [address.hostname or ""]
        return [*own, _OTHER_NODES] if "cluster" in parse_qs(address.query) else own

    def __init__(self, address: SplitResult, deadline_s: float) -> None:
        if redis is None:
            raise ConfigError(f"needs the package redis: pip install '{self.package}'")
        given = parse_qs(address.query)
        settings: dict[str, Any] = {
            "host": address.hostname,
            "port": address.port or _PORT,
            "username": unquote(address.username) if address.username else None,
            "password": unquote(address.password) if address.password else None,
            "socket_timeout": deadline_s,
            "socket_connect_timeout": deadline_s,
            "protocol": 2,
        }
        if address.scheme == "rediss":
            settings |= {"ssl": True, "ssl_ca_certs": given.get("ca", [None])[0]}
        self._node_of: Callable[[str], str]
        if "cluster" in given:
            self._client: Any = redis.RedisCluster(**settings)
            self._node_of = lambda key: self._client.get_node_from_key(key).name
        else:
            settings["db"] = int(address.path.strip("/") or 0)
            self._client = redis.Redis(**settings)
            self._node_of = lambda key: ""
        self._client.ping()
        self._full_until_s: dict[str, float] = {}

    def has(self, names: Sequence[str]) -> list[int]:
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.strlen(_PREFIX + name)
        return [
            size if isinstance(size, int) else 0 for size in pipeline.execute(raise_on_error=False)
        ]

    def get(self, names: Sequence[str], buffers: Sequence[memoryview]) -> list[int]:
        read = []
        for name, buffer in zip(names, buffers, strict=True):
            # A stranger may have made it longer, or another kind of value: no more than the buffer is read.
            try:
                data = self._client.getrange(_PREFIX + name, 0, len(buffer))
            except redis.ResponseError:
                data = b""
            fits = len(data) <= len(buffer)
            if fits:
                buffer[: len(data)] = data
            read.append(len(data) if fits else 0)
        return read

    def put(self, names: Sequence[str], data: Sequence[memoryview]) -> list[bool]:
        return [self._kept(_PREFIX + name, each) for name, each in zip(names, data, strict=True)]

    def _kept(self, key: str, data: memoryview) -> bool:
        node = self._node_of(key)
        if time.monotonic() < self._full_until_s.get(node, 0.0):
            return False
        try:
            return bool(self._client.set(key, data))
        except redis.exceptions.OutOfMemoryError:  # it is full, and may not evict
            self._full_until_s[node] = time.monotonic() + _FULL_S
            return False
        except redis.ResponseError:  # this user may not write
            return False

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._client.unlink(_PREFIX + name)

    def close(self) -> None:
        self._client.close()
