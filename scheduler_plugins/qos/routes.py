# SPDX-License-Identifier: Apache-2.0
"""Which class a request belongs to, by its headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from scheduler_plugins.qos.classes import QosClass, QosError


class Match(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a request must have; an empty one matches all."""

    header: str | None = None
    """`name: value`. Names are compared without regard to case, values exactly."""

    def __post_init__(self) -> None:
        if self.header is not None and not all(self.parts):
            raise ValueError(f"header {self.header!r}: must look like 'x-customer-tier: premium'")

    @property
    def parts(self) -> tuple[str, str]:
        """Name in lower case, and value."""
        name, _, value = (self.header or "").partition(":")
        return name.strip().lower(), value.strip()


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Requests that match belong to the class `qos`."""

    match: Match
    qos: str


def checked_routes(routes: Sequence[Route], classes: Sequence[QosClass]) -> None:
    """Raises QosError: a route leads to no class, or comes after one that matches everything."""
    names = [one.name for one in classes]
    for n, route in enumerate(routes):
        if route.qos not in names:
            raise QosError(f"routes[{n}]: qos {route.qos!r} must be one of {', '.join(names)}")
        if route.match.header is None and n + 1 < len(routes):
            raise QosError(f"routes[{n}]: matches everything, so it must be the last one")


def class_of(routes: Sequence[Route], headers: Mapping[str, str]) -> str:
    """Name of the class of the first route that matches; "" if none does.

    Args:
        headers: names in lower case.
    """
    for route in routes:
        name, value = route.match.parts
        if route.match.header is None or headers.get(name) == value:
            return route.qos
    return ""
