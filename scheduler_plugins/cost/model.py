# SPDX-License-Identifier: Apache-2.0
"""The cost model: the durations of prefill and decode on one engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple, Self

ASSUMED_TOKENS_PER_S = 10_000.0
"""The assumed prefill rate before any measurement. It scales every cost alike. So it only affects the meaning of lambda
and of an SLO until the first steps are known."""


class StepLoad(NamedTuple):
    """The work of one engine step that determines its duration."""

    tokens: int  # prompt tokens computed: sum of n - p over its prefill chunks
    pairs: int  # sum of n^2 - p^2 over the chunks; attention's work
    batch: int  # sequences that decoded one token
    context: int  # tokens in the caches of those sequences

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]], contexts: Iterable[int] = ()) -> Self:
        """Sum up the work of a step.

        Args:
            chunks: for each prefill in the step, the computed tokens before the step and after it.
            contexts: the tokens of each decoding sequence.
        """
        tokens = pairs = batch = context = 0
        for before, after in chunks:
            tokens += after - before
            pairs += after * after - before * before
        for length in contexts:
            batch += 1
            context += length
        return cls(tokens, pairs, batch, context)


_MOST = 1e9
"""No coefficient is larger. Predictions stay finite with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedCosts:
    """Cost in seconds of a step with both prompt tokens and decoding sequences, in addition to the terms `a` and `b` of
    its prompt tokens. All coefficients >= 0."""

    m0: float = 0.0
    """Seconds per step."""
    m1: float = 0.0
    """Seconds per decoding sequence and step."""
    m2: float = 0.0
    """Seconds per token of context and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Durations in seconds, all coefficients >= 0.

    Prefill of `n` tokens, with `p` of them cached, takes `a(n-p) + b(n^2-p^2) + c`, with `c` once for every step of the
    prefill. A decode step takes `d0 + d1*batch + d2*context`. A step that does both takes `a(n-p) + b(n^2-p^2) + m0 +
    m1*batch + m2*context`. Where such steps were not measured they count as the sum, with `c` instead of `d0`: `m0`,
    `m1` and `m2` are `c`, `d1` and `d2`. The form is the same as in DistServe and Mooncake (polynomial in the length),
    with the cached prefix subtracted in both terms.
    """

    a: float
    """Seconds per prompt token."""
    b: float = 0.0
    """Seconds per pair of tokens."""
    c: float = 0.0
    """Seconds per step that has prefill."""
    d0: float = 0.0
    """Seconds per step that only decodes."""
    d1: float = 0.0
    """Seconds per decoding sequence and step."""
    d2: float = 0.0
    """Seconds per token of context and step."""
    chunk_tokens: int = 0
    """The most prompt tokens in a step; 0: a prefill is never cut."""
    known: bool = True
    """If False, costs are token counts at an assumed or average rate."""
    mixed: MixedCosts | None = None
    """Steps that do both; None: they were not measured."""
    error: float | None = None
    """Mean of |predicted - measured| / measured over prefill steps that were not fitted; None if there are none."""

    @property
    def problem(self) -> str:
        """What is wrong with a coefficient that came from a file or an engine; empty: nothing."""
        for name in ("a", "b", "c", "d0", "d1", "d2", "chunk_tokens"):
            if not 0 <= (value := getattr(self, name)) <= _MOST:
                return f"{name} is {value}, must be from 0 to {_MOST:g}"
        for name in ("m0", "m1", "m2") if self.mixed else ():
            if not 0 <= (value := getattr(self.mixed, name)) <= _MOST:
                return f"{name} is {value}, must be from 0 to {_MOST:g}"
        return ""

    @classmethod
    def token_count(cls, tokens_per_s: float = ASSUMED_TOKENS_PER_S) -> CostModel:
        """The fallback: cost is proportional to the uncached tokens.

        Costs stay in seconds, so lambda, deficits and SLOs keep their meaning. Decode costs are unknown.
        """
        return cls(a=1.0 / tokens_per_s, known=False)

    @classmethod
    def mean(cls, models: Sequence[CostModel]) -> CostModel:
        """The assumed model of an unknown engine beside engines with these models. `models` is not empty."""
        values = (
            sum(getattr(model, name) for model in models) / len(models)
            for name in ("a", "b", "c", "d0", "d1", "d2")
        )
        a, b, c, d0, d1, d2 = values
        chunk = models[0].chunk_tokens
        return cls(a=a, b=b, c=c, d0=d0, d1=d1, d2=d2, chunk_tokens=chunk, known=False)

    @property
    def knows_decode(self) -> bool:
        """Whether the costs of decode steps are known."""
        return bool(self.d0 or self.d1 or self.d2)

    def prefill_s(self, tokens: int, cached: int = 0) -> float:
        """Time to prefill `tokens` tokens, the first `cached` of which need no computing."""
        fresh = tokens - cached
        steps = -(-fresh // self.chunk_tokens) if self.chunk_tokens else 1
        return fresh * (self.a + self.b * (tokens + cached)) + self.c * steps

    def step_tokens(self, overhead: float, most: int) -> int:
        """The fewest prompt tokens of a step whose fixed cost `c` is at most `overhead` times their cost; not more than
        `most`."""
        if not self.c:
            return 0
        return most if self.c >= overhead * self.a * most else ceil(self.c / (overhead * self.a))

    def decode_step_s(self, batch: int, context: int) -> float:
        """Time of one step that decodes `batch` sequences of `context` tokens together."""
        return self.d0 + self.d1 * batch + self.d2 * context

    def step_s(self, load: StepLoad) -> float:
        """Time of one engine step."""
        mixed = self.mixed if load.tokens and load.batch else None
        if mixed is not None:
            fixed_s, each_s, context_s = mixed.m0, mixed.m1, mixed.m2
        else:
            fixed_s, each_s, context_s = self.c if load.tokens else self.d0, self.d1, self.d2
        return (
            fixed_s
            + self.a * load.tokens
            + self.b * load.pairs
            + each_s * load.batch
            + context_s * load.context
        )
