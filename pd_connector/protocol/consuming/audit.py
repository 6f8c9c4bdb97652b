# SPDX-License-Identifier: Apache-2.0
"""Proof by computing: KV that was received is compared with KV that this engine has computed itself.

A load that `compares` writes no pages. Its chunks pass through the same handshake, plan and checksums as the
chunks of any load. Then each chunk is compared with the pages that are there (`Comparison`). `AuditBook` keeps
the result for each producer: a producer that has not passed is not believed.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from pd_connector.errors import Cause
from pd_connector.kv.audit_tolerance import Tolerance, tolerance
from pd_connector.kv.coding import ELEMENT_BYTES, RAW, Part
from pd_connector.kv.geometry import DRAFT_LAYERS
from pd_connector.plan.route import Route
from pd_connector.protocol.consuming.experts import MOST_MOVED, Moved, MovedTokens
from pd_connector.protocol.wire.peers import Source

Problem = tuple[Cause, str]


class Distance(NamedTuple):
    """How far K or V of one layer of a chunk is from what was computed here.

    Attributes:
        pages: numbers of the prompt's pages that were compared, by the consumer's page size.
        by_page: distance of each of them, as `Tolerance.page` has it: of its worst head.
        tokens: numbers of the prompt's tokens that are furthest, one of each page.
        by_token: distance of each of them, as `Tolerance.token` has it: of its worst head.
        apart: sum of squares of the differences.
        own: sum of squares of what was computed here.
        span: the tokens that were compared.
        moved: those that are further apart than rounding alone, the furthest first.
        section: of a state, which counts as one page with one token; empty for K and V.
    """

    layer: int
    part: Part
    pages: Sequence[int]
    by_page: Sequence[float]
    tokens: Sequence[int]
    by_token: Sequence[float]
    apart: float
    own: float
    span: range
    moved: Sequence[Moved] = ()
    section: str = ""


def can_compare(route: Route) -> bool:
    """Whether elements of this route's caches can be read as numbers."""
    if route.section is not None:
        return route.section.dtype in ELEMENT_BYTES
    return route.source.dtype in ELEMENT_BYTES and route.destination.dtype in ELEMENT_BYTES


class Counterpart(NamedTuple):
    """A rank of a producer, as its session has it."""

    source: Source
    epoch: int
    engine_id: str
    model: bytes  # digest of all that it says of its model
    told: str  # the same in a few words
    path: str = ""  # how its KV comes: transport, direction and codecs


class _Far(NamedTuple):
    """A page, or a token, of a layer that is further apart than it may be."""

    tokens: range
    problem: str


class Comparison:
    """What one load has found so far. Nothing is concluded before all has come: chunks that come while
    the prompt is computed may be taken back.

    Args:
        adapter: name and content of the adapter that the KV was computed with; empty for none.
        experts: the model sends tokens to experts, so that rounding can move single ones.
        states: states are compared, too. Where no position is kept by both sides, only KV is.

    Attributes:
        largest: the largest distance of a page, by K and V.
        largest_token: the same of a token.
        pages: layers times pages that were compared.
        counterparts: whose KV it is; empty until `judge`.
    """

    def __init__(self, adapter: str = "", *, experts: bool = False, states: bool = False) -> None:
        self.adapter = adapter
        self._states = states
        self.largest: dict[Part, float] = {}
        self.largest_token: dict[Part, float] = {}
        self.pages = 0
        self.counterparts: tuple[Counterpart, ...] = ()
        self._moved = MovedTokens() if experts else None
        self._far: dict[int, list[_Far]] = {}  # by layer
        self._sums: dict[tuple[int, Part], tuple[float, float, Tolerance]] = {}

    def note(self, route: Route, found: Iterable[Distance], passed: str = RAW.name) -> None:
        """Take note of a chunk, whose checksum was right.

        Args:
            passed: a codec in which its KV had passed before it passed along the route.
        """
        dtypes = route.source.dtype, route.destination.dtype
        allowed = max(tolerance(*dtypes, codec) for codec in (route.codec, passed))
        for one in found:
            if one.layer >= DRAFT_LAYERS or not one.pages:
                continue  # a draft that differs makes no wrong answers
            self.pages += len(one.pages)
            key = one.layer, one.part
            apart, own, _ = self._sums.get(key, (0.0, 0.0, allowed))
            self._sums[key] = apart + one.apart, own + one.own, allowed
            for known, distances in (
                (self.largest, one.by_page),
                (self.largest_token, one.by_token),
            ):
                known[one.part] = max(known.get(one.part, 0.0), *distances)
            if self._moved is not None:
                self._moved.add(one.layer, one.part, one.span, one.moved)
            far = self._far.setdefault(one.layer, [])
            for each in _far(one, route.destination.page_size, allowed):
                if not far or (self._moved is not None and len(far) < MOST_MOVED):
                    far.append(each)

    def judge(self, counterparts: Iterable[Counterpart], routes: Iterable[Route]) -> Problem | None:
        """All has come: what is wrong with it, or why the comparison says nothing; None if all KV is
        what was computed here.

        Args:
            counterparts: whose KV it is.
            routes: of all of them.
        """
        self.counterparts = tuple(counterparts)
        # What comes after the first wrong layer may be wrong because of it.
        if wrong := min(self._wrong(), key=itemgetter(0), default=None):
            return Cause.AUDIT, wrong[1]
        compared = {layer for layer, _ in self._sums}
        for route in routes:
            if route.section is not None and not self._states:
                continue
            wanted = {n for n in route.layers if n < DRAFT_LAYERS} if can_compare(route) else set()
            if missing := wanted - compared:
                detail = f"no page of layer {min(missing)} was left here to be compared"
                return Cause.WINDOW, detail
        return None

    def _wrong(self) -> Iterator[tuple[int, str]]:
        """What is wrong in each layer, as far as anything is."""
        for (layer, part), (apart, own, allowed) in self._sums.items():
            excused = self._moved.excused(layer, allowed.token) if self._moved else set()
            for far in self._far[layer]:
                if excused.isdisjoint(far.tokens):
                    yield layer, far.problem
                    break
            else:
                if self._moved:
                    apart -= self._moved.apart(layer, part, excused)
                distance = relative(apart, own)
                if not distance <= allowed.layer:
                    where = f"layer {layer}, all its pages together, {_name(part)}"
                    yield layer, _differs(where, distance, allowed.layer)

    def __str__(self) -> str:
        if not self.pages:
            return "nothing was compared"
        layers: dict[Part, float] = {}
        for (_, part), (apart, own, _) in self._sums.items():
            layers[part] = max(relative(apart, own), layers.get(part, 0.0))
        pages, tokens, whole = (
            ", ".join(f"{_name(part)} {distance:.2g}" for part, distance in found.items())
            for found in (self.largest, self.largest_token, layers)
        )
        return (
            f"{self.pages} pages of layers compared, largest distance {pages}; "
            f"of a token {tokens}; of a whole layer {whole}"
        )


