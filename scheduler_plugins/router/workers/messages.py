# SPDX-License-Identifier: Apache-2.0
"""The messages between the keeper and its workers."""

from __future__ import annotations

from typing import Any

import msgspec

from pd_connector.protocol.wire.params import ProducerAddress
from scheduler_plugins.cost.model import CostModel, StepLoad
from scheduler_plugins.router.engines.about import About
from scheduler_plugins.router.engines.counted_load import Correction
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.engines.observed import Event
from scheduler_plugins.router.engines.role_state import Decision, RoleState
from scheduler_plugins.router.engines.traffic import Traffic
from scheduler_plugins.router.index.stored import StorePlace
from scheduler_plugins.router.peer_routers.memory import MemoryRef
from scheduler_plugins.router.policies.base import Role
from scheduler_plugins.router.recent_history import Beat
from scheduler_plugins.router.roles.base import Front
from scheduler_plugins.router.settings.config import RouterConfig


class EngineState(msgspec.Struct, frozen=True):
    """One engine as the keeper knows it; see `BackendEngine` for the fields."""

    id: int
    """Unique among the engines of this keeper."""
    slot: int
    """The engine's slot in the shared counts."""
    url: str
    role: Role
    role_given: bool
    up: bool
    reason: str
    warning: str
    about: About
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
    answers: bool
    ended: int
    costs: CostModel
    draining: bool
    costs_reported: bool
    reported_block_tokens: int
    free_kv: float
    correction: Correction
    event_block_tokens: int | None
    """Tokens of one block, by the engine's events; None: its events are not followed."""
    ranks: tuple[int, ...]
    """Its data-parallel ranks."""
    cache: dict[str, Any]
    """The state of the engine's cache, for `/health`."""
    handoffs: dict[str, int]
    traffic: Traffic
    store: StorePlace | None
    role_state: RoleState


class TableState(msgspec.Struct, frozen=True):
    """The location of one table of the index in shared memory."""

    memory: MemoryRef
    slots: int
    words: int
    mix: int
    numbers: dict[str, int]


# Messages from the keeper.


class Begin(msgspec.Struct, tag=True, frozen=True):
    """The first message to a worker."""

    config: RouterConfig
    row: int
    """The worker's row in the shared counts."""
    counts: MemoryRef
    log_level: int


class Configured(msgspec.Struct, tag=True, frozen=True):
    """The settings have changed."""

    config: RouterConfig


class Engines(msgspec.Struct, tag=True, frozen=True):
    """All engines, the index, and the number of serving workers. It replaces the message before."""

    engines: tuple[EngineState, ...]
    held: TableState
    recent: TableState
    by_events: dict[str, tuple[int, ...]]
    """Names of the engines with events, and the ranks that sent them."""
    decisions: tuple[Decision, ...] = ()
    """The last decisions on roles."""


class Beats(msgspec.Struct, tag=True, frozen=True):
    """The last minutes of the router."""

    beats: tuple[Beat, ...]


class SamplesWanted(msgspec.Struct, tag=True, frozen=True):
    """Asks a worker for its metrics."""

    number: int


class Metrics(msgspec.Struct, tag=True, frozen=True):
    """The metrics of all processes: the answer to `MetricsWanted`."""

    number: int
    text: bytes


# Messages from a worker.


class Listening(msgspec.Struct, tag=True, frozen=True):
    """The worker serves clients."""

    pid: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """An engine failed a request."""

    engine: int
    cause: str
    message: str
    refused: bool | None
    """None: the engine was reached. Else whether its machine refused the connection."""


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
    """The load and the duration of one step of an engine."""

    engine: int
    load: StepLoad
    duration_s: float


class Happened(msgspec.Struct, tag=True, frozen=True):
    """What happened to this worker's requests."""

    events: list[Event]
    front: dict[str, Front]
    """What waits in its front queue, by group."""


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
    """A worker's metrics: the answer to `SamplesWanted`."""

    number: int
    families: tuple[Family, ...]


class MetricsWanted(msgspec.Struct, tag=True, frozen=True):
    """A client asks this worker for the metrics of all processes."""

    number: int


FromKeeper = Begin | Configured | Engines | Beats | SamplesWanted | Metrics
FromWorker = Listening | Failed | Moved | Prefilled | Learnt | Happened | Samples | MetricsWanted
