# SPDX-License-Identifier: Apache-2.0
"""What other installed packages add to this one, by Python's entry points. An entry point is a name, and the
object of a module for which the name stands. Each group of entry points is one kind of addition.

| group | one entry is |
|---|---|
| `pd_connector.transports` | a function that makes a transport (`transport/registry.py`) |
| `pd_connector.far_stores` | a store of several hosts behind the KV pool (`pool/far/base.py`) |
| `pd_connector.codecs` | a codec (`kv/coding.py`) |
| `pd_connector.commands` | a command of `pd-connector` |
| `pd_connector.benchmarks` | a command of `pd-connector bench` |
| `pd_connector.folders` | a kind of folder that `pd-connector check` knows: a function of its path, which gives findings, or None for another kind |
| `scheduler_plugins.policies` | a policy of the queue or of the router |
| `scheduler_plugins.roles` | a role policy of the router (`scheduler_plugins/router/roles/registry.py`) |
"""

import functools
import logging
import math
import threading
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from pd_connector.errors import ConfigError, did_you_mean


class Extension:
    """One entry point. The first `load` imports its module.

    Attributes:
        name: the user's word for it, as in a config.
        group: the kind of addition; see the module.
        source: the package that adds it, and the object there, for messages.
    """

    def __init__(self, name: str, group: str, points: Iterable[EntryPoint]) -> None:
        self.name = name
        self.group = group
        self._points = tuple(points)
        self.source = " and ".join(_source(point) for point in self._points)
        self._lock = threading.Lock()
        self._loaded: list[Any] = []

    def load(self) -> Any:
        """The object. Imported once; later calls return the same object.

        Raises:
            ConfigError: the module cannot be imported or has no such object, or two packages add different
                objects under this name.
        """
        with self._lock:
            if not self._loaded:
                self._loaded.append(self._import())
            return self._loaded[0]

    def make(self) -> Any:
        """A new object of the class that the entry point names.

        Raises:
            ConfigError: as `load`, or the class cannot be made without arguments.
        """
        made = self.load()
        try:
            return made()
        except Exception as error:  # another package's class can raise anything
            raise ConfigError(
                f"{self.name!r}, which {self.source} adds (entry point group {self.group}), cannot be "
                f"made without arguments: {error!r}"
            ) from error

    def _import(self) -> Any:
        if len(self._points) > 1:
            raise ConfigError(
                f"{self.name!r} is added by {self.source} (entry point group {self.group}): uninstall "
                "one of them"
            )
        try:
            return self._points[0].load()
        except Exception as error:  # another package's module can raise anything
            raise ConfigError(
                f"{self.name!r}, which {self.source} adds (entry point group {self.group}), cannot be "
                f"loaded: {error!r}. Repair or uninstall that package, or do not name {self.name!r}"
            ) from error


TELL_S = 60.0
"""Shortest time between two log lines about one kind of fault."""


class Faults:
    """Logs faults of another package's code while it is used. The caller continues without its result.

    Each kind of fault is logged at most once a minute, with the number of faults since. Each kind of exception is
    logged once with its traceback.
    """

    def __init__(self, logger: logging.Logger, instead: str) -> None:
        """`instead`: what happens instead, and what to do, for the log."""
        self._logger = logger
        self._instead = instead
        self._traced: set[type[BaseException]] = set()
        self._noted: dict[str, tuple[float, int]] = {}  # by kind: when, and faults since

    def note(self, kind: str, what: str, now_s: float, raised: BaseException | None = None) -> None:
        """Note one fault.

        Args:
            kind: a word, one of a few.
            what: a sentence without its end, for the log.
            now_s: the time on any clock that does not jump.
            raised: what the other package's code raised, if it did.
        """
        new = raised is not None and type(raised) not in self._traced
        told_s, since = self._noted.get(kind, (-math.inf, 0))
        if now_s < told_s + TELL_S and not new:
            self._noted[kind] = told_s, since + 1
            return
        if raised is not None:
            self._traced.add(type(raised))
        self._noted[kind] = now_s, 0
        more = f" ({since} more of this kind since the last line)" if since else ""
        trace = raised if new else None
        self._logger.error("%s; %s%s", what, self._instead, more, exc_info=trace)


@functools.cache
def load_entry_points(group: str) -> Mapping[str, Extension]:
    """The entry points of a group, by name. Reads the metadata of installed packages once per process, and
    imports none of the packages (see `Extension.load`)."""
    points: dict[str, dict[str, EntryPoint]] = {}
    for point in entry_points(group=group):
        points.setdefault(point.name, {}).setdefault(point.value, point)
    return MappingProxyType(
        {name: Extension(name, group, sources.values()) for name, sources in sorted(points.items())}
    )


def unknown_name(
    kind: str, name: str, own_names: Iterable[str], group: str, config_key: str
) -> ConfigError:
    """The error for a name that neither this package nor another package defines.

    Args:
        kind: what the name stands for, such as "transport".
        own_names: the names that this package defines; those of `group` are added.
        config_key: where the name was found.
    """
    names = dict.fromkeys([*own_names, *load_entry_points(group)])
    meant = did_you_mean(name, names)
    return ConfigError(
        f"{kind} {name!r} is not known: {meant + ' There' if meant else 'there'} are {', '.join(names)} (config key {config_key}); other packages "
        f"add one by an entry point of group {group}"
    )


def _source(point: EntryPoint) -> str:
    package = f"package {point.dist.name!r}" if point.dist else "a package"
    return f"{package} ({point.value})"
