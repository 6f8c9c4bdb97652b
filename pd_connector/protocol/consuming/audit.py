# SPDX-License-Identifier: Apache-2.0
"""Audits: received KV is compared with KV that this engine has computed itself.

A load that `compares` writes no pages. Its chunks pass the same handshake, plan and checksums as the chunks of any load.
Then each chunk is compared with the pages of this engine (`Comparison`). `AuditBook` keeps the result for each producer.
KV of a producer that has not passed is not used.
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
from pd_connector.protocol.consuming.experts import MOST_MOVED, REACH, Moved, MovedTokens
from pd_connector.protocol.wire.peers import Source

Problem = tuple[Cause, str]


class Distance(NamedTuple):
    """The distance between K or V of one layer of a chunk and what was computed here.

    Attributes:
        pages: numbers of the prompt's pages that were compared, by the consumer's page size.
        by_page: the distance of each page in its worst head, as `Tolerance.page` has it.
        tokens: number of the furthest token of each page.
        by_token: the distance of each of these tokens in its worst head, as `Tolerance.token` has it.
        apart: sum of squares of the differences.
        own: sum of squares of what was computed here.
        span: the tokens that were compared.
        moved: tokens whose distance is larger than rounding explains, the furthest first.
        section: a state's section, which counts as one page with one token; empty for K and V.
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
    """A rank of a producer, as audits know it."""

    source: Source
    epoch: int
    engine_id: str
    model: bytes  # digest of all that it says of its model
    model_text: str  # the same for the log
    path: str = ""  # how its KV comes: transport, direction and codecs


class _Far(NamedTuple):
    """A page, a token or a state of a layer whose distance is too large."""

    tokens: range  # of a state: those that it depends on most
    problem: str
    of_state: bool = False


class Comparison:
    """The distances that one load has measured so far. `judge` gives the result only after the last chunk, because
    chunks that come while the prompt is still computed can be revoked.

    Args:
        adapter: name and content of the adapter that the KV was computed with; empty for none.
        experts: the model is a mixture of experts, so rounding can change single tokens.
        states: whether states are compared, too. If the two sides keep states at no common position, only KV is
            compared.

    Attributes:
        largest: the largest distance of a page, by K and V.
        largest_token: the largest distance of a token, by K and V.
        pages: layers times pages that were compared.
        counterparts: the producer's ranks that sent the KV; empty until `judge`.
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

    def note(self, route: Route, chunk: Iterable[Distance], passed: str = RAW.name) -> None:
        """Add the distances of a chunk whose checksum was right.

        Args:
            passed: the codec in which its KV had passed before.
        """
        dtypes = route.source.dtype, route.destination.dtype
        allowed = max(tolerance(*dtypes, codec) for codec in (route.codec, passed))
        for distance in chunk:
            layer, part = distance.layer, distance.part
            if layer >= DRAFT_LAYERS or not distance.pages:
                continue  # a draft that differs makes no wrong answers
            self.pages += len(distance.pages)
            apart, own, _ = self._sums.get((layer, part), (0.0, 0.0, allowed))
            self._sums[layer, part] = apart + distance.apart, own + distance.own, allowed
            for largest, distances in (
                (self.largest, distance.by_page),
                (self.largest_token, distance.by_token),
            ):
                largest[part] = max(largest.get(part, 0.0), *distances)
            if self._moved is not None and not distance.section:
                self._moved.add(layer, part, distance.span, distance.moved)
            far = self._far.setdefault(layer, [])
            for each in _far(distance, route.destination.page_size, allowed):
                if not far or (self._moved is not None and len(far) < MOST_MOVED):
                    far.append(each)

    def judge(self, counterparts: Iterable[Counterpart], routes: Iterable[Route]) -> Problem | None:
        """The result, after the last chunk: None if the KV equals what was computed here. Otherwise (cause, detail): what is
        wrong with it, or why the comparison has no result.

        Args:
            counterparts: the producer's ranks that sent the KV.
            routes: the routes along which the KV came.
        """
        self.counterparts = tuple(counterparts)
        # What comes after the first wrong layer may be wrong because of it.
        if wrong := min(self._wrong(), key=itemgetter(0), default=None):
            return Cause.AUDIT, wrong[1]
        if unsure := next(self._unsure(), None):
            return Cause.WINDOW, unsure
        compared = {layer for layer, _ in self._sums}
        for route in routes:
            if route.section is not None and not self._states:
                continue
            expected = (
                {n for n in route.layers if n < DRAFT_LAYERS} if can_compare(route) else set()
            )
            if missing := expected - compared:
                detail = f"no page of layer {min(missing)} was left here to be compared"
                return Cause.WINDOW, detail
        return None

    def _wrong(self) -> Iterator[tuple[int, str]]:
        """What is wrong, as (layer, problem); nothing for layers that are right."""
        for (layer, part), (apart, own, allowed) in self._sums.items():
            excused = set[int]()
            if self._moved is not None:
                excused |= self._moved.excused(layer, allowed.token)
                excused |= self._moved.unsure(layer, allowed.token)
            states = self._unsure_states(layer)
            for far in self._far[layer]:
                if far not in states and (far.of_state or excused.isdisjoint(far.tokens)):
                    yield layer, far.problem
                    break
            else:
                if states:
                    continue
                if self._moved:
                    apart -= self._moved.apart(layer, part, excused)
                distance = relative(apart, own)
                if not distance <= allowed.layer:
                    where = f"layer {layer}, all its pages together, {_name(part)}"
                    yield layer, _differs(where, distance, allowed.layer)

    def _unsure(self) -> Iterator[str]:
        """Differences that other experts may have made, or that may be wrong KV."""
        for layer in self._far:
            for far in self._unsure_states(layer):
                yield f"a token shortly before this state met other experts here: {far.problem}"
        if self._moved is None:
            return
        for (layer, part), (_, _, allowed) in self._sums.items():
            for token in sorted(self._moved.unsure(layer, allowed.token)):
                yield (
                    f"layer {layer}, token {token}, {_name(part)}: KV is apart from what this engine computes, and not in "
                    f"the next layer that was compared; the layers between do not show whether it met other experts"
                )

    def _unsure_states(self, layer: int) -> list[_Far]:
        """The parts of a layer's state that other experts may have moved."""
        if self._moved is None or layer == 0:
            return []
        return [
            far for far in self._far[layer] if far.of_state and self._moved.moved_in(far.tokens)
        ]

    def __str__(self) -> str:
        if not self.pages:
            return "nothing was compared"
        layers: dict[Part, float] = {}
        for (_, part), (apart, own, _) in self._sums.items():
            layers[part] = max(relative(apart, own), layers.get(part, 0.0))
        pages, tokens, whole = (
            ", ".join(f"{_name(part)} {distance:.2g}" for part, distance in largest.items())
            for largest in (self.largest, self.largest_token, layers)
        )
        return (
            f"{self.pages} pages of layers compared, largest distance {pages}; "
            f"of a token {tokens}; of a whole layer {whole}"
        )


