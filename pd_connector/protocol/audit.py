# SPDX-License-Identifier: Apache-2.0
"""Proof by computing: KV that was received is compared with KV that this engine has computed itself.

A load that `compares` writes no pages. Its chunks pass through the same handshake, plan and checksums
as those of any load; then each is held to the pages that are there (`Comparison`). What came of it is
kept for each producer (`AuditBook`): a producer that has not passed is not believed.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pd_connector.errors import Cause
from pd_connector.kv.audit_tolerance import Tolerance, tolerance
from pd_connector.kv.coding import ELEMENT_BYTES, Part
from pd_connector.kv.geometry import DRAFT_LAYERS
from pd_connector.plan.route import Route
from pd_connector.protocol.peers import Source

Problem = tuple[Cause, str]


class Distance(NamedTuple):
    """How far K or V of one layer of a chunk is from what was computed here.

    Attributes:
        pages: numbers of the prompt's pages that were compared, by the consumer's page size.
        by_page: distance of each of them, as `Tolerance.page` has it: of its worst head.
        apart: sum of squares of the differences.
        own: sum of squares of what was computed here.
    """

    layer: int
    part: Part
    pages: Sequence[int]
    by_page: Sequence[float]
    apart: float
    own: float


def can_compare(route: Route) -> bool:
    """Whether elements of this route's caches can be read as numbers."""
    return route.source.dtype in ELEMENT_BYTES and route.destination.dtype in ELEMENT_BYTES


class Counterpart(NamedTuple):
    """A rank of a producer, as its session has it."""

    source: Source
    epoch: int
    engine_id: str
    model: bytes  # digest of all that it says of its model
    told: str  # the same in a few words


class Comparison:
    """What one load has found so far. Nothing is concluded before all has come: chunks that come while
    the prompt is computed may be taken back.

    Args:
        adapter: name and content of the adapter that the KV was computed with; empty for none.

    Attributes:
        largest: the largest distance of a page, by K and V.
        pages: layers times pages that were compared.
        counterparts: whose KV it is; empty until `judge`.
    """

    def __init__(self, adapter: str = "") -> None:
        self.adapter = adapter
        self.largest: dict[Part, float] = {}
        self.pages = 0
        self.counterparts: tuple[Counterpart, ...] = ()
        self._wrong: dict[int, str] = {}  # by layer
        self._sums: dict[tuple[int, Part], tuple[float, float, Tolerance]] = {}

    def add(self, route: Route, found: Iterable[Distance]) -> None:
        """Take note of a chunk, whose checksum was right."""
        allowed = tolerance(route.source.dtype, route.destination.dtype, route.codec)
        for one in found:
            if one.layer >= DRAFT_LAYERS or not one.pages:
                continue  # a draft that differs makes no wrong answers
            worst = max(range(len(one.pages)), key=lambda place: one.by_page[place])
            distance = one.by_page[worst]
            self.pages += len(one.pages)
            self.largest[one.part] = max(distance, self.largest.get(one.part, 0.0))
            key = one.layer, one.part
            apart, own, _ = self._sums.get(key, (0.0, 0.0, allowed))
            self._sums[key] = apart + one.apart, own + one.own, allowed
            if one.layer not in self._wrong and not distance <= allowed.page:
                where = f"layer {one.layer}, page {one.pages[worst]}, {_name(one.part)}"
                self._wrong[one.layer] = _differs(where, distance, allowed.page)

    def judge(self, counterparts: Iterable[Counterpart], routes: Iterable[Route]) -> Problem | None:
        """All has come: what is wrong with it, or why the comparison says nothing; None if all KV is
        what was computed here.

        Args:
            counterparts: whose KV it is.
            routes: of all of them.
        """
        self.counterparts = tuple(counterparts)
        for (layer, part), (apart, own, allowed) in self._sums.items():
            distance = relative(apart, own)
            if layer not in self._wrong and not distance <= allowed.layer:
                where = f"layer {layer}, all its pages together, {_name(part)}"
                self._wrong[layer] = _differs(where, distance, allowed.layer)
        if self._wrong:  # what comes after the first wrong layer may be wrong because of it
            return Cause.AUDIT, self._wrong[min(self._wrong)]
        compared = {layer for layer, _ in self._sums}
        for route in routes:
            wanted = {n for n in route.layers if n < DRAFT_LAYERS} if can_compare(route) else set()
            if missing := wanted - compared:
                detail = f"no page of layer {min(missing)} was left here to be compared"
                return Cause.WINDOW, detail
        return None

    def __str__(self) -> str:
        if not self.pages:
            return "nothing was compared"
        layers: dict[Part, float] = {}
        for (_, part), (apart, own, _) in self._sums.items():
            layers[part] = max(relative(apart, own), layers.get(part, 0.0))
        pages, whole = (
            ", ".join(f"{_name(part)} {distance:.2g}" for part, distance in found.items())
            for found in (self.largest, layers)
        )
        return f"{self.pages} pages of layers compared, largest distance {pages}; of a whole layer {whole}"


class AuditBook:
    """What is known of producers. Outlives sessions, and the agent's thread.

    A producer is known by its address, the epoch it drew when it started, and its model as the
    handshake has it; it passes for each adapter by itself. What was found wrong without an adapter is wrong with
    each; what was found wrong with an adapter says nothing of others. Distrust lasts until the producer starts anew,
    or the adapter has other content.
    """

    _MOST = 65536

    def __init__(self) -> None:
        self._passed: dict[tuple[Source, int, bytes, str], None] = {}
        self._distrusted: dict[tuple[Source, int, str], str] = {}

    @property
    def distrusted(self) -> int:
        """Ranks of producers whose KV was found wrong, with whatever adapter."""
        return len({key[:2] for key in self._distrusted})

    def passed(self, producer: Counterpart, adapter: str) -> None:
        """All that was compared of this producer was right."""
        self._passed[producer.source, producer.epoch, producer.model, adapter] = None
        while len(self._passed) > self._MOST:
            del self._passed[next(iter(self._passed))]

    def distrust(self, source: Source, epoch: int, adapter: str, why: str) -> None:
        """KV of this producer was wrong, computed with this adapter (empty: with none)."""
        self._distrusted.setdefault((source, epoch, adapter), why)
        self._passed = {
            key: None
            for key in self._passed
            if key[:2] != (source, epoch) or adapter not in ("", key[3])
        }

    def forget_passed(self) -> None:
        """This engine serves other weights: every producer has to pass again."""
        self._passed.clear()

    def problem(self, producer: Counterpart, adapter: str, *, compares: bool) -> Problem | None:
        """Why KV of this producer may not be asked for, or None.

        Args:
            compares: it will only be compared.
        """
        source, epoch, _, model, _ = producer
        for distrusted in ("", adapter):
            if why := self._distrusted.get((source, epoch, distrusted)):
                return Cause.AUDIT, f"an earlier audit found: {why}"
        if compares or (source, epoch, model, adapter) in self._passed:
            return None
        return Cause.UNAUDITED, "no audit of this producer has passed since it started"


def relative(apart: float, own: float) -> float:
    """Distance, of sums of squares."""
    if not apart > 0:
        return 0.0 if apart == 0 else math.inf
    return math.sqrt(apart / own) if own > 0 else math.inf


def _name(part: Part) -> str:
    return "V" if part is Part.VALUE else "K"


def _differs(where: str, distance: float, allowed: float) -> str:
    return f"{where}: KV is {distance:.3g} apart from what this engine computes (at most {allowed:.2g})"
