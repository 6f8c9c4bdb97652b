# SPDX-License-Identifier: Apache-2.0
"""The engines that one request can still be sent to after earlier attempts failed, alone or as a pair (`Pairing`)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler_plugins.router.engines.circuit import DEATHS
from scheduler_plugins.router.engines.engine import BackendEngine, Role
from scheduler_plugins.router.engines.failures import (
    EngineFailedError,
    OverloadedError,
    RefusedError,
    StoppedError,
)
from scheduler_plugins.router.engines.kinds import Kind
from scheduler_plugins.router.engines.pool import EnginePool
from scheduler_plugins.router.handoff.engine_bodies import sglangs_own, vllms_own, why_one_kind
from scheduler_plugins.router.handoff.prefill import PrefillRefusedError
from scheduler_plugins.router.prompt import body, transfer
from scheduler_plugins.router.prompt.body import (
    COMPLETIONS,
    GENERATE,
    ONE_ENGINE,
    ONLY_VLLM,
    TOKENIZERS,
    BadRequestError,
)
from scheduler_plugins.router.routing.attempt import (
    AbleEngines,
    AllOverloadedError,
    Attempt,
    UnavailableError,
)


class Candidates:
    """The engines that have not failed one request."""

    def __init__(
        self, pool: EnginePool, attempts: int, fields: Mapping[str, Any], path: str
    ) -> None:
        """Send nothing yet.

        Args:
            attempts: most engines that may accept the request and fail it.
            fields: the request `as_completion`.
        """
        self._pool = pool
        self._attempts = attempts
        self._failed: dict[BackendEngine, EngineFailedError] = {}
        self._starts: dict[BackendEngine, int] = {}
        """Start number of each engine when it failed. After a restart it can be tried again."""
        self._pairing = Pairing(fields, endpoint=path if path in ONE_ENGINE else "")
        self._model = fields.get("model")
        self._only_vllm = path if path in ONLY_VLLM else ""
        self._sglangs = "" if self._only_vllm else sglangs_own(fields)
        self._vllms = not self._sglangs and vllms_own(fields)
        self._without_kv: dict[BackendEngine, EngineFailedError] = {}
        """Decode engines that are alive but got no KV for the prompt, with their last failure."""
        self._died = set[BackendEngine]()
        self._retry_after_s: dict[BackendEngine, int] = {}
        """Overloaded engines, with the seconds after which to ask again."""
        self._refusal: tuple[BackendEngine, RefusedError] | None = None
        """The prefill engine with the longest context among the engines that refused the request, and its answer."""
        self._accepted = 0
        self._group = ""  # empty: any

    def knows(self, tokens: int, group: str) -> None:
        """Take the prompt's length in tokens (0: not counted), and the group of engines that serve the request."""
        self._pairing.tokens, self._group = tokens, group

    def able(self, *, begun: bool = False) -> AbleEngines | None:
        """Engines for the next attempt; None if there are none, or all are overloaded.

        An overloaded engine's work goes to another engine of its role only. If it went to the other
        role, an overload of one side would spread to both.

        Args:
            begun: the client has a part of the answer, so it cannot be told to come back later. Then either role may
                take the work.
        """
        if self._accepted >= self._attempts:
            return None
        besides = self._others()
        besides |= {engine for engine in self._failed if engine.starts == self._starts[engine]}
        decode = self._pool.up(Role.DECODE, besides)
        prefill = self._pool.up(Role.PREFILL, besides)
        slow = self._pool.up(Role.CPU_PREFILL, besides)
        able = self._pairing.able_engines(decode, prefill, slow)
        if able is None or begun:
            return able
        if able.decode[0].role is Role.PREFILL:
            return None if self._overloaded(Role.DECODE) else able
        lacks_prefill = not able.prefill and able.cause != self._pairing.whole
        spreads = lacks_prefill and not any(engine.hands_over for engine in able.decode)
        return None if spreads and self._overloaded(Role.PREFILL) else able

    def _of_other_models(self) -> set[BackendEngine]:
        """Engines that do not serve the request's model. Empty if no engine serves it: then any engine can refuse
        it."""
        others = {
            engine
            for engine in self._pool.engines
            if engine.models and self._model not in engine.models
        }
        serves = (
            any(self._model in engine.models for engine in self._pool.engines) if others else False
        )
        return others if serves else set()

    def _others(self) -> set[BackendEngine]:
        """Engines that this request never uses."""
        return (
            self._of_other_models() | self._of_other_groups() | self._of_vllm() | self._of_sglang()
        )

    def _of_other_groups(self) -> set[BackendEngine]:
        engines, group = self._pool.engines, self._group
        if not group:
            return set()
        return {engine for engine in engines if engine.role_state.place.group != group}

    def _of_sglang(self) -> set[BackendEngine]:
        """SGLang engines that would answer a request with a field that only vLLM knows, if the router has vLLM
        engines; and one to an endpoint that only vLLM has."""
        prefers = self._vllms and any(engine.was_vllm for engine in self._pool.engines)
        if not (self._only_vllm or prefers):
            return set()
        sglangs = [engine for engine in self._pool.engines if engine.kind is Kind.SGLANG]
        return {engine for engine in sglangs if engine.serves(Role.DECODE) or engine.whole}

    def _of_vllm(self) -> set[BackendEngine]:
        """vLLM engines, if SGLang decodes and the request has a field that only SGLang knows."""
        if not self._sglangs:
            return set()
        engines = self._pool.engines
        # For an engine that is down, `whole` is its last known value.
        sided = [engine for engine in engines if engine.serves(Role.DECODE)]
        decode = {Kind.SGLANG if engine.whole else engine.kind for engine in sided}
        # The kind of an engine that is down is unknown. It may be the SGLang engine that decodes.
        down = None in decode and any(engine.kind is Kind.SGLANG for engine in engines)
        if Kind.SGLANG not in decode and not down:
            return set()
        return {engine for engine in engines if engine.kind is not Kind.SGLANG and not engine.whole}

    def other_prefill(self, besides: BackendEngine) -> bool:
        """Whether another prefill engine can be asked."""
        able = self.able()
        return able is not None and any(engine is not besides for engine in able.prefill)

    def has_other(self, *, begun: bool) -> bool:
        """Whether another engine can answer if the present one is given up. `begun`: as in `able`."""
        return self.able(begun=begun) is not None

    def longer(self, engine: BackendEngine) -> bool:
        """Whether an engine with a longer context than this one can answer."""
        able = self.able(begun=True) if engine.context_tokens else None
        answering = able.decode if able is not None else []
        return any(other.context_tokens > engine.context_tokens for other in answering)

    @property
    def refusal(self) -> RefusedError | None:
        """The refusal for the client, if prefill engines refuse its request and no engine answers without them; else
        None."""
        if self._refusal is None:
            return None
        prefill, refusal = self._refusal
        others = self._others()
        left = [engine for engine in self._pool.engines if engine not in others]
        longer = any(o.hands_over and o.context_tokens > prefill.context_tokens for o in left)
        return None if longer or any(engine.computes_prompts for engine in left) else refusal

    def failed(
        self, attempt: Attempt, failure: EngineFailedError, *, progressed: bool = False
    ) -> None:
        """An attempt failed.

        Args:
            progressed: the answer has become longer before. Such an attempt does not count: the request is not to
                blame.
        """
        if isinstance(failure, PrefillRefusedError):
            return  # the decode engine may be asked again
        if isinstance(failure, RefusedError):
            for engine in self._not_longer(attempt.answering):
                self._note(engine, failure)
            return
        prefill, lost = attempt.prefill, failure.answered and self.lost_prefill(attempt)
        if isinstance(failure, OverloadedError):
            self._lacks_room(attempt.answering, failure)
            lost = False
        blameless = lost or progressed or isinstance(failure, StoppedError)
        self._accepted += failure.accepted and not blameless
        able = lost or not attempt.answering.computes_prompts
        if prefill is not None and able and failure.answered:
            # The decode engine is alive and only lacks the KV, which another prefill engine may deliver.
            self._pairing.failures[prefill, attempt.answering] += _weight(failure)
            self._without_kv[attempt.answering] = failure
            return
        self._note(attempt.answering, failure)

    def _note(self, engine: BackendEngine, failure: EngineFailedError) -> None:
        self._failed[engine], self._starts[engine] = failure, engine.starts

    def prefill_failed(self, engine: BackendEngine, failure: EngineFailedError) -> None:
        """A prefill engine failed its copy of the request: the next attempt uses another one, if there is one."""
        self._pairing.failures[engine] += _weight(failure)
        if isinstance(failure, RefusedError):
            for each in self._not_longer(engine):
                self._pairing.failures[each] = MOST_FAILURES
            if self._refusal is None or self._refusal[0].context_tokens <= engine.context_tokens:
                self._refusal = engine, failure
        if failure.cause in DEATHS:
            self._died.add(engine)
        if isinstance(failure, OverloadedError):
            self._lacks_room(engine, failure)

    def _not_longer(self, engine: BackendEngine) -> list[BackendEngine]:
        """Engines of the same side whose context is not longer: they would refuse as well."""
        same = [other for other in self._pool.engines if other.hands_over is engine.hands_over]
        return [other for other in same if other.context_tokens <= engine.context_tokens]

    def lost_prefill(self, attempt: Attempt) -> bool:
        """Whether the attempt's prefill engine is gone, possibly with the KV."""
        prefill = attempt.prefill
        return prefill is not None and (not prefill.up or prefill in self._died)

    def exhausted(self) -> UnavailableError | AllOverloadedError | BadRequestError:
        """The error for the client when no engine is left."""
        if problem := self._never():
            return problem
        if self._retry_after_s and self._accepted < self._attempts:
            return AllOverloadedError(min(self._retry_after_s.values()))
        return UnavailableError(self._reasons())

    def _never(self) -> BadRequestError | None:
        """The error for a request that these engines can never answer, even if all are up; None: they can."""
        vllm, needs_one = self._of_vllm(), self._pairing.needs_one
        left = [engine for engine in self._pool.engines if engine not in vllm]
        if needs_one and left and not any(engine.computes_prompts for engine in left):
            return BadRequestError(needs_one)
        kinds = {engine.kind for engine in self._pool.engines if engine.serves(Role.PREFILL)}
        if self._only_vllm and left and all(engine.kind is Kind.SGLANG for engine in left):
            instead = f"{COMPLETIONS}, whose prompt takes token ids"
            return BadRequestError(
                f"{self._only_vllm}: only vLLM's engines have this endpoint, and the router has none; use "
                f"{instead if self._only_vllm == GENERATE else TOKENIZERS[1]}"
            )
        alone = any(engine.whole for engine in left)
        if vllm and not alone and not kinds & {Kind.SGLANG, None}:
            problem = f"{self._sglangs}: only SGLang's engines know it, and none of them computes prompts here"
            return BadRequestError(
                f"{problem}; leave it out, or add one with --prefill", self._sglangs
            )
        return None

    def _overloaded(self, role: Role) -> bool:
        """Whether an engine of this side has refused the request for lack of room."""
        return any(engine.serves(role) for engine in self._retry_after_s)

    def _lacks_room(self, engine: BackendEngine, failure: OverloadedError) -> None:
        self._retry_after_s[engine] = failure.retry_after_s
        engine.load.refused(asyncio.get_running_loop().time() + failure.retry_after_s)

    def _reasons(self) -> list[tuple[BackendEngine, str, str]]:
        """Every engine, with the reason why it did not serve this request."""
        reasons = list[tuple[BackendEngine, str, str]]()
        others = self._others()
        for engine in self._pool.engines:
            if failure := self._failed.get(engine) or self._without_kv.get(engine):
                reasons.append((engine, failure.cause, str(failure)))
            elif engine in others:
                continue
            elif engine.up and engine.draining:
                reasons.append((engine, "draining", "it drains or leaves"))
            elif engine.up:
                reasons.append((engine, "not_tried", f"not tried: {self._untried()}"))
            else:
                reasons.append((engine, "down", engine.reason))
        return reasons

    def _untried(self) -> str:
        """Why an engine that is up was not asked."""
        if self._accepted >= self._attempts:
            return f"{self._attempts} engines had failed (setting attempts)"
        if self.able(begun=True) is not None:
            return "the retry budget was used up"
        return "it needs an engine of the other side, and none is left"