class AuditBook:
    """The results of audits, by producer. Outlives sessions and the agent's thread.

    A producer is known by its address, its epoch (drawn when it started) and its model. It must pass for each adapter and
    each path (transport, direction, codecs). KV that was wrong without an adapter makes all KV of the producer unusable. KV
    that was wrong with an adapter makes only KV with this adapter unusable. Distrust lasts until the producer restarts, or
    the adapter has other content.

    Args:
        experts: as in `Comparison`.
    """

    _MOST = 65536

    def __init__(self, *, experts: bool = False) -> None:
        self.experts = experts
        self._passed: dict[tuple[Source, int, bytes, str, str], None] = {}
        self._distrusted: dict[tuple[Source, int, str], str] = {}

    @property
    def distrusted(self) -> int:
        """The number of ranks of producers whose KV was found wrong, with any adapter or none."""
        return len({key[:2] for key in self._distrusted})

    def passed(self, producer: Counterpart, adapter: str) -> None:
        """An audit of this producer has passed, by its path and with this adapter."""
        self._passed[_key(producer, adapter)] = None
        while len(self._passed) > self._MOST:
            del self._passed[next(iter(self._passed))]

    def distrust(self, source: Source, epoch: int, adapter: str, why: str) -> None:
        """KV of this producer that was computed with this adapter (empty: with none) was wrong."""
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
        """Why KV of this producer cannot be loaded, as (cause, detail), or None.

        Args:
            compares: the load only compares.
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


def _far(layer: Distance, page_size: int, allowed: Tolerance) -> Iterator[_Far]:
    """Pages whose distance is too large, the furthest first; then tokens."""
    if layer.section:
        state = (layer.by_page[0], allowed.page), (layer.by_token[0], allowed.layer)
        for distance, most in state:
            if not distance <= most:
                where = f"layer {layer.layer}, {layer.section} of the state"
                reach = range(layer.span.stop - REACH, layer.span.stop)
                yield _Far(reach, _differs(where, distance, most), of_state=True)
        return
    pages = zip(layer.pages, layer.by_page, strict=True)
    worst = zip(layer.tokens, layer.by_token, strict=True)
    tokens = [(moved.token, moved.distance) for moved in layer.moved] or worst
    for number, distance in sorted(pages, key=itemgetter(1), reverse=True):
        if not distance <= allowed.page:
            where = f"layer {layer.layer}, page {number}, {_name(layer.part)}"
            covers = range(number * page_size, (number + 1) * page_size)
            yield _Far(covers, _differs(where, distance, allowed.page))
    for number, distance in sorted(tokens, key=itemgetter(1), reverse=True):
        if not distance <= allowed.token:
            where = f"layer {layer.layer}, token {number}, {_name(layer.part)}"
            yield _Far(range(number, number + 1), _differs(where, distance, allowed.token))


def relative(apart: float, own: float) -> float:
    """The relative distance, from the sums of squares of the differences and of what was computed here."""
    if not apart > 0:
        return 0.0 if apart == 0 else math.inf
    return math.sqrt(apart / own) if own > 0 else math.inf


def _name(part: Part) -> str:
    return "V" if part is Part.VALUE else "K"


def _differs(where: str, distance: float, allowed: float) -> str:
    return f"{where}: KV is {distance:.3g} apart from what this engine computes (at most {allowed:.2g})"
