# SPDX-License-Identifier: Apache-2.0
"""What the values of a config must be, one by one and together. What they mean is in `config`.

Every error names the config key, the value found, and what to do.
"""

import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pd_connector.errors import ConfigError
from pd_connector.hosts import is_peer_entry, port_range

MIN_KEY_CHARACTERS = 32
MIN_DISTINCT_CHARACTERS = 8
MAX_SLOTS = 4096
"""The most slots that one message of the control channel can grant."""
PYTHON_SWITCH_MS = 5.0
"""Python's own `sys.getswitchinterval()`."""
_MAX_SLOT_MIB = 4095
"""A transport states a payload's length in 32 bits."""
_LEAST_S, _MOST_S = 0.001, 1e6
"""Operating systems and libraries count time in milliseconds of 31 bits."""
_LEAST_SWITCH_MS = 0.05
"""Below this, threads mostly switch."""


class _Rule(NamedTuple):
    """The rule for one value. `holds` returns whether a value keeps it; `required` is its text for
    the error."""

    name: str
    holds: Callable[[Any], bool]
    required: str


def _within(name: str, least: float, most: float, unit: str = "") -> _Rule:
    required = f"must be from {least:g} to {most:.7g}{unit}"
    return _Rule(name, lambda value: least <= value <= most, required)


_RULES = (
    _Rule("model_id", lambda text: len(text) <= 256, "must have 256 characters at most"),
    _Rule(
        "model_id",
        lambda text: not any(unicodedata.category(each) in ("Cc", "Cs") for each in text),
        "must be text without control characters",
    ),
    _Rule(
        "audit",
        lambda audit: isinstance(audit, str) or 0 < audit <= 1,
        "must be `first`, `off`, or a share of requests up to 1",
    ),
    _Rule(
        "lease_share",
        lambda share: 0 < share <= 1,
        "must be a share of the cache, above 0 and at most 1",
    ),
    _within("slots", 1, MAX_SLOTS),
    _within("slot_mib", 1, _MAX_SLOT_MIB),
    _within("switch_interval_ms", _LEAST_SWITCH_MS, PYTHON_SWITCH_MS, ", Python's own"),
)


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError if it has a key twice: JSON's readers take the last one without a word."""
    values = dict[str, Any]()
    for name, value in pairs:
        if name in values:
            raise ValueError(f"key {name!r} is there twice: leave one out")
        values[name] = value
    return values


JSON = json.JSONDecoder(object_pairs_hook=_each_once)
"""Reads JSON that people write. A key that an object has twice is a ValueError, as what is not JSON."""


def wrong(name: str, value: object, required: str) -> ConfigError:
    """The error about one value."""
    shown = repr(value) if isinstance(value, str) and not value.isprintable() else value
    return ConfigError(f"{name} {shown}: {required} (config key {name})")


def value_problems(values: Mapping[str, Any]) -> Iterator[ConfigError]:
    """An error for each number, text and port that cannot work, alone or beside the others."""
    seconds = [_within(name, _LEAST_S, _MOST_S, " seconds") for name in values if name[-2:] == "_s"]
    for name, holds, required in (*_RULES, *seconds):
        if not holds(values[name]):
            yield wrong(name, values[name], required)
    for name in ("session_timeout_s", "lease_s", "agent_timeout_s"):
        if values[name] < 2 * values["heartbeat_s"]:
            required = f"must be at least twice heartbeat_s ({values['heartbeat_s']})"
            reason = "or one late heartbeat ends a healthy session"
            yield wrong(name, values[name], f"{required}, {reason}")
    for entry in values["peers"]:
        if not is_peer_entry(entry):
            required = f"{entry!r} must be a network such as 10.0.0.0/8, an address or a name"
            yield wrong("peers", values["peers"], required)
    yield from _port_problems(values["control_port"], values["data_port"])


def _port_problems(control: int | str, data: int | str) -> Iterator[ConfigError]:
    ports = list[range]()
    for name, value in (("control_port", control), ("data_port", data)):
        try:
            ports.append(port_range(value))
        except ValueError as error:
            yield wrong(name, value, str(error))
    if len(ports) == 2 and ports[0] != range(1) and set(ports[0]) & set(ports[1]):
        yield wrong("data_port", data, f"must share no port with control_port ({control})")


def key_problems(key: str, variable: str) -> Iterator[ConfigError]:
    """An error for a key that cannot be used or could be guessed.

    Args:
        variable: the environment variable that sets the key.
    """
    remedy = f"(config key `key` or variable {variable})"
    try:
        key.encode()
    except UnicodeEncodeError:
        text = "key has bytes that are not UTF-8 text: `pd-connector key` makes a usable key"
        yield ConfigError(f"{text} {remedy}")
        return
    if key and (weak := weakness(key)):
        text = f"key {weak}: it could be guessed. `pd-connector key` makes a strong key"
        yield ConfigError(f"{text} {remedy}")


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
