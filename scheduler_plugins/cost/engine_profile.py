# SPDX-License-Identifier: Apache-2.0
"""All that a plan needs to know of one kind of engine."""

from __future__ import annotations

from math import inf
from typing import Literal

import msgspec

from scheduler_plugins.cost.model import CostModel

_MOST = 1e9
"""Simulations with larger values do not end."""
MOST_ERROR = 0.15
"""A profile with a larger error is not planned with, unless asked for."""


class Errors(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Mean relative errors of predicted step times, by the kind of step; None: not measured."""

    prefill: float | None = None
    decode: float | None = None
    mixed: float | None = None
    """Steps with prompt tokens and sequences that decode: these decide between engines of one role and engines that do
    both."""


class EngineProfile(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """One kind of engine: a model on a device, at one tensor parallelism."""

    costs: CostModel
    kv_tokens: float = inf
    """Room for the KV of sequences, in tokens."""
    cache_blocks: int = 0
    """Size of the prefix cache in blocks; 0: as the scenario says."""
    kv_bytes_per_token: float = 0.0
    """KV of one token on the wire; 0: unknown."""
    layers: int = 0
    """Layers of the model, one of which is the least that a handoff waits for; 0: unknown."""
    gpus: int = 1
    start_s: float = 0.0
    """Time from the start of the process until it serves."""
    price_per_h: float = 0.0
    """Price of the whole engine, in the user's currency; 0: unknown."""
    watts: float = 0.0
    """Power of the whole engine; 0: unknown."""
    source: Literal["measured", "estimated", "assumed"] = "assumed"
    model: str = ""
    dtype: str = ""
    errors: Errors = Errors()

    def __post_init__(self) -> None:
        """Raises: ValueError: naming the field, the value found and the value wanted."""
        if self.costs.problem:
            raise ValueError(f"costs: {self.costs.problem}")
        if not self.kv_tokens > 0:
            raise ValueError(f"kv_tokens {self.kv_tokens}: must be above 0")
        if self.gpus < 1:
            raise ValueError(f"gpus {self.gpus}: must be 1 or more")
        for name in (
            "cache_blocks",
            "kv_bytes_per_token",
            "layers",
            "start_s",
            "price_per_h",
            "watts",
        ):
            if not 0 <= (value := getattr(self, name)) <= _MOST:
                raise ValueError(f"{name} {value}: must be a number from 0 to {_MOST:g}")

    @property
    def doubt(self) -> str:
        """The largest known error above 15 %, in words; empty: there is none."""
        errors = {"all steps": self.costs.error, **msgspec.structs.asdict(self.errors)}
        kind, worst = max(
            ((kind, error or 0.0) for kind, error in errors.items()), key=lambda pair: pair[1]
        )
        return f"error {worst:.0%} ({kind})" if worst > MOST_ERROR else ""
