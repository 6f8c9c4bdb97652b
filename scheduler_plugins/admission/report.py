# SPDX-License-Identifier: Apache-2.0
"""The report of an engine to a router: `GET /pd/load`. The middleware of the engine's API server answers it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import msgspec

from scheduler_plugins.admission.load import LoadReport
from scheduler_plugins.cost.model import CostModel

PATH = "/pd/load"
WILDCARDS = ("*", "0.0.0.0", "[::]")
"""Hosts that stand for all addresses of the engine's machine."""


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one data-parallel rank."""

    rank: int
    queued_s: float
    """Seconds of prefill that wait or run."""
    queued_tokens: int
    waiting: int
    """Requests."""
    batch: int
    """Sequences in decode."""
    context: int
    """Tokens in their caches."""
    model: CostModel

    @classmethod
    def of(cls, rank: int, report: LoadReport) -> Self:
        """The same load without the fields that only admission needs."""
        classes = report.classes.values()
        return cls(
            rank=rank,
            queued_s=max(0.0, report.prefill_left_s + sum(sum(load.work_s) for load in classes)),
            queued_tokens=sum(load.tokens for load in classes),
            waiting=sum(load.waiting for load in classes),
            batch=len(report.decoding),
            context=sum(sequence.context for sequence in report.decoding),
            model=report.model,
        )


class EventPorts(msgspec.Struct, frozen=True, kw_only=True):
    """The endpoints of the engine's KV events. A rank adds its number to the port."""

    events: str
    replay: str | None = None


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of the machine that an API server sends requests to."""

    ranks: tuple[RankLoad, ...] = ()
    """The ranks whose load is known."""
    block_tokens: int = 0
    """Tokens of a block; 0: unknown."""
    blocks: int = 0
    """Blocks of each rank's cache; 0: unknown."""
    kv_events: EventPorts | None = None

    def encode(self) -> bytes:
        """As JSON."""
        return _ENCODER.encode(self)


def decode(raw: bytes) -> EngineReport:
    """Read what `EngineReport.encode` wrote. Raises msgspec.MsgspecError if the data is something else."""
    return _DECODER.decode(raw)


def loads(posts: Iterable[tuple[int, LoadReport]]) -> tuple[RankLoad, ...]:
    """The loads of ranks."""
    return tuple(RankLoad.of(rank, report) for rank, report in posts)


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(EngineReport)
