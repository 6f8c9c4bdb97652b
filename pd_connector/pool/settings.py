# SPDX-License-Identifier: Apache-2.0
"""The value of the config key `pool`: which folders the pool uses, and how much of them.

Every error names the key, the value found, and what to do.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pd_connector.errors import ConfigError, did_you_mean
from pd_connector.pool.codecs import AT_REST, PoolCodecs
from pd_connector.pool.room import (
    Room,
    file_system,
    is_network,
    memory_rooms,
    own_bytes,
)
from pd_connector.pool.store.base import Store
from pd_connector.pool.store.entry import MOST_TENANT
from pd_connector.pool.store.folder import VERSION, private_folder
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.reaching import ReachingStore
from pd_connector.pool.store.tier_storage import Space

logger = logging.getLogger("pd_connector.pool")

SHM_VARIABLE = "PD_CONNECTOR_SHM"
"""The tmpfs in which the pool keeps chunks, if it is not `/dev/shm`: such as an `emptyDir` of medium `Memory`."""
KEYS = ("memory", "dir", "disk", "codec", "read", "write", "tenants")
LEAST_BYTES = 64 << 20
"""The smallest tier. A chunk of a large model has tens of MiB."""
DEFAULT_MEMORY_SHARE, DEFAULT_DISK_SHARE = 4, 2
"""Divisors of what the machine leaves."""
_UNITS = {"": 1, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])(i?)B\s*", re.IGNORECASE)


class PoolSettings(NamedTuple):
    """What one engine does with the pool, and where the pool is."""

    memory: Space
    disk: Space | None
    read: bool = True
    """Whether the engine uses chunks of the pool."""
    write: bool = True
    """Whether the engine saves chunks in it."""
    tenants: tuple[str, ...] = ()
    """Names that requests can give. Each has a part of the pool, and all other requests together have one."""

    def within(self, codecs: PoolCodecs) -> "PoolSettings":
        """These settings, without saves if the engine's KV may have passed in a codec whose error is too large."""
        if not self.write or codecs.passed in AT_REST:
            return self
        logger.warning(
            "pool: this engine does not save: it takes KV in %s, whose error is too large to keep that KV for other "
            "engines (config key codec: one of %s)",
            codecs.passed,
            ", ".join(AT_REST),
        )
        return self._replace(write=False)

    def open(self) -> Store:
        """Open the store. Raises ConfigError if a folder cannot be used."""
        make_above(self.memory.path)
        return ReachingStore(LocalStore(self.memory, self.disk), self.memory.path)

    def try_out(self) -> None:
        """Whether `open` would work. Raises ConfigError as `open` does, before an engine reads its weights."""
        make_above(self.memory.path)
        if os.path.isdir(self.memory.path):  # else no other engine uses it
            LocalStore(self.memory, self.disk, visits=True).close()


def memory_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of the memory tier of this user."""
    shm = Path(environment.get(SHM_VARIABLE) or "/dev/shm")
    return shm / f"pd_connector-{os.geteuid()}" / "pool"


def make_above(memory: Path) -> None:
    """Make the folder above a memory folder, if it is not there. Raises ConfigError if it is not this user's alone."""
    os.close(private_folder(memory.parent, SHM_VARIABLE))


def load(value: object, environment: Mapping[str, str] = os.environ) -> PoolSettings | None:
    """Read and check the value of the config key `pool`; None if it is false.

    Raises:
        ConfigError: an unknown key, a value that cannot be used, or more than there is.
    """
    given = check(value)
    if given is None:
        return None
    read, write = (given.get(name, True) is True for name in ("read", "write"))
    tenants = tuple(_tenants(given.get("tenants", [])))
    return PoolSettings(_memory(given, environment), _disk(given), read, write, tenants)


def check(value: object) -> Mapping[str, object] | None:
    """Check the value of the config key `pool` without looking at this machine. Returns its keys; None if it is false.

    Raises:
        ConfigError: an unknown key, or a value that cannot be used on any machine.
    """
    if value is False:
        return None
    if value is not True and not isinstance(value, Mapping):
        raise ConfigError(
            f'pool {value!r}: must be true, or an object such as {{"memory": "16GiB"}} (config key pool)'
        )
    given: Mapping[str, object] = {} if value is True else value
    if problems := list(_problems(given)):
        raise ConfigError(*problems)
    return given


def _problems(given: Mapping[str, object]) -> Iterator[str]:
    for name in given:
        if name not in KEYS:
            hint = did_you_mean(name, KEYS) or f"known keys: {', '.join(KEYS)}"
            yield f"unknown config key 'pool.{name}': {hint}"
    readers: dict[str, Callable[[object], object]] = {
        "read": partial(_switch, "read"),
        "write": partial(_switch, "write"),
        "memory": partial(_size, "memory"),
        "disk": partial(_size, "disk"),
        "dir": _folder,
        "tenants": _tenants,
    }
    for name, read in readers.items():
        if name in given:
            try:
                read(given[name])
            except ConfigError as error:
                yield str(error)
    if given.get("read") is False and given.get("write") is False:
        yield "pool.read false and pool.write false: the pool would not be used; leave out the config key pool"
    if "disk" in given and "dir" not in given:
        yield f"pool.disk {given['disk']!r}: needs the folder too: set pool.dir"
    if (codec := given.get("codec", AT_REST[0])) not in AT_REST:
        hint = did_you_mean(str(codec), AT_REST) or f"must be {' or '.join(AT_REST)}"
        yield f"pool.codec {codec!r}: {hint}. The error of other codecs is too large to keep KV in them (config key pool.codec)"


