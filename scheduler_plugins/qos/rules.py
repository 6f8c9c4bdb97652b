# SPDX-License-Identifier: Apache-2.0
"""The rules that give a request its class by its headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from scheduler_plugins.qos.classes import QosClass, QosError


class Match(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The condition of a rule. An empty condition matches all requests."""

    header: str | None = None
    """`name: value`. Names are compared case-insensitively, values exactly."""

    def __post_init__(self) -> None:
        if self.header is not None and not all(self.parts):
            raise ValueError(f"header {self.header!r}: must look like 'x-customer-tier: premium'")

    @property
    def parts(self) -> tuple[str, str]:
        """Name in lower case, and value."""
        name, _, value = (self.header or "").partition(":")
        return name.strip().lower(), value.strip()


class ClassRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Requests that match belong to the class `qos`. A YAML entry of `request_router.routes`."""

    match: Match
    qos: str


def check_rules(rules: Sequence[ClassRule], classes: Sequence[QosClass]) -> None:
    """Check a list of rules.

    Raises:
        QosError: a rule names an unknown class, or follows a rule that matches everything.
    """
    names = [qos_class.name for qos_class in classes]
    for n, rule in enumerate(rules):
        if rule.qos not in names:
            raise QosError(f"routes[{n}]: qos {rule.qos!r} must be one of {', '.join(names)}")
        if rule.match.header is None and n + 1 < len(rules):
            raise QosError(f"routes[{n}]: matches everything, so it must be the last one")


def rule_of(rules: Sequence[ClassRule], headers: Mapping[str, str]) -> ClassRule | None:
    """The first rule that matches; None if none does.

    Args:
        headers: names in lower case.
    """
    for rule in rules:
        name, value = rule.match.parts
        if rule.match.header is None or headers.get(name) == value:
            return rule
    return None


def class_of(rules: Sequence[ClassRule], headers: Mapping[str, str]) -> str:
    """Name of the class of the first rule that matches; "" if none does. `headers`: as for `rule_of`."""
    rule = rule_of(rules, headers)
    return "" if rule is None else rule.qos
