# SPDX-License-Identifier: Apache-2.0
"""What the keeper and its workers tell each other."""

from __future__ import annotations

from typing import Any

import msgspec

from pd_connector.protocol.params import ProducerAddress
from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.router.engines.counted_load import Correction
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.fellows.memory import MemoryRef
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.settings.config import RouterConfig


class EngineState(msgspec.Struct, frozen=True):
    """One engine as the keeper knows it; see `BackendEngine` for the fields."""

    id: int
    """No other engine of this keeper has it."""
    slot: int
    """Its place in the shared counts."""
    url: str
    role: Role
    role_given: bool
    up: bool
    reason: str
    warning: str
    kind: Kind | None
    was_vllm: bool
    whole: bool
    model: str
    models: frozenset[str]
    context_tokens: int
    addresses: tuple[ProducerAddress, ...]
    bootstrap_port: int | None
    down_since: float | None
    """On the monotonic clock, which all processes of a machine share."""
    refusing: bool
    costs: CostModel
    draining: bool
    told_costs: bool
    told_block_tokens: int
    free_kv: float
    correction: Correction
    event_block_tokens: int | None
    """Tokens of its blocks by its events; None: nobody follows its events."""
    ranks: tuple[int, ...]
    """Its data-parallel ranks."""
    cache: dict[str, Any]
    """What is known of its cache, for `/health`."""
    handoffs: dict[str, int]


class TableState(msgspec.Struct, frozen=True):
    """Where one table of the index lies."""

    memory: MemoryRef
    slots: int
    words: int
    mix: int
    numbers: dict[str, int]


# From the keeper.


class Begin(msgspec.Struct, tag=True, frozen=True):
    """The first message."""

    config: RouterConfig
    row: int
    """Where the worker writes its counts."""
    counts: MemoryRef
    log_level: int


class Configured(msgspec.Struct, tag=True, frozen=True):
    """The settings have changed."""

    config: RouterConfig


class Engines(msgspec.Struct, tag=True, frozen=True):
    """All engines, the index, and how many workers serve; whatever was told before is old."""

    engines: tuple[EngineState, ...]
    held: TableState
    recent: TableState
    by_events: dict[str, tuple[int, ...]]
    """Names of the engines whose events have come."""


class SamplesWanted(msgspec.Struct, tag=True, frozen=True):
    """Tell your metrics."""

    number: int


class Metrics(msgspec.Struct, tag=True, frozen=True):
    """All workers' metrics, as `MetricsWanted` asked for."""

    number: int
    text: bytes


# From a worker.


class Listening(msgspec.Struct, tag=True, frozen=True):
    """It serves clients."""

    pid: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """An engine failed a request."""

    engine: int
    cause: str
    message: str
    refused: bool | None
    """None: it was reached. Else whether its machine answered that nobody listens there."""


class Moved(msgspec.Struct, tag=True, frozen=True):
    """A rank of an engine answered with another address."""

    engine: int
    rank: int
    seen: ProducerAddress


class Prefilled(msgspec.Struct, tag=True, frozen=True):
    """An engine has computed a prompt."""

    engine: int
    text: bytes
    """Digests of its text, 16 bytes each."""
    tokens: bytes | None
    extras: tuple[bytes, ...]


class Learnt(msgspec.Struct, tag=True, frozen=True):
    """A step of this load took an engine so long."""

    engine: int
    load: StepLoad
    duration_s: float


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A number of a metric."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A metric with its numbers."""

    name: str
    documentation: str
    kind: str
    samples: tuple[Sample, ...]


class Samples(msgspec.Struct, tag=True, frozen=True):
    """A worker's metrics, as `SamplesWanted` asked for."""

    number: int
    families: tuple[Family, ...]


class MetricsWanted(msgspec.Struct, tag=True, frozen=True):
    """Somebody asks this worker for the metrics of all."""

    number: int


FromKeeper = Begin | Configured | Engines | SamplesWanted | Metrics
FromWorker = Listening | Failed | Moved | Prefilled | Learnt | Samples | MetricsWanted
