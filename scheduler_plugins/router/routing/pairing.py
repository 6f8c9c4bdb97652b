# SPDX-License-Identifier: Apache-2.0
"""Which engines can answer one request as a pair, and which can answer alone."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.handoff.engine_bodies import why_one_kind
from scheduler_plugins.router.prompt import body, transfer
from scheduler_plugins.router.routing.attempt import AbleEngines

MOST_FAILURES = 2
"""A prefill engine or a pair does not get a request again after this many failures of it."""


class Pairing:
    """What one request allows, and its failures so far.

    Attributes:
        whole: why one engine should answer the request alone, as a metric label; None if a pair can.
        needs_one: the part of the request that only an engine which computes its prompt can answer, as a text for the
            client; empty: there is none.
        tokens: length of the prompt; 0: not counted.
        failures: how often each prefill engine has failed its copy of the request, and each pair (prefill, decode)
            its handoff. What has failed is asked again if nothing else is left, up to `MOST_FAILURES` in all.
    """

    def __init__(self, request: Mapping[str, Any], *, endpoint: str) -> None:
        """`endpoint`: path of an endpoint without transfers, which one engine answers; empty for all others."""
        self._endpoint = endpoint
        self.whole = "endpoint" if endpoint else transfer.why_not_disaggregated(request)
        self.needs_one = transfer.needs_one_engine(request, endpoint)
        self.tokens = 0
        self.failures = Counter[BackendEngine | tuple[BackendEngine, BackendEngine]]()
        self._one_kind = {kind: why_one_kind(request, kind) for kind in Kind}

    def able_engines(
        self,
        decode: Sequence[BackendEngine],
        prefill: Sequence[BackendEngine],
        cpu_prefill: Sequence[BackendEngine],
    ) -> AbleEngines | None:
        """Engines for the next attempt; each decode engine can work with each prefill engine. None if no engine can
        answer.

        Args:
            decode, prefill, cpu_prefill: engines that are up and have not failed the request.
        """
        once = self._able_engines(decode, prefill, cpu_prefill, 1)
        return once or self._able_engines(decode, prefill, cpu_prefill, MOST_FAILURES)

    def _able_engines(
        self,
        decode: Sequence[BackendEngine],
        prefill: Sequence[BackendEngine],
        cpu_prefill: Sequence[BackendEngine],
        failures: int,
    ) -> AbleEngines | None:
        """As `able_engines`, with prefill engines and pairs that have failed less than `failures` times."""
        if self._endpoint:
            decode = [engine for engine in decode if self._answers_alone(engine)]
        # If no context is long enough, any engine can tell the client.
        decode = [engine for engine in decode if self._fits(engine)] or decode
        groups: dict[tuple[BackendEngine, ...], AbleEngines] = {}
        for engine in decode:
            able, cause = self._prefills_for(engine, prefill, failures)
            if able or self._answers_alone(engine):
                groups.setdefault(tuple(able), AbleEngines([], able, cause)).decode.append(engine)
        if groups:
            chosen = max(groups.values(), key=self._rank)
            if not (chosen.prefill and cpu_prefill):
                return chosen
            known = [
                self._prefills_for(engine, cpu_prefill, failures)[0] for engine in chosen.decode
            ]
            slow = [one for one in cpu_prefill if all(one in able for able in known)]
            return chosen._replace(cpu_prefill=slow)
        alone = [engine for engine in prefill if self._answers_alone(engine)]
        cause = self._prefills_for(decode[0], prefill, failures)[1] if decode else "no_decode"
        return AbleEngines(alone, [], cause) if alone else None

    def _fits(self, engine: BackendEngine) -> bool:
        """Whether the prompt and one more token fit into its context. An unknown context counts as fitting."""
        return not engine.context_tokens or self.tokens < engine.context_tokens

    def _answers_alone(self, engine: BackendEngine) -> bool:
        return engine.computes_prompts or self._endpoint in body.TOKENIZERS

    def _rank(self, group: AbleEngines) -> tuple[bool, int]:
        """Sort key of a group. First, a request that should not be split prefers a single engine, and any other a
        pair. Then the group with more decode engines wins."""
        as_wanted = bool(group.prefill) is (self.whole is None)
        return as_wanted, len(group.decode)

    def _prefills_for(
        self, decode: BackendEngine, prefill: Sequence[BackendEngine], failures: int
    ) -> tuple[list[BackendEngine], str]:
        """The prefill engines that can work with a decode engine, and the reason if there are none (else empty)."""
        if self.whole is not None and (self._answers_alone(decode) or self.needs_one):
            return [], self.whole
        if decode.whole:
            return [], "whole"
        known = [engine for engine in prefill if engine.address is not None]
        left = [
            engine
            for engine in known
            if max(self.failures[engine], self.failures[engine, decode]) < failures
        ]
        long = [engine for engine in left if self._fits(engine)]
        if left and not long and decode.computes_prompts:
            return [], "too_long"
        left = long or left
        kind = decode.kind or Kind.VLLM
        one_kind = self.whole or self._one_kind[kind]
        found = [e for e in left if (e.kind or Kind.VLLM) is kind or one_kind is None]
        if found:
            return found, ""
        if left:
            return [], str(one_kind)
        if known:
            return [], "prefill_refused"
        return [], "no_address" if prefill else "no_prefill"