class AuditBook:
    """What is known of producers. Outlives sessions, and the agent's thread.

    A producer is known by its address, the epoch it drew when it started, and its model as the
    handshake has it; it passes for each adapter and each path by itself. What was found wrong without an adapter is
    wrong with each; what was found wrong with an adapter says nothing of others. Distrust lasts until the producer
    restarts, or the adapter has other content.

    Args:
        experts: as `Comparison` has it.
    """

    _MOST = 65536

    def __init__(self, *, experts: bool = False) -> None:
        self.experts = experts
        self._passed: dict[tuple[Source, int, bytes, str, str], None] = {}
        self._distrusted: dict[tuple[Source, int, str], str] = {}

    @property
    def distrusted(self) -> int:
        """Ranks of producers whose KV was found wrong, with whatever adapter."""
        return len({key[:2] for key in self._distrusted})

    def passed(self, producer: Counterpart, adapter: str) -> None:
        """All that was compared of this producer was right, as it came by this path."""
        self._passed[_key(producer, adapter)] = None
        while len(self._passed) > self._MOST:
            del self._passed[next(iter(self._passed))]

    def distrust(self, source: Source, epoch: int, adapter: str, why: str) -> None:
        """KV of this producer was wrong, computed with this adapter (empty: with none)."""
        self._distrusted.setdefault((source, epoch, adapter), why)
        self._passed = {
            key: None
            for key in self._passed
            if key[:2] != (source, epoch) or adapter not in ("", key[-1])
        }

    def forget_passed(self) -> None:
        """This engine serves other weights: every producer has to pass again."""
        self._passed.clear()

    def problem(self, producer: Counterpart, adapter: str, *, compares: bool) -> Problem | None:
        """Why KV of this producer must not be asked for, or None.

        Args:
            compares: it will only be compared.
        """
        for distrusted in ("", adapter):
            if why := self._distrusted.get((producer.source, producer.epoch, distrusted)):
                return Cause.AUDIT, f"an earlier audit found: {why}"
        if compares or self.has_passed(producer, adapter):
            return None
        detail = (
            f"since it started, no audit of this producer has passed by this path ({producer.path})"
        )
        return Cause.UNAUDITED, detail

    def has_passed(self, producer: Counterpart, adapter: str) -> bool:
        """Whether an audit of this producer has passed, by this path and with this adapter."""
        return _key(producer, adapter) in self._passed


def _key(producer: Counterpart, adapter: str) -> tuple[Source, int, bytes, str, str]:
    return producer.source, producer.epoch, producer.model, producer.path, adapter


def _far(one: Distance, page_size: int, allowed: Tolerance) -> Iterator[_Far]:
    """Pages that are too far, the furthest first; then tokens."""
    if one.section:
        for distance, most in ((one.by_page[0], allowed.page), (one.by_token[0], allowed.layer)):
            if not distance <= most:
                where = f"layer {one.layer}, {one.section} of the state"
                yield _Far(range(0), _differs(where, distance, most))
        return
    pages = zip(one.pages, one.by_page, strict=True)
    worst = zip(one.tokens, one.by_token, strict=True)
    tokens = [(moved.token, moved.distance) for moved in one.moved] or worst
    for number, distance in sorted(pages, key=itemgetter(1), reverse=True):
        if not distance <= allowed.page:
            where = f"layer {one.layer}, page {number}, {_name(one.part)}"
            covers = range(number * page_size, (number + 1) * page_size)
            yield _Far(covers, _differs(where, distance, allowed.page))
    for number, distance in sorted(tokens, key=itemgetter(1), reverse=True):
        if not distance <= allowed.token:
            where = f"layer {one.layer}, token {number}, {_name(one.part)}"
            yield _Far(range(number, number + 1), _differs(where, distance, allowed.token))


def relative(apart: float, own: float) -> float:
    """Distance, of sums of squares."""
    if not apart > 0:
        return 0.0 if apart == 0 else math.inf
    return math.sqrt(apart / own) if own > 0 else math.inf


def _name(part: Part) -> str:
    return "V" if part is Part.VALUE else "K"


def _differs(where: str, distance: float, allowed: float) -> str:
    return f"{where}: KV is {distance:.3g} apart from what this engine computes (at most {allowed:.2g})"
