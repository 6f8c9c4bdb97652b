# SPDX-License-Identifier: Apache-2.0
"""The settings of one engine's connector, as its operator writes them.

Every error names the config key, the value found, and what to do.
"""

import difflib
import os
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pd_connector.errors import ConfigError
from pd_connector.extensions import load_entry_points, unknown_name
from pd_connector.hosts import is_host, is_loopback, is_peer_entry, is_wildcard, matches

KEY_VARIABLE = "PD_CONNECTOR_KEY"
HOST_VARIABLE = "PD_CONNECTOR_HOST"
CONFIG_VARIABLE = "PD_CONNECTOR_CONFIG"
"""Where an engine has no argument for config keys: a JSON object of them, or `@` and the path of a
file that holds one."""
LOOPBACK = ("127.0.0.0/8", "::1", "localhost")
MIN_KEY_CHARACTERS = 32
MIN_DISTINCT_CHARACTERS = 8
MAX_SLOTS = 4096
"""The most slots that one message of the control channel can grant."""

MAX_SLOT_MIB = 4095
"""A transport says in 32 bits how many bytes come."""
LEAST_S, MOST_S = 0.001, 1e6
"""Operating systems and libraries count time in milliseconds of 31 bits."""
LEAST_SWITCH_MS, PYTHON_SWITCH_MS = 0.05, 5.0
"""Below the one, threads mostly switch; the other is Python's own `sys.getswitchinterval()`."""
MAX_MODEL_ID = 256
"""Characters of a `model_id`."""