def _memory(given: Mapping[str, object], environment: Mapping[str, str]) -> Space:
    path = memory_folder(environment)
    shm = path.parents[1]
    if not shm.is_absolute():
        raise ConfigError(f"{shm}: must be the absolute path of a tmpfs (variable {SHM_VARIABLE})")
    kind = file_system(shm) if os.path.isdir(shm) else ""
    if kind not in ("tmpfs", "ramfs"):
        raise ConfigError(
            f"{shm}: is {kind or 'not there'}, not tmpfs: the pool keeps chunks in memory; mount a tmpfs there, or name "
            f"another in the variable {SHM_VARIABLE}"
        )
    rooms = memory_rooms(shm, own_bytes(path / VERSION))
    budget = rooms[0].nbytes // DEFAULT_MEMORY_SHARE
    if "memory" not in given:
        if budget < LEAST_BYTES:
            raise _too_much("pool", "true", LEAST_BYTES * DEFAULT_MEMORY_SHARE, rooms)
        return Space(path, budget, chosen=False)
    requested = _size("memory", given["memory"])
    if requested > rooms[0].nbytes:
        raise _too_much("pool.memory", given["memory"], requested, rooms)
    return Space(path, requested)


def _disk(given: Mapping[str, object]) -> Space | None:
    if "dir" not in given:
        return None
    named = given["dir"]
    path = _folder(named)
    kind = file_system(path)
    if is_network(kind):
        raise ConfigError(
            f"pool.dir {named!r}: is on a network file system ({kind}), on which locks and renames cannot be trusted, and "
            "other hosts may write: name a folder of a local disk (config key pool.dir)"
        )
    os.close(private_folder(path, "pool.dir"))
    left = os.statvfs(path)
    free = left.f_bavail * left.f_frsize + own_bytes(path / VERSION)
    room = Room(
        free, f"the file system of {path}", "free some of it, or name another folder in pool.dir"
    )
    budget = free // DEFAULT_DISK_SHARE
    if "disk" not in given:
        if budget < LEAST_BYTES:
            raise _too_much("pool.dir", named, LEAST_BYTES * DEFAULT_DISK_SHARE, [room])
        return Space(path, budget, chosen=False)
    requested = _size("disk", given["disk"])
    if requested > free:
        raise _too_much("pool.disk", given["disk"], requested, [room])
    return Space(path, requested)


def _folder(named: object) -> Path:
    """The path of a folder. Raises ConfigError."""
    path = Path(named) if isinstance(named, str) else Path()
    if not path.is_absolute():
        raise ConfigError(
            f"pool.dir {named!r}: must be the absolute path of a folder (config key pool.dir)"
        )
    return path


def _size(name: str, value: object) -> int:
    """Bytes of a size such as `16GiB`. Raises ConfigError."""
    nbytes = bytes_of(value)
    if nbytes is None:
        raise ConfigError(
            f'pool.{name} {value!r}: must be a size such as "16GiB" or "500GB" (config key pool.{name})'
        )
    if nbytes < LEAST_BYTES:
        raise ConfigError(
            f"pool.{name} {value!r}: must be {text_of(LEAST_BYTES)} or more, a chunk can have tens of MiB (config key pool.{name})"
        )
    return nbytes


def bytes_of(value: object) -> int | None:
    """Bytes of a size such as `16GiB`; None if it is not a size."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    number, unit, binary = match.groups()
    power = _UNITS[unit.upper()]
    nbytes = float(number) * (1 << power if binary else 1000 ** (power // 10))
    return int(nbytes) if nbytes < float("inf") else None


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"pool.{name} {value!r}: must be true or false (config key pool.{name})")
    return value


def _tenants(value: object) -> list[str]:
    if not isinstance(value, list) or not all(
        isinstance(name, str) and 0 < len(name) <= MOST_TENANT for name in value
    ):
        raise ConfigError(
            f"pool.tenants {value!r}: must be a list of names of 1 to {MOST_TENANT} characters, such as "
            '["team-a", "team-b"] (config key pool.tenants)'
        )
    return list(dict.fromkeys(value))


def _too_much(key: str, value: object, required: int, rooms: list[Room]) -> ConfigError:
    short = [room for room in rooms if room.nbytes < required]
    lacking = ", and ".join(f"{room.what} leaves {text_of(room.nbytes)}" for room in short)
    remedies = "; ".join(room.remedy for room in short)
    return ConfigError(
        f"{key} {value}: {text_of(required)} is wanted. {lacking}. Ask for less, or: {remedies} (config key {key})"
    )


def text_of(nbytes: int) -> str:
    """A size for people."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        size = 1 << _UNITS[unit[0]]
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}".replace(".0 ", " ")
    return f"{nbytes} bytes"
