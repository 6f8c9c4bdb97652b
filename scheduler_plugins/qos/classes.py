# SPDX-License-Identifier: Apache-2.0
"""The classes of users, in the form of the configuration file."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec


class QosError(ValueError):
    """An invalid configuration of classes. The message names the key and what to do."""


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The promise to a class. A time that is left out is not promised."""

    ttft_ms: float | None = None
    """Longest time to the first token, in milliseconds."""
    tpot_ms: float | None = None
    """Longest mean time per token after the first, in milliseconds."""

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} {value}: must be a number of milliseconds > 0")

    @property
    def ttft_s(self) -> float:
        """The promise in seconds; infinite if there is none."""
        return inf if self.ttft_ms is None else self.ttft_ms / 1e3

    @property
    def tpot_s(self) -> float:
        """The promise in seconds; infinite if there is none."""
        return inf if self.tpot_ms is None else self.tpot_ms / 1e3


class QosClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A class of users."""

    name: str
    reserved_fraction: float
    """Fraction of the engine's time, above 0 and at most 1, that the class gets while it has requests."""
    priority: int = 0
    """The class with the largest priority gets the time that is not reserved or not used."""
    slo: Slo = Slo()
    interactive: bool = True
    """Whether a user waits for the answers. If not, the router's policy `length` sends long prompts of the class to
    engines of role `cpu_prefill`."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name '': must not be empty")
        if not 0 < self.reserved_fraction <= 1:
            raise ValueError(
                f"reserved_fraction {self.reserved_fraction} of {self.name}: must be above 0, or "
                "the class may starve, and at most 1"
            )


ONLY = (QosClass(name="default", reserved_fraction=1.0),)
"""The classes of a server without configured classes."""


def checked(classes: Sequence[QosClass]) -> tuple[QosClass, ...]:
    """Check a set of classes, and return it.

    Raises:
        QosError: there is no class, a name or priority is given twice, or the reserved fractions exceed 1.
    """
    if not classes:
        raise QosError("qos_classes: is empty; name at least one class, or leave it out")
    for field in ("name", "priority"):
        values = [getattr(qos_class, field) for qos_class in classes]
        for value in values:
            if values.count(value) > 1:
                raise QosError(f"qos_classes: {field} {value!r} is given twice; must be unique")
    reserved = sum(qos_class.reserved_fraction for qos_class in classes)
    if reserved > 1 + 1e-9:
        raise QosError(f"qos_classes: reserved_fraction adds up to {reserved:g}; must be at most 1")
    return tuple(classes)


def default_class(classes: Sequence[QosClass]) -> QosClass:
    """The class of requests that name no class or an unknown class: the class with the lowest priority."""
    return min(classes, key=lambda qos_class: qos_class.priority)
