# SPDX-License-Identifier: Apache-2.0
"""Which engines may answer one request together, and which alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler_plugins.router.engines.engine import BackendEngine
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.handoff.engine_bodies import why_one_kind
from scheduler_plugins.router.prompt import body
from scheduler_plugins.router.routing.attempt import AbleEngines


class Pairing:
    """What one request allows, and what it has met.

    Attributes:
        whole: why one engine should answer the request alone, as a metric label; None if it need not.
        needs_one: what of the request only an engine that computes its prompt answers, as a text for the client; empty
            for nothing.
        tokens: of the prompt; 0: nobody has counted.
        no_prefill: prefill engines that have failed the request's copy.
        failed: pairs, prefill and decode, whose decode engine has not got the KV.
    """

    def __init__(self, request: Mapping[str, Any], *, endpoint: str = "") -> None:
        """`endpoint`: path of one that knows no transfers, so that one engine answers; empty for others."""
        self._endpoint = endpoint
        self.whole = "endpoint" if endpoint else body.why_not_disaggregated(request)
        self.needs_one = body.needs_one_engine(request, endpoint)
        self.tokens = 0
        self.no_prefill: set[BackendEngine] = set()
        self.failed: set[tuple[BackendEngine, BackendEngine]] = set()
        self._one_kind = {kind: why_one_kind(request, kind) for kind in Kind}

    def able_engines(
        self,
        decode: Sequence[BackendEngine],
        prefill: Sequence[BackendEngine],
        cpu_prefill: Sequence[BackendEngine] = (),
    ) -> AbleEngines | None:
        """Engines for the next attempt, any one of which can work with any other. None if no engine
        can answer.

        Args:
            decode, prefill, cpu_prefill: those that are up, and have not failed the request.
        """
        if self._endpoint:
            decode = [engine for engine in decode if self._answers_alone(engine)]
        # Where none is long enough, the one that is asked says so.
        decode = [engine for engine in decode if self._fits(engine)] or decode
        groups: dict[tuple[BackendEngine, ...], AbleEngines] = {}
        for engine in decode:
            able, cause = self._prefills_for(engine, prefill)
            if able or self._answers_alone(engine):
                groups.setdefault(tuple(able), AbleEngines([], able, cause)).decode.append(engine)
        if groups:
            chosen = max(groups.values(), key=self._rank)
            if not (chosen.prefill and cpu_prefill):
                return chosen
            known = [self._prefills_for(engine, cpu_prefill)[0] for engine in chosen.decode]
            slow = [one for one in cpu_prefill if all(one in able for able in known)]
            return chosen._replace(cpu_prefill=slow)
        alone = [engine for engine in prefill if self._answers_alone(engine)]
        cause = self._prefills_for(decode[0], prefill)[1] if decode else "no_decode"
        return AbleEngines(alone, [], cause) if alone else None

    def _fits(self, engine: BackendEngine) -> bool:
        """Whether the prompt and one token more fit into its context, as far as is known."""
        return not engine.context_tokens or self.tokens < engine.context_tokens

    def _answers_alone(self, engine: BackendEngine) -> bool:
        return engine.computes_prompts or self._endpoint in body.TOKENIZERS

    def _rank(self, group: AbleEngines) -> tuple[bool, int]:
        """A request that should not be cut in two goes to an engine that works alone, any other to
        a pair; and to the side where more engines share the work."""
        as_wanted = bool(group.prefill) is (self.whole is None)
        return as_wanted, len(group.decode)

    def _prefills_for(
        self, decode: BackendEngine, prefill: Sequence[BackendEngine]
    ) -> tuple[list[BackendEngine], str]:
        """The prefill engines that can work with a decode engine; and why there is none, empty if
        there are any."""
        if self.whole is not None and (self._answers_alone(decode) or self.needs_one):
            return [], self.whole
        if decode.whole:
            return [], "whole"
        known = [engine for engine in prefill if engine.address is not None]
        left = [
            engine
            for engine in known
            if engine not in self.no_prefill and (engine, decode) not in self.failed
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
