# SPDX-License-Identifier: Apache-2.0
"""The settings of one engine's connector, as its operator writes them.

Every error names the config key, the value found, and what to do.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import msgspec

from pd_connector.config_rules import key_problems, value_problems, wrong
from pd_connector.errors import ConfigError, did_you_mean
from pd_connector.extensions import load_entry_points, unknown_name
from pd_connector.hosts import is_host, is_loopback, is_wildcard, matches

KEY_VARIABLE = "PD_CONNECTOR_KEY"
HOST_VARIABLE = "PD_CONNECTOR_HOST"
CONFIG_VARIABLE = "PD_CONNECTOR_CONFIG"
"""An engine without an argument for config keys reads them here: a JSON object, or `@` and the path of a
file that holds one."""
LOOPBACK = ("127.0.0.0/8", "::1", "localhost")

TRANSPORTS = ("shm", "tcp", "nixl", "ucx")
AUTO = "auto"
"""Stands for the transports that are fastest here, see `transport/choice.py`."""
TRANSPORT_GROUP = "pd_connector.transports"
"""The entry points by which other packages add transports (`transport/registry.py`)."""
CODECS = ("auto", "fp8_e4m3", "int8", "raw")
CODEC_GROUP = "pd_connector.codecs"
"""The entry points by which other packages add codecs (`kv/coding.py`)."""


_WITHOUT_EFFECT = {
    "weights": "all bytes of the weights are read now, and it has no effect: remove it"
}
"""Keys of the release before, which later ones refuse."""

logger = logging.getLogger("pd_connector.config")


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one engine's connector. Every field has a default that works on one machine."""

    host: str = "127.0.0.1"
    """Name or address at which this engine listens and peers reach it."""
    key: str = ""
    """Secret that all engines share, at least 32 characters; `pd-connector key` makes one. It authenticates and
    encrypts the control channel and the `tcp` transport. Set it in the variable PD_CONNECTOR_KEY rather than here."""
    peers: tuple[str, ...] = LOOPBACK
    """Producers that may be dialled although their address is not sealed with the key: networks, addresses and
    names (`*.` stands for any part before a dot). With a key, `load` sets none by default: every engine seals
    its address, and with such an entry a client could make this engine dial ports of this machine."""
    control_port: int | str = 0
    """Port on which consumers reach a producer, or a range such as `"7100-7107"`, of which each rank of this host takes
    a free one. 0: the system chooses."""
    data_port: int | str = 0
    """The same for the data of the transport `tcp`. `nixl` and `ucx` choose ports themselves."""
    insecure: bool = False
    """Allow addresses other than loopback without a key. KV is then plaintext, open to all."""
    transports: tuple[str, ...] = (AUTO,)
    """Transports this engine offers, best first. The producer takes the first of its own that reaches the
    consumer. `shm` reaches processes of the same user on the same machine. `tcp` needs no other package.
    `nixl` and `ucx` need the extra of that name. `"auto"` stands for `shm`, then `nixl` if this machine has
    RDMA or NVLink to others and `insecure_data` is set, then `tcp`."""
    insecure_data: bool = False
    """Whether `transports: auto` may take `nixl`, which sends KV in plaintext. Set it if the network between
    the engines is trusted."""
    model_id: str = ""
    """The operator's own name for the model and its weights. If both engines have one, the names must be equal.
    Needed if the weights are not files on disk but, for example, in an object store."""
    audit: Literal["first", "off"] | float = "first"
    """Which prompts a consumer computes itself, to compare the KV with the producer's: the first of each
    producer and adapter (`first`), also a share of the later ones (a number such as 0.001), or none (`off`)."""
    codec: str = "raw"
    """How KV is coded on the wire, if both sides permit it; `raw` is always permitted. `auto` takes the codec
    with the fewest bytes and an error of 2 % at most, or `raw` if measurements show that KV arrives faster with it.
    The decode side's setting counts."""
    codec_max_error: ClassVar[float] = 0.02
    """Largest relative error of the attention output that `codec: auto` accepts. Between the bounds of `int8` (0.02) and
    of `fp8_e4m3` (0.10) no other value would change anything. To permit `fp8_e4m3`, name it in `codec`."""
    overlap: Literal["auto", "off", "step", "layer"] = "auto"
    """When KV of a running prefill is sent. `off`: after its end. `step`: after each step of a chunked prefill.
    `layer`: also within a step, as layers are computed; full CUDA graphs become piecewise ones. `auto`: within
    a step if that pays and no CUDA graph hides the layers."""
    direction: Literal["auto", "write", "read"] = "auto"
    """Which side moves chunks, if the transport can do both. `write`: the producer writes into the consumer's slots.
    `read`: the consumer reads from the producer's slots. `auto`: the faster way on the transport. The producer's
    setting counts."""
    defer_pages: bool = True
    """Whether a decode engine waits with the pages of a prompt until its KV begins to arrive."""
    on_failure: Literal["recompute", "fail"] = "recompute"
    """What happens to a request whose KV did not arrive: it is computed here, or it fails."""
    slot_mib: int = 16
    """Size of one slot in MiB, the limit of a chunk. On a slow link chunks are smaller."""
    slots: int = 16
    """Landing slots of a consumer, and send slots of a producer."""
    slot_memory: Literal["auto", "host", "device"] = "auto"
    """Where slots lie if the cache is on a GPU. `host`: in pinned host memory. `device`: also on the GPU, for
    transports that reach device memory (`nixl`); the engine does not start if that is impossible. `auto`: on
    the GPU if possible."""
    lease_s: float = 30.0
    """How long a producer keeps pages without a heartbeat from their consumer, in seconds."""
    lease_share: float = 0.8
    """The share of a producer's cache that may be leased. Above it the oldest leases end, if no consumer has
    begun to fetch them or has room for them."""
    heartbeat_s: float = 1.0
    """Time between two heartbeats of a consumer, in seconds. Heartbeats extend leases."""
    idle_timeout_s: ClassVar[float] = 300.0
    """How long a consumer keeps a session without a request for it, in seconds. A session costs two sockets and a
    heartbeat; a new one costs a handshake of milliseconds."""
    session_timeout_s: float = 10.0
    """Silence of a peer after which its session counts as lost, in seconds."""
    connect_timeout_s: float = 5.0
    """Longest time to reach a producer and complete the handshake, in seconds."""
    stall_timeout_s: float = 10.0
    """Longest pause between two chunks of one transfer, in seconds."""
    engine_timeout_s: float = 60.0
    """How long a consumer waits for a prefill while the producer's engine computes no step, in seconds."""
    agent_timeout_s: float = 10.0
    """Silence of an engine's own agent thread after which the engine gives the agent up, in seconds."""
    switch_interval_ms: float = 0.5
    """How long another thread of the engine's process may keep Python's lock (GIL) while the connector's own
    thread waits for it, in milliseconds. Python's default of 5 would slow transfers if the engine's loop is
    Python. The setting holds for the whole process. It lowers the interval, never raises it."""
    address_file: str = ""
    """File in which a vLLM engine writes its address at its start: the JSON object of `remote_*` fields that
    decode requests need. For programs that introduce engines to each other without a request."""
    pool: bool | dict[str, Any] = False
    """The KV pool of this host: `true`, or an object with `memory` and `disk` (sizes such as `16GiB`), `dir` (a folder
    on a disk), `codec` (`raw` or `int8`, in which chunks are kept), `read`, `write`, and
    `tenants` (names). Engines of this user with a pool share it. See docs/pool.md."""
    wait_timeout_s: float = 300.0
    """Longest wait for a prefill that was announced but has not ended, in seconds."""

    @classmethod
    def load(
        cls,
        extra: Mapping[str, Any],
        environment: Mapping[str, str] = os.environ,
        host_variable: str = "",
    ) -> "Config":
        """Read and check a config. Environment variables fill in what `extra` leaves out.

        Args:
            host_variable: the engine's own variable for the address of this host. It counts if nothing else
                names a host and the config permits other addresses than loopback.

        Raises:
            ConfigError: unknown keys, wrong types, or values that contradict each other. The error lists all problems;
                but if a value has a wrong type, the other values are not checked.
        """
        for name in extra:
            if name in _WITHOUT_EFFECT:
                logger.warning("config key %s: %s", name, _WITHOUT_EFFECT[name])
        extra = {name: value for name, value in extra.items() if name not in _WITHOUT_EFFECT}
        unknown = [name for name in extra if name not in cls.__struct_fields__]
        problems = [_unknown_key(name, cls.__struct_fields__) for name in unknown]
        values = {name: value for name, value in extra.items() if name not in unknown}
        if values.get("transports") == AUTO:
            values["transports"] = (AUTO,)
        for name, variable in (("key", KEY_VARIABLE), ("host", HOST_VARIABLE)):
            if name not in values and environment.get(variable):
                values[name] = environment[variable]
            if isinstance(text := values.get(name), str):
                values[name] = text.strip()  # a file or a secret often ends with a line break
        if "host" not in values:
            # Without a key this host would be refused, although engines on one machine need no key.
            open_to_others = bool(values.get("key")) or values.get("insecure") is True
            engine_host = environment.get(host_variable, "")
            if open_to_others and not is_wildcard(engine_host):
                values["host"] = engine_host
        if values.get("key"):
            values.setdefault("peers", ())
        if ill_typed := list(cls._ill_typed_in(values)):
            raise ConfigError(*problems, *ill_typed)
        config = msgspec.convert(values, cls)
        if problems := [*problems, *map(str, config._problems())]:
            raise ConfigError(*problems)
        return config

    @classmethod
    def _ill_typed_in(cls, values: Mapping[str, Any]) -> Iterator[str]:
        """What is wrong with each value of a wrong type."""
        for name, value in values.items():
            try:
                msgspec.convert({name: value}, cls)
            except msgspec.ValidationError as error:
                yield _ill_typed(values, str(error))

    def __repr__(self) -> str:
        """All settings but the key, which must not reach logs and error texts."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["key"] = "***" if self.key else ""
        return f"Config({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def slot_bytes(self) -> int:
        return self.slot_mib << 20

    @property
    def given_up_lease_s(self) -> float:
        """How long pages stay leased whose consumer has refused them, in seconds. Usually no other consumer comes. One that
        waits extends the lease with each heartbeat."""
        return 2 * self.heartbeat_s

    @property
    def audit_share(self) -> float:
        """The share of requests that are audited after their producer has passed."""
        return 0.0 if isinstance(self.audit, str) else self.audit

    def permits(self, host: str) -> bool:
        """Whether this config allows binding or dialling `host`."""
        return bool(self.key) or self.insecure or is_loopback(host)

    def is_peer(self, host: str) -> bool:
        """Whether `host` is within `peers`. Names are not looked up."""
        return any(matches(host, entry) for entry in self.peers)

    def _problems(self) -> Iterator[ConfigError]:
        yield from key_problems(self.key, KEY_VARIABLE)
        yield from value_problems({name: getattr(self, name) for name in self.__struct_fields__})
        yield from self._host_problems()
        yield from self._transport_problems()
        if self.codec not in CODECS and self.codec not in load_entry_points(CODEC_GROUP):
            yield unknown_name("codec", self.codec, CODECS, CODEC_GROUP, "codec")

    def _host_problems(self) -> Iterator[ConfigError]:
        if is_wildcard(self.host):
            required = (
                "must be the name or address under which peers reach this engine, not a wildcard"
            )
            yield wrong("host", self.host, required)
        elif not is_host(self.host):
            required = "must be a name or an address alone, without scheme and port"
            yield wrong("host", self.host, required)
        elif not self.permits(self.host):
            yield ConfigError(
                f"host {self.host!r} without a key: only loopback addresses are allowed then. "
                f"Set {KEY_VARIABLE} to the same secret on every engine (`pd-connector key` makes "
                "one), or set `insecure: true` if the network is trusted"
            )

    def _transport_problems(self) -> Iterator[ConfigError]:
        names = list(self.transports)
        if not names:
            yield wrong("transports", names, 'must name at least one, such as ["tcp"]')
        if AUTO in names and len(names) > 1:
            yield wrong(
                "transports", names, f"`{AUTO}` must be the only item: it chooses all of them"
            )
        for name in names:
            if name not in (*TRANSPORTS, AUTO) and name not in load_entry_points(TRANSPORT_GROUP):
                yield unknown_name("transport", name, TRANSPORTS, TRANSPORT_GROUP, "transports")
        if len(set(names)) < len(names):
            yield wrong("transports", names, "must name each one once")


def _unknown_key(name: str, names: tuple[str, ...]) -> str:
    hint = did_you_mean(name, names) or f"known keys: {', '.join(names)}"
    return f"unknown config key {name!r}: {hint}"


def _ill_typed(values: Mapping[str, Any], reason: str) -> str:
    path = reason.rpartition("at `$.")[2].rstrip("`") if "at `$." in reason else ""
    name = path.split("[")[0]
    required = _choices(name, values.get(name)) or reason.partition(" - at")[0]
    subject = name if name == "key" else f"{name} {values[name]!r}" if name in values else "config"
    return f"{subject}: {required}{_rewritten(name, values.get(name), required)} (config key {name or '?'})"


def _choices(name: str, value: object) -> str:
    """The texts that a key accepts, and the text that was probably meant; "" for a key that accepts any text or no
    text."""
    hint = get_type_hints(Config).get(name)
    kinds = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
    words = [str(word) for kind in kinds for word in get_args(kind)]
    if not words:
        return ""
    number = " or a number" if float in get_args(hint) else ""
    required = f"must be {' or '.join(f'`{word}`' for word in words)}{number}"
    near = did_you_mean(value, words)
    return f"{near} It {required}" if near else required


def _rewritten(name: str, value: object, required: str) -> str:
    """How to write a value that is a text but must have another type; "" if that is unclear."""
    if not isinstance(value, str):
        return ""
    if required.startswith("Expected `array`"):
        return f": write [{msgspec.json.encode(value).decode()}]"
    with contextlib.suppress(msgspec.DecodeError):
        msgspec.convert({name: msgspec.json.decode(value)}, Config)
        return ": write it without quotes"
    return ""
