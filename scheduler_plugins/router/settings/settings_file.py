# SPDX-License-Identifier: Apache-2.0
"""The router's YAML file: engines, policies and limits. The router reads it again when it
changes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import msgspec

from pd_connector.errors import did_you_mean
from scheduler_plugins.qos.classes import ONLY, QosClass, default_class
from scheduler_plugins.qos.watched import Watched
from scheduler_plugins.qos.yaml_text import YamlText
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.registry import DEFAULT as DEFAULT_POLICY
from scheduler_plugins.router.settings.config import (
    COUNTS,
    SIDES,
    RouterConfig,
)
from scheduler_plugins.router.settings.elastic import (
    DEFAULT_GROUP,
    OFF,
    Bounds,
    Place,
    Route,
    sides_of,
)
from scheduler_plugins.router.settings.urls import base_url

AT_START = (
    "body_mib",
    "bodies_mib",
    "connections",
    "shutdown_timeout_s",
    "workers",
)
"""Limits that are read at the start only. A later change needs a restart."""


class SettingsError(ValueError):
    """The file cannot be used. The message names the file and the key."""


class EngineEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine."""

    url: str
    role: Literal["prefill", "decode", "both", "cpu_prefill", "ask"] = "ask"
    """Its side; `ask`: the router asks the engine."""
    events: str = ""
    """Endpoint of its KV events; empty: none, or the engine reports it."""
    replay: str = ""
    may: tuple[Literal["prefill", "decode", "both"], ...] = ()
    """Roles that the controller may give it; empty: it keeps its role."""
    group: str = DEFAULT_GROUP
    """Its group. Engines of a group serve the same requests, with one model."""

    def __post_init__(self) -> None:
        if not self.group:
            raise ValueError(
                f"group '': must be a name; leave it out for the group {DEFAULT_GROUP!r}"
            )


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    engines: tuple[EngineEntry, ...]
    policy: str | None = None
    decode_policy: str | None = None
    roles: str | bool | None = None
    """As the option `--roles`. YAML reads `off` and `on` as false and true."""
    groups: dict[str, Bounds] = {}
    start_command: str | tuple[str, ...] | None = None
    """As the option; a list needs no quotation marks."""
    stop_command: str | tuple[str, ...] | None = None
    days: str | None = None
    classes: tuple[QosClass, ...] = ONLY
    routes: tuple[Route, ...] = ()
    limits: dict[str, float] = {}


def parse(text: bytes, given: Mapping[str, Any], source: str) -> RouterConfig:
    """Read YAML.

    Args:
        given: settings of the command line; the file takes precedence.
        source: the file's name, for errors.

    Raises:
        SettingsError: the text is not YAML, has an unknown key, or a value that cannot be used.
    """
    written = YamlText(text, source)
    try:
        file = written.decode(_File)
    except (ValueError, RecursionError) as error:
        raise SettingsError(str(error)) from None
    try:
        named = {
            name: value
            for name in (
                "policy",
                "decode_policy",
                "roles",
                "start_command",
                "stop_command",
                "days",
            )
            if (value := getattr(file, name)) is not None
        }
        for name in ("start_command", "stop_command"):
            if isinstance(command := named.get(name), tuple):
                named[name] = shlex.join(command)
        if isinstance(file.roles, bool):
            named["roles"] = DEFAULT_POLICY if file.roles else OFF
        sides = {
            side: tuple(entry.url for entry in file.engines if side in sides_of(entry.role))
            for side in SIDES
        }
        events = {
            entry.url: (entry.events, entry.replay or None)
            for entry in file.engines
            if entry.events
        }
        return RouterConfig(
            **{
                **given,
                **named,
                **sides,
                **_limits(file.limits),
                "kv_events": events,
                "places": _places(file.engines),
                "groups": file.groups,
                "classes": file.classes,
                "routes": _with_class(file.routes, file.classes),
            }
        ).checked_here()
    except (ValueError, OverflowError) as error:
        raise SettingsError(written.wrong(error)) from None


class SettingsFile(Watched[RouterConfig]):
    """The settings file, watched for changes."""

    def __init__(self, path: Path, given: Mapping[str, Any]) -> None:
        """Read the file. Raises SettingsError if the file cannot be used, as `changed` does."""
        kept = dict(given)
        super().__init__(path, lambda text, source: parse(text, kept, source), SettingsError)


def _places(entries: Sequence[EngineEntry]) -> dict[str, Place]:
    """Allowed roles and groups, by URL. If all entries are plain, there are none.

    Raises:
        ValueError: two entries of one engine differ.
    """
    places = dict[str, Place]()
    if not any(each.may or each.group != DEFAULT_GROUP for each in entries):
        return places
    for entry in entries:
        place = Place(None, frozenset(map(Role, entry.may)), entry.group)
        if places.setdefault(base_url("engines", entry.url), place) != place:
            raise ValueError(
                f"engines '{entry.url}': two entries of it differ in may or group; write one entry with role both, or "
                "give both entries the same"
            )
    return places


def _with_class(routes: Sequence[Route], classes: Sequence[QosClass]) -> tuple[Route, ...]:
    """The routes. A route that names a group alone leads to the class that a request without a route has."""
    usual = default_class(classes).name if classes else ""
    return tuple(msgspec.structs.replace(route, qos=route.qos or usual) for route in routes)


def _limits(given: Mapping[str, float]) -> dict[str, float]:
    whole = {*COUNTS, "front_queue"}
    names = {
        setting.name for setting in fields(RouterConfig) if setting.name.endswith("_s")
    } | whole
    limits: dict[str, float] = {}
    for name, value in given.items():
        if name not in names:
            near = did_you_mean(name, names) or f"known are {', '.join(sorted(names))}"
            raise ValueError(f"limits: {name!r} is not a limit; {near}")
        if name in whole and value != int(value):
            raise ValueError(f"limits: {name} {value}: must be a whole number")
        limits[name] = int(value) if name in whole else float(value)
    return limits
