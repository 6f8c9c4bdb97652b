# SPDX-License-Identifier: Apache-2.0
"""`bench handoff`: the time from a finished prefill to the first decoded token, beside a baseline.

All pairs of engines run at once and are measured in turn, A B A B, so that all see the same noise.
A pair that keeps cores busy while it has nothing to do (NIXL's progress threads poll) would slow
the others: it is frozen while they are measured, and spins as it likes while it is measured itself.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pd_connector.bench.machine import Noise
from pd_connector.bench.pair import Contender, Pair, Prompts, Run
from pd_connector.bench.report import Comparison, Param
from pd_connector.bench.sample import Sample

BASELINE = Contender("NixlConnector", "NixlConnector")

BAR_FROM_TOKENS = 3500
BAR = 1.0
"""From this prompt length on, our handoff may take at most this share of the baseline's."""

SPINNING_CORES = 0.2
"""A pair that uses more than this at rest spins. One that waits uses a hundredth."""
LOOK_S = 3.0
"""How long to look at engines at rest."""
REST_WINDOW_S = 0.2
REST_CORES = 0.15
"""A pair has come to rest when it uses no more than this above what it uses at rest."""
REST_TIMEOUT_S = 10.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Findings:
    """Everything a measurement tells."""

    comparisons: list[Comparison]
    restless: int  # runs that began although some engine was not at rest
    rest_cores: dict[str, float]  # what each pair uses while it has nothing to do
    frozen: list[str]  # pairs that spin, and were frozen while others were measured
    others_cores: float  # used by programs that do not belong to the measurement
    unlike: int  # rounds in which two pairs answered differently


class Measurement:
    """Pairs of running engines, the baseline's first.

    Args:
        pairs: all of them answer already.
        runs: measured rounds for each prompt length; in a round every pair runs once.
        warm_ups: rounds before them, not counted.
        say: gets a line whenever there is something to tell.
    """

    def __init__(self, pairs: Sequence[Pair], runs: int, warm_ups: int, say: Say) -> None:
        self._pairs = pairs
        self._runs = runs
        self._warm_ups = warm_ups
        self._say = say
        self._prompts = Prompts(pairs[0].engines[0].client)
        self._restless = 0
        self._unlike = 0
        self._rest_cores = self._look()

    def measure(self, prompt_tokens: Sequence[int]) -> Findings:
        """Measure all prompt lengths.

        Raises:
            BenchError: a decode engine computed a prompt itself.
            HttpError: an engine refused a request.
        """
        noise = Noise([pid for pair in self._pairs for pid in pair.pids])
        for pair in self._pairs:
            pair.begin()
        comparisons = []
        for tokens in prompt_tokens:
            comparisons += self._compare(tokens, self._rounds(tokens))
        for pair in self._pairs:
            pair.resume()
            pair.check()
        names = [pair.contender.name for pair in self._pairs]
        return Findings(
            comparisons,
            self._restless,
            dict(zip(names, self._rest_cores, strict=True)),
            [name for name, spins in zip(names, self._spinning, strict=True) if spins],
            noise.cores(),
            self._unlike,
        )

    def _rounds(self, tokens: int) -> list[list[Run]]:
        """Runs of each pair."""
        found: list[list[Run]] = [[] for _ in self._pairs]
        for number in range(self._warm_ups + self._runs):
            prompt, salt = self._prompts.make(tokens), uuid.uuid4().hex
            runs = [self._run(index, prompt, salt) for index in range(len(self._pairs))]
            warming = number < self._warm_ups
            label = "warm-up" if warming else f"run {number - self._warm_ups + 1}/{self._runs}"
            times = ", ".join(
                f"{pair.contender.name} {run.handoff_s * 1e3:.1f} ms"
                for pair, run in zip(self._pairs, runs, strict=True)
            )
            self._say(f"{tokens:,} tokens, {label}: {times}")
            if len({run.text for run in runs}) > 1:
                self._unlike += 1
            if not warming:
                for runs_of_pair, run in zip(found, runs, strict=True):
                    runs_of_pair.append(run)
        return found

    def _run(self, index: int, prompt: Sequence[int], salt: str) -> Run:
        for other, pair in enumerate(self._pairs):
            if self._spinning[other] and other != index:
                pair.pause()
        self._pairs[index].resume()
        self._rest()
        return self._pairs[index].run(prompt, salt)

    @property
    def _spinning(self) -> list[bool]:
        return [cores > SPINNING_CORES for cores in self._rest_cores]

    def _look(self) -> list[float]:
        """Cores that each pair uses now; none of them has anything to do."""
        before = [pair.cpu_seconds() for pair in self._pairs]
        started = time.monotonic()
        time.sleep(LOOK_S)
        after = [pair.cpu_seconds() for pair in self._pairs]
        passed_s = time.monotonic() - started
        return [(b - a) / passed_s for a, b in zip(before, after, strict=True)]

    def _rest(self) -> None:
        """Wait until no engine works any more."""
        allowed = [cores + REST_CORES for cores in self._rest_cores]
        deadline = time.monotonic() + REST_TIMEOUT_S
        while True:
            before = [pair.cpu_seconds() for pair in self._pairs]
            started = time.monotonic()
            time.sleep(REST_WINDOW_S)
            after = [pair.cpu_seconds() for pair in self._pairs]
            now = time.monotonic()
            used = [(b - a) / (now - started) for a, b in zip(before, after, strict=True)]
            if all(u <= most for u, most in zip(used, allowed, strict=True)):
                return
            if now > deadline:
                self._restless += 1
                cores = ", ".join(f"{u:.2f}" for u in used)
                self._say(f"engines do not come to rest: the pairs use {cores} cores")
                return

    def _compare(self, tokens: int, found: list[list[Run]]) -> list[Comparison]:
        baseline, *ours = found
        comparisons = []
        for what, (pair, runs) in itertools.product(
            ("handoff", "prefill"), zip(self._pairs[1:], ours, strict=True)
        ):
            bar = BAR if what == "handoff" and tokens >= BAR_FROM_TOKENS else None
            params: dict[str, Param] = {"prompt_tokens": tokens, "transport": pair.contender.name}
            sides = [Sample(tuple(getattr(r, f"{what}_s") for r in s)) for s in (runs, baseline)]
            scaled = [side.scaled(1e3) for side in sides]
            comparisons.append(Comparison(what, params, scaled[0], scaled[1], "ms", bar))
        return comparisons
