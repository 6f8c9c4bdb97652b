# SPDX-License-Identifier: Apache-2.0
"""The settings of roles: an engine's home, the roles that it may have, its group, and the policy that moves engines.

| name | what it is |
|---|---|
| `Place` | one engine's home, allowed roles and group |
| `Bounds` | the fewest and the most engines of each side of a group |
| `Moving` | which policy moves engines, and whether it only says so |
| `Route` | a rule that leads requests to a class and to a group |
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from scheduler_plugins.qos.rules import ClassRule
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.roles.registry import DEFAULT as DEFAULT_POLICY
from scheduler_plugins.router.roles.scaling import Limits

DEFAULT_GROUP = "default"
"""The group of engines that name none."""
MOVABLE = frozenset((Role.PREFILL, Role.DECODE, Role.BOTH))
"""Roles that an engine can change between."""
OFF, DRY_RUN = "off", "dry-run"


class Place(NamedTuple):
    """Where an engine belongs, by the settings."""

    home: Role | None = None  # None: the engine is asked
    may: frozenset[Role] = frozenset()
    """Roles that the controller may give it, without its home. Empty: the controller leaves it alone."""
    group: str = DEFAULT_GROUP


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fewest and most engines of each side of a group."""

    min_prefill: int = 1
    min_decode: int = 1
    max_prefill: int = 0
    """For role policies that start engines. 0: as `--max-prefill` says."""
    max_decode: int = 0
    unit_prefill: int = 0
    """Engines that come and go together with `unit_decode` others. 0: sides are scaled apart."""
    unit_decode: int = 0

    def __post_init__(self) -> None:
        for name in ("min_prefill", "min_decode"):
            if (count := getattr(self, name)) < 1:
                raise ValueError(f"{name} {count}: must be 1 or more")
        for name in ("max_prefill", "max_decode", "unit_prefill", "unit_decode"):
            if (count := getattr(self, name)) < 0:
                raise ValueError(f"{name} {count}: must be 1 or more, or 0 for none")
        if bool(self.unit_prefill) is not bool(self.unit_decode):
            raise ValueError(
                f"unit_prefill {self.unit_prefill}, unit_decode {self.unit_decode}: give both, or neither"
            )

    def limits(self, group: str, start_timeout_s: float) -> Limits:
        """For a role policy that starts engines.

        Raises:
            ValueError: naming the group, the bound, and what to do.
        """
        for side in ("prefill", "decode"):
            fewest, most = getattr(self, f"min_{side}"), getattr(self, f"max_{side}")
            if not most:
                raise ValueError(
                    f"groups: {group}: max_{side}: must be given, because the role policy starts engines; write the most "
                    f"that may run (--max-{side} N, or max_{side} in the file)"
                )
            if most < fewest:
                raise ValueError(
                    f"groups: {group}: max_{side} {most}: is below min_{side} {fewest}; raise it"
                )
        unit = {Role.PREFILL: self.unit_prefill, Role.DECODE: self.unit_decode}
        limits = Limits(
            {Role.PREFILL: self.min_prefill, Role.DECODE: self.min_decode},
            {Role.PREFILL: self.max_prefill, Role.DECODE: self.max_decode},
            unit if self.unit_prefill else {},
            start_timeout_s,
        )
        if self.unit_prefill and limits.units[0] > limits.units[1]:
            raise ValueError(
                f"groups: {group}: no number of units of {self.unit_prefill} prefill and {self.unit_decode} decode engines is "
                "within its bounds; raise max_prefill or max_decode"
            )
        return limits


class Moving(NamedTuple):
    """Which policy moves engines."""

    policy: str
    dry_run: bool  # its decisions are only logged and counted


class Route(ClassRule, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A rule of the router's file. Requests that match belong to a class, to a group, or to both."""

    qos: str = ""
    """The class; empty: the class of the lowest priority."""
    group: str = ""
    """The group whose engines serve the request; empty: the default group."""


def moving_of(text: str, *, elastic: bool) -> Moving | None:
    """Read the setting `roles`; None: no engine is moved.

    Args:
        text: a policy's name, `off`, `dry-run`, `dry-run:NAME`, or empty.
        elastic: whether any engine has `may`. If so, an empty text means the default policy.
    """
    if text == OFF or not (text or elastic):
        return None
    if text == DRY_RUN or text.startswith(f"{DRY_RUN}:"):
        return Moving(text.removeprefix(DRY_RUN).removeprefix(":") or DEFAULT_POLICY, True)
    return Moving(text or DEFAULT_POLICY, False)


def default_group(places: Iterable[Place]) -> str:
    """The group of requests without a route to a group: `default` if it has an engine, else the first engine's
    group."""
    groups = [place.group for place in places]
    return DEFAULT_GROUP if DEFAULT_GROUP in groups or not groups else groups[0]


def check_groups(
    bounds: Mapping[str, Bounds],
    routes: Iterable[ClassRule],
    places: Collection[Place],
    *,
    named: Collection[str],
    grows: bool = False,
) -> None:
    """Check groups against the engines.

    Args:
        places: places of all engines that have a URL of their own.
        named: groups that have names, which stand for an unknown number of engines.
        grows: whether engines are started, so that a group can have more than are listed.

    Raises:
        ValueError: a route or a bound names a group that no engine is in, a bound cannot be kept, or a group has no
            engine that can decode.
    """
    group_names = sorted({place.group for place in places} | set(named))
    for n, route in enumerate(routes):
        group = getattr(route, "group", "")
        if group and group not in group_names:
            raise ValueError(
                f"routes[{n}]: group {group!r} has no engine; groups are {', '.join(group_names)}"
            )
    for group, bound in bounds.items():
        if group not in group_names:
            raise ValueError(
                f"groups: {group!r} has no engine; give an engine `group: {group}`, or take it out"
            )
        if group not in named and not grows:
            _check_bound(group, bound, [place for place in places if place.group == group])
    for group in set(group_names) - set(named):
        if not any(_able(place, Role.DECODE) for place in places if place.group == group):
            raise ValueError(
                f"groups: no engine of group '{group}' can decode; give it a decode engine, or its engines another group"
            )


def _check_bound(group: str, bound: Bounds, places: Collection[Place]) -> None:
    for side, fewest in ((Role.PREFILL, bound.min_prefill), (Role.DECODE, bound.min_decode)):
        able = sum(_able(place, side) for place in places)
        if able < fewest:
            raise ValueError(
                f"groups: {group}: min_{side} {fewest}: only {able} of its engines can {side}; "
                "lower it, or give more engines `may`"
            )
    flexible = sum(place.home is None or Role.BOTH in _all(place) for place in places)
    if bound.min_prefill + bound.min_decode > len(places) + flexible:
        raise ValueError(
            f"groups: {group}: min_prefill {bound.min_prefill} and min_decode {bound.min_decode} need more than its "
            f"{len(places)} engines; lower one"
        )


def _able(place: Place, side: Role) -> bool:
    """Whether the engine may serve this side, or is asked for its side."""
    return place.home is None or bool({side, Role.BOTH} & _all(place))


def _all(place: Place) -> frozenset[Role]:
    return place.may | ({place.home} if place.home else frozenset())


def sides_of(role: str) -> tuple[str, ...]:
    """The settings that list an engine of this role. `role` is the word of the settings file and the admin API."""
    return {"ask": ("engine",), "both": ("prefill", "decode")}.get(role, (role,))