def _weight(failure: EngineFailedError) -> int:
    """The number of failures that this failure counts as. An engine that reports an internal error may succeed the next
    time. An engine that is gone, refuses the request or lacks room does not get the request again."""
    repeatable = failure.answered and not isinstance(failure, OverloadedError)
    return 1 if repeatable else MOST_FAILURES


def _pairs(group: AbleEngines) -> bool:
    """Whether an engine can hand KV over to another one."""
    return any(p is not d for p in group.prefill for d in group.decode)


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
            its handoff. Failed engines and pairs are tried again if nothing else is left, up to `MOST_FAILURES` in all.
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
        # If no context is long enough, any engine can refuse the request.
        decode = [engine for engine in decode if self._fits(engine)] or decode
        groups: dict[tuple[BackendEngine, ...], AbleEngines] = {}
        for engine in decode:
            able, cause = self._prefills_for(engine, prefill, failures)
            if able or self._answers_alone(engine):
                groups.setdefault(tuple(able), AbleEngines([], able, cause)).decode.append(engine)
        if len(groups) > 1 and not cpu_prefill and not any(map(_pairs, groups.values())):
            # An engine of both sides does not hand over to itself, so each of these answers alone.
            cause = next((group.cause for group in groups.values() if not group.prefill), "policy")
            return AbleEngines([each for g in groups.values() for each in g.decode], [], cause)
        if groups:
            chosen = max(groups.values(), key=self._rank)
            if not (chosen.prefill and cpu_prefill):
                return chosen
            able_prefills = [
                self._prefills_for(engine, cpu_prefill, failures)[0] for engine in chosen.decode
            ]
            slow = [
                candidate
                for candidate in cpu_prefill
                if all(candidate in able for able in able_prefills)
            ]
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
        addressable = [engine for engine in prefill if engine.address is not None]
        left = [
            engine
            for engine in addressable
            if max(self.failures[engine], self.failures[engine, decode]) < failures
        ]
        long = [engine for engine in left if self._fits(engine)]
        if left and not long and decode.computes_prompts:
            return [], "too_long"
        left = long or left
        kind = decode.kind or Kind.VLLM
        one_kind = self.whole or self._one_kind[kind]
        fitting = [e for e in left if (e.kind or Kind.VLLM) is kind or one_kind is None]
        if fitting:
            return fitting, ""
        if left:
            return [], str(one_kind)
        if addressable:
            return [], "prefill_refused"
        return [], "no_address" if prefill else "no_prefill"