TRANSPORTS = ("shm", "tcp", "nixl", "ucx")
AUTO = "auto"
"""Stands for the list of transports: those that are fastest here, see `transport/choice.py`."""
TRANSPORT_GROUP = "pd_connector.transports"
"""The entry points by which other packages add transports (`transport/registry.py`)."""
CODECS = ("auto", "fp8_e4m3", "int8", "raw")
CODEC_GROUP = "pd_connector.codecs"
"""The entry points by which other packages add codecs (`kv/coding.py`)."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one engine's connector. Every field has a default that works on one machine."""

    host: str = "127.0.0.1"
    """Name or address under which peers reach this engine, and on which it listens."""
    key: str = ""
    """Shared secret of all engines, of 32 characters at least; `pd-connector key` makes one. It authenticates and encrypts the
    control channel and the `tcp` transport. Better given in the variable PD_CONNECTOR_KEY."""
    peers: tuple[str, ...] = LOOPBACK
    """Networks, addresses and names (`*.` stands for any part before a dot) of producers that may be
    dialled although their address is not sealed with the key. With a key `load` sets none by default:
    every engine seals its address, and a client could have the ports of this machine dialled."""
    insecure: bool = False
    """Allow addresses other than loopback without a key: plaintext, open to anyone."""
    transports: tuple[str, ...] = (AUTO,)
    """Transports this engine offers, best first; the producer takes the first of its own that
    reaches the consumer. `shm` reaches processes of the same user on the same machine, `tcp`
    needs nothing else installed, `nixl` and `ucx` need the extra of that name. `"auto"` stands for
    `shm`, then `nixl` if this machine has RDMA or NVLink to others and `insecure_data` is set, then
    `tcp`."""
    insecure_data: bool = False
    """Whether `transports: auto` may take `nixl`, which sends KV in plaintext: the network between
    the engines is trusted with it."""
    model_id: str = ""
    """The operator's own name for the model and its weights. If both engines have one, it must be the
    same; needed where weights are not files on disk, such as those of an object store."""
    weights: Literal["sampled", "full"] = "sampled"
    """What of the weights on disk is compared: samples of every tensor, or all bytes (`full`), which
    are read once and remembered by file."""
    audit: Literal["first", "off"] | float = "first"
    """Which prompts a consumer computes itself although KV is there for them, to compare the two:
    the first of each producer and adapter, also a part of the later ones (such as 0.001), or none."""
    codec: str = "raw"
    """How KV is coded on the wire, if both sides permit it; `raw` is always permitted. `auto`
    takes the codec with the fewest bytes within `codec_max_error`, or `raw` where KV was measured
    to come faster so; the decode side's setting counts."""
    codec_max_error: float = 0.02
    """For `codec: auto`: the largest relative error of the attention output."""
    overlap: Literal["auto", "off", "step", "layer"] = "auto"
    """When KV of a running prefill is sent: `off` when it has ended, `step` after each step of a
    chunked prefill, `layer` also within a step, as layers are computed (full CUDA graphs become
    piecewise ones), `auto` within a step where it pays and no CUDA graph hides the layers."""
    direction: Literal["auto", "write", "read"] = "auto"
    """Whether a producer writes chunks into the consumer's slots, or the consumer reads them from
    the producer's, if the transport can. The producer's setting counts. `auto` takes what is
    faster on the transport."""
    defer_pages: bool = True
    """Whether a decode engine allocates pages for a prompt only when its KV begins to come."""
    on_failure: Literal["recompute", "fail"] = "recompute"
    """What happens to a request whose KV did not arrive: it is computed here, or it fails."""
    slot_mib: int = 16
    """Size of one slot, in MiB: the largest chunk. Chunks are smaller on a slow link."""
    slots: int = 16
    """Landing slots of a consumer, and send slots of a producer."""
    slot_memory: Literal["auto", "host", "device"] = "auto"
    """Where the slots of a cache on a GPU lie: in pinned `host` memory, or also on the `device`, for
    transports that reach it there (`nixl`). `auto` takes the device where that is possible; `device`
    ends the start where it is not."""
    lease_s: float = 30.0
    """How long a producer keeps pages without a heartbeat of their consumer, in seconds."""
    lease_share: float = 0.8
    """The part of a producer's cache that may be leased. If it is exceeded, the oldest leases that
    nobody has begun to fetch, or has room for, end."""
    heartbeat_s: float = 1.0
    """Time between two heartbeats of a consumer, in seconds. They extend leases."""
    idle_timeout_s: float = 300.0
    """How long a consumer keeps a session in which it wants nothing, in seconds."""
    session_timeout_s: float = 10.0
    """Silence after which a session counts as lost, in seconds."""
    connect_timeout_s: float = 5.0
    """Time to reach a producer and agree with it, in seconds."""
    stall_timeout_s: float = 10.0
    """Longest pause between two chunks of one transfer, in seconds."""
    engine_timeout_s: float = 60.0
    """How long a consumer waits for a prefill while the producer's engine makes no step, in
    seconds."""
    agent_timeout_s: float = 10.0
    """Silence of its own agent's thread after which an engine gives it up, in seconds."""
    switch_interval_ms: float = 0.5
    """How long another thread of the engine's process may keep Python's lock (GIL) while the connector's
    own thread waits for it, in milliseconds. Python's own 5 would slow transfers beside an engine whose
    loop is Python. It holds for the whole process, and is never raised."""
    address_file: str = ""
    """Where a vLLM engine writes its address when it has started, as the JSON object of `remote_*` fields
    that decode requests need: for whoever introduces engines to each other without a request."""
    wait_timeout_s: float = 300.0
    """Longest wait for a prefill that was announced but has not finished, in seconds."""

    @classmethod
    def load(
        cls,
        extra: Mapping[str, Any],
        environment: Mapping[str, str] = os.environ,
        host_variable: str = "",
    ) -> "Config":
        """Read and check a config; environment variables fill in what `extra` leaves out.

        Args:
            host_variable: the engine's own variable for the address of this host. It is taken where
                nothing else names a host, and other addresses than loopback are permitted.

        Raises:
            ConfigError: an unknown key, a wrong type, or values that cannot go together.
        """
        for name in extra:
            if name not in cls.__struct_fields__:
                raise ConfigError(_unknown_key(name, cls.__struct_fields__))
        values = dict(extra)
        if values.get("transports") == AUTO:
            values["transports"] = (AUTO,)
        for name, variable in (("key", KEY_VARIABLE), ("host", HOST_VARIABLE)):
            if name not in values and environment.get(variable):
                values[name] = environment[variable]
            if isinstance(text := values.get(name), str):
                values[name] = text.strip()  # of a file or a secret, often with the end of a line
        if "host" not in values:
            # Without a key it would be refused, where engines of one machine need none.
            open_to_others = bool(values.get("key")) or values.get("insecure") is True
            engine_host = environment.get(host_variable, "")
            if open_to_others and not is_wildcard(engine_host):
                values["host"] = engine_host
        if values.get("key"):
            values.setdefault("peers", ())
        try:
            config = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(_ill_typed(values, str(error))) from None
        config._check()
        return config

    def __repr__(self) -> str:
        """All settings but the key, which must not come into logs and error texts."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["key"] = "***" if self.key else ""
        return f"Config({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def slot_bytes(self) -> int:
        return self.slot_mib << 20

    @property
    def audit_share(self) -> float:
        """The part of requests that are audited although their producer has passed."""
        return 0.0 if isinstance(self.audit, str) else self.audit

    def permits(self, host: str) -> bool:
        """Whether this config allows binding or dialling `host`."""
        return bool(self.key) or self.insecure or is_loopback(host)

    def is_peer(self, host: str) -> bool:
        """Whether `host` is within `peers`. Names are not looked up."""
        return any(matches(host, entry) for entry in self.peers)

    def _check(self) -> None:
        try:
            self.key.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                "key has bytes that are no text (UTF-8): `pd-connector key` makes one without "
                f"(config key `key` or variable {KEY_VARIABLE})"
            ) from None
        if self.key and (weak := weakness(self.key)):
            raise ConfigError(
                f"key {weak}: it could be guessed. `pd-connector key` makes one that cannot "
                f"(config key `key` or variable {KEY_VARIABLE})"
            )
        for entry in self.peers:
            if not is_peer_entry(entry):
                raise self._wrong(
                    "peers", f"{entry!r} is no network such as 10.0.0.0/8, no address and no name"
                )
        if is_wildcard(self.host):
            raise ConfigError(
                f"host {self.host!r}: must be the name or address under which peers reach this "
                "engine, not a wildcard (config key host)"
            )
        if not is_host(self.host):
            raise self._wrong("host", "must be a name or an address alone, without scheme and port")
        if not self.permits(self.host):
            raise ConfigError(
                f"host {self.host!r} without a key: only loopback addresses are allowed then. "
                f"Set {KEY_VARIABLE} to the same secret on every engine (`pd-connector key` makes "
                "one), or set `insecure: true` if the network is trusted"
            )
        if not self.transports:
            raise ConfigError(
                'transports []: must name at least one, such as ["tcp"] (config key transports)'
            )
        if AUTO in self.transports and len(self.transports) > 1:
            raise self._wrong("transports", f"`{AUTO}` must stand alone: it chooses all of them")
        for name in self.transports:
            if name not in (*TRANSPORTS, AUTO) and name not in load_entry_points(TRANSPORT_GROUP):
                raise unknown_name("transport", name, TRANSPORTS, TRANSPORT_GROUP, "transports")
        if len(set(self.transports)) < len(self.transports):
            raise ConfigError(
                f"transports {list(self.transports)}: must name each one once "
                "(config key transports)"
            )
        if len(self.model_id) > MAX_MODEL_ID:
            raise self._wrong("model_id", f"must have {MAX_MODEL_ID} characters at most")
        if not isinstance(self.audit, str) and not 0 < self.audit <= 1:
            raise self._wrong("audit", "must be `first`, `off`, or a part of requests up to 1")
        for name in ("slot_mib", "slots"):
            if getattr(self, name) < 1:
                raise self._wrong(name, "must be 1 or more")
        if self.codec not in CODECS and self.codec not in load_entry_points(CODEC_GROUP):
            raise unknown_name("codec", self.codec, CODECS, CODEC_GROUP, "codec")
        if not 0 <= self.codec_max_error < float("inf"):
            raise self._wrong("codec_max_error", "must be a number from 0 on")
        if not 0 < self.lease_share <= 1:
            raise self._wrong("lease_share", "must be a part of the cache, above 0 and at most 1")
        for name, most in (("slots", MAX_SLOTS), ("slot_mib", MAX_SLOT_MIB)):
            if getattr(self, name) > most:
                raise self._wrong(name, f"must be {most} at most")
        for name in self.__struct_fields__:
            if name.endswith("_s") and not LEAST_S <= getattr(self, name) <= MOST_S:
                raise self._wrong(name, f"must be from {LEAST_S} to {MOST_S:.0f} seconds")
        if not LEAST_SWITCH_MS <= self.switch_interval_ms <= PYTHON_SWITCH_MS:
            wanted = f"must be from {LEAST_SWITCH_MS} to {PYTHON_SWITCH_MS:g}, Python's own"
            raise self._wrong("switch_interval_ms", wanted)
        for name in ("session_timeout_s", "lease_s", "agent_timeout_s"):
            if getattr(self, name) < 2 * self.heartbeat_s:
                raise self._wrong(
                    name,
                    f"must be at least twice heartbeat_s ({self.heartbeat_s}), or one late "
                    "heartbeat ends a healthy session",
                )

    def _wrong(self, name: str, wanted: str) -> ConfigError:
        return ConfigError(f"{name} {getattr(self, name)}: {wanted} (config key {name})")


def weakness(key: str) -> str:
    """Why this key can be guessed, or ""."""
    if len(key) < MIN_KEY_CHARACTERS:
        return f"of {len(key)} characters, must have at least {MIN_KEY_CHARACTERS}"
    distinct = len(set(key))
    if distinct < MIN_DISTINCT_CHARACTERS:
        return f"of {distinct} different characters, must have at least {MIN_DISTINCT_CHARACTERS}"
    if key in (key + key)[1:-1]:
        return "that repeats itself"
    return ""


def _unknown_key(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown config key {name!r}: {hint}"


def _ill_typed(values: Mapping[str, Any], reason: str) -> str:
    path = reason.rpartition("at `$.")[2].rstrip("`") if "at `$." in reason else ""
    name = path.split("[")[0]
    wanted = reason.partition(" - at")[0]
    found = name if name == "key" else f"{name} {values[name]!r}" if name in values else "config"
    return f"{found}: {wanted} (config key {name or '?'})"
