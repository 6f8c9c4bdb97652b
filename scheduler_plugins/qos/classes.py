# SPDX-License-Identifier: Apache-2.0
"""The classes of users, as the configuration file writes them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class QosError(ValueError):
    """A configuration of classes that cannot be used; the message names what and the mend."""


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a class is promised; what is left out is not promised."""

    ttft_ms: float | None = None
    """Longest time to the first token, in milliseconds."""
    tpot_ms: float | None = None
    """Longest mean time per token after the first, in milliseconds."""

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} {value}: must be a number of milliseconds > 0")


class QosClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A class of users."""

    name: str
    reserved_fraction: float
    """Part of the engine's time that the class gets whenever it has requests, in 0..1."""
    priority: int = 0
    """Who gets what nobody has reserved, or does not use: the larger goes first."""
    slo: Slo = Slo()

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name '': must not be empty")
        if not 0 < self.reserved_fraction <= 1:
            raise ValueError(
                f"reserved_fraction {self.reserved_fraction} of {self.name}: must be above 0, or "
                "the class may starve, and at most 1"
            )


ONLY = (QosClass(name="default", reserved_fraction=1.0),)
"""The classes where none are configured."""


def checked(classes: Sequence[QosClass]) -> tuple[QosClass, ...]:
    """Classes that go together.

    Raises:
        QosError: none, a name or a priority given twice, or more reserved than there is.
    """
    if not classes:
        raise QosError("qos_classes: is empty; name at least one class, or leave it out")
    for field in ("name", "priority"):
        values = [getattr(one, field) for one in classes]
        for value in values:
            if values.count(value) > 1:
                raise QosError(f"qos_classes: {field} {value!r} is given twice; must be unique")
    reserved = sum(one.reserved_fraction for one in classes)
    if reserved > 1 + 1e-9:
        raise QosError(f"qos_classes: reserved_fraction adds up to {reserved:g}; must be at most 1")
    return tuple(classes)


def default_class(classes: Sequence[QosClass]) -> QosClass:
    """The class of requests that name none or an unknown one: that of the lowest priority."""
    return min(classes, key=lambda one: one.priority)
