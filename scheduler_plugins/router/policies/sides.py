# SPDX-License-Identifier: Apache-2.0
"""A policy of two rules: one chooses the prefill engine, the other the decode engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, ClassVar, NamedTuple, TypeVar

from scheduler_plugins.router.policies.base import (
    Decision,
    Defer,
    EngineView,
    Policy,
    PrefixSource,
    Reject,
    Request,
    Role,
    Route,
    View,
)

T = TypeVar("T")


class Choice(NamedTuple):
    """An engine, and its predicted time."""

    engine: EngineView
    expected_s: float = 0.0  # TTFT of a prefill engine, TPOT of a decode engine; 0: not predicted
    pull_from: PrefixSource | None = None

    @property
    def source(self) -> str | None:
        """Name of the engine or pool that the prefix is fetched from."""
        return self.pull_from.name if self.pull_from else None


def least(able: Sequence[T], rank: Callable[[T], Any], random: Random) -> T:
    """The item of the smallest rank. If several have that rank, one of them at random.

    Always taking the first of equals would send everything to one engine while all look alike.
    """
    ranks = [rank(item) for item in able]
    lowest = min(ranks)
    equal = [item for item, its in zip(able, ranks, strict=True) if its == lowest]
    return equal[0] if len(equal) == 1 else random.choice(equal)


class Rule(ABC):
    """Chooses among the engines of one side."""

    decode: ClassVar[str] = "least_tpot"
    """The decode rule that is used with this prefill rule if the user names none."""

    @abstractmethod
    def choose(
        self,
        request: Request,
        engines: Sequence[EngineView],
        view: View,
        now_s: float,
        random: Random,
    ) -> Choice | Reject | Defer:
        """Choose one of `engines`. The list is never empty and may differ from call to call."""


def chosen_in_time(
    decode: Rule,
    request: Request,
    engines: Sequence[EngineView],
    view: View,
    now_s: float,
    random: Random,
) -> Choice | Reject | Defer:
    """A rule's choice of the decode engine, rejected if its predicted TPOT breaks the request's SLO."""
    chosen = decode.choose(request, engines, view, now_s, random)
    if isinstance(chosen, Reject | Defer) or chosen.expected_s <= request.tpot_slo_s:
        return chosen
    # The batch shrinks as answers end, so the client should wait for one answer's length in steps.
    return Reject("tpot", request.max_tokens * chosen.expected_s)


class Sides(Policy):
    """Asks one rule for each side, and rejects requests whose SLO cannot be kept.

    If a rule predicts a time above the request's SLO, the request is rejected: by that rule no
    other engine does better.

    If an engine of role `WHOLE` is chosen for prefill, it decodes the request, too. An engine of
    role `BOTH` serves both sides of one request only if there is no other engine: it would be busy
    with both parts, and nothing would be handed over.
    """

    def __init__(self, prefill: Rule, decode: Rule) -> None:
        self._prefill = prefill
        self._decode = decode

    def decide(self, request: Request, view: View, now_s: float, random: Random) -> Decision:
        decode = view.engines(Role.DECODE)
        prefill = view.engines(Role.PREFILL)
        if len(decode) == 1 and decode[0].role is Role.BOTH:
            prefill = [engine for engine in prefill if engine.name != decode[0].name] or prefill
        p: Choice | None = None
        if prefill:
            chosen = self._prefill.choose(request, prefill, view, now_s, random)
            if isinstance(chosen, Reject | Defer):
                return chosen
            p = chosen
            if p.expected_s > request.ttft_slo_s:
                return Reject("ttft", p.expected_s - request.ttft_slo_s)
            if p.engine.role is Role.BOTH:
                decode = [engine for engine in decode if engine.name != p.engine.name]
            if p.engine.role is Role.WHOLE or not decode:
                return Route(None, p.engine.name, p.source)
        d = chosen_in_time(self._decode, request, decode, view, now_s, random)
        if isinstance(d, Reject | Defer):
            return d
        if p is None:
            return Route(None, d.engine.name, d.source)
        return Route(p.engine.name, d.engine.name, p.source)
