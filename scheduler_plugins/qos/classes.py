# SPDX-License-Identifier: Apache-2.0
"""The classes of users, as the configuration file writes them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec


class QosError(ValueError):
    """A configuration of classes that cannot be used. The message names the key and what to do."""


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a class is promised. A time that is left out is not promised."""

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
        """The same in seconds; infinite where it is not promised."""
        return inf if self.ttft_ms is None else self.ttft_ms / 1e3

    @property
    def tpot_s(self) -> float:
        """The same in seconds; infinite where it is not promised."""
        return inf if self.tpot_ms is None else self.tpot_ms / 1e3


class QosClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A class of users."""

    name: str
    reserved_fraction: float
    """Part of the engine's time, above 0 and at most 1, that the class gets while it has requests."""
    priority: int = 0
    """Time that is not reserved or not used goes to the class with the largest priority."""
    slo: Slo = Slo()
    interactive: bool = True
    """Whether somebody waits for its answers. The router's policy `length` sends long prompts of other classes to engines
    of role `cpu_prefill`."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name '': must not be empty")
        if not 0 < self.reserved_fraction <= 1:
            raise ValueError(
                f"reserved_fraction {self.reserved_fraction} of {self.name}: must be above 0, or "
                "the class may starve, and at most 1"
            )


ONLY = (QosClass(name="default", reserved_fraction=1.0),)
"""The classes if none are configured."""


def checked(classes: Sequence[QosClass]) -> tuple[QosClass, ...]:
    """Check classes that are used together, and return them.

    Raises:
        QosError: there is none, a name or priority is given twice, or more than 1 is reserved.
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
