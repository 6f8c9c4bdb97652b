# SPDX-License-Identifier: Apache-2.0
"""What engines gain by the pool, and what it costs them. Both sides of each figure take turns."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import mean
from typing import NamedTuple

from pd_bench.flow import two_steps
from pd_bench.handoff.pair import Prompts
from pd_bench.pool.engines import PoolEngines, first_token
from pd_bench.report import BenchError, Compared, Comparison, Say
from pd_bench.sample import Sample
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.tools.launch import VllmEngine

PROMPT_TOKENS = 3500
PREFIX_TOKENS = 2048
AT_ONCE = 16
SAVED_AT_ONCE = 2
"""Prompts that are computed at once while all their chunks are saved."""
_SUFFIX_TOKENS = 16
_NO_POOL = {"pool": {"read": False, "write": False}}


class EngineFindings(NamedTuple):
    tables: list[Compared]
    notes: list[str]


class EngineMeasurement:
    """One run of the engines' figures.

    Args:
        prompt_tokens: of the prompts whose first token is timed.
        runs: measured rounds.
        warm_ups: rounds before them, not counted.
    """

    def __init__(
        self, engines: PoolEngines, prompt_tokens: int, runs: int, warm_ups: int, say: Say
    ) -> None:
        self._engines = engines
        self._tokens = prompt_tokens
        self._runs, self._warm_ups = runs, warm_ups
        self._say = say
        self._prompts = Prompts(engines.writer.client)
        self._times: dict[str, list[float]] = defaultdict(list)
        self._otherwise = 0
        self._unsaved = 0

    def measure(self) -> EngineFindings:
        """Measure everything.

        Raises:
            BenchError: an engine computed what it should have loaded.
            HttpError: an engine refused a request.
        """
        engines = self._engines
        for reader in (engines.alike, engines.unlike):
            # An engine that has only loaded computes the last chunk of a hit, to learn how long that takes.
            first_token(reader.client, engines.body(self._prompts.make(self._tokens)))
        for measured in (self._first_tokens, self._saving, self._burst):
            for number in range(self._warm_ups + self._runs):
                times_of = measured(number)
                shown = ", ".join(f"{name} {value:.4g}" for name, value in times_of.items())
                warming = number < self._warm_ups
                self._say(f"{'warm-up' if warming else 'run'}: {shown}")
                if not warming:
                    for name, value in times_of.items():
                        self._times[name].append(value)
        notes = [f"prompts that were answered differently: {self._otherwise}"]
        notes.append(f"chunks that were not saved while prompts were computed: {self._unsaved}")
        return EngineFindings(self._tables(), notes)

    def _tables(self) -> list[Compared]:
        tokens = {"tokens": self._tokens}

        def compared(
            name: str, ours: str, theirs: str, bar: float | None = None, unit: str = "ms"
        ) -> Comparison:
            mine, other = (Sample(tuple(self._times[side])) for side in (ours, theirs))
            return Comparison(name, tokens, mine, other, unit, bar, unit == "tokens/s")

        readers = ("alike", "unlike")
        first = "first token, {}"
        burst = {"tokens": PREFIX_TOKENS, "at once": AT_ONCE}
        whole = Sample((1.0,) * self._runs)
        loads, own = (Sample(tuple(self._times[name])) for name in ("burst", "burst own"))
        reads = Sample(tuple(self._times["burst reads"]))
        return [
            ("computed", [compared(first.format(name), name, "cold") for name in readers]),
            ("own cache", [compared(first.format(name), name, f"{name} own") for name in readers]),
            ("handoff", [compared(first.format("unlike"), "unlike", "handoff", 1.0)]),
            ("no pool", [compared("prefill, all saved", "saving", "plain", 0.95, "tokens/s")]),
            ("own cache", [Comparison("first token, mean", burst, loads, own, "ms", 1.5)]),
            ("one", [Comparison("reads of a chunk", burst, reads, whole, "", 1.0)]),
        ]

    def _first_tokens(self, number: int) -> dict[str, float]:
        """The same prompt computed, loaded, and found in the engine's own cache; another one handed over."""
        engines, prompt = self._engines, self._prompts.make(self._tokens)
        self._write(prompt, self._tokens // CHUNK_TOKENS)
        times, answers = {}, set[str]()

        def ask(name: str, engine: VllmEngine) -> None:
            first_s, text = first_token(engine.client, engines.body(prompt))
            times[name] = first_s * 1e3
            answers.add(text)

        def read(name: str, engine: VllmEngine) -> None:
            before = engines.hits(engine)
            ask(name, engine)
            ask(f"{name} own", engine)
            loaded, expected = engines.hits(engine) - before, self._tokens // CHUNK_TOKENS
            if loaded < expected:
                raise BenchError(
                    f"{name} loaded {loaded:.0f} of {expected} chunks and computed the rest: its times are not those of a "
                    f"load. See {engine.log_path}"
                )

        def hand_over() -> None:
            body = engines.body(self._prompts.make(self._tokens), kv_transfer_params=_NO_POOL)
            times["handoff"] = (
                two_steps(engines.writer.client, engines.unlike.client, body).handoff_s * 1e3
            )

        _in_turn(
            number,
            [
                lambda: ask("cold", engines.plain),
                lambda: read("alike", engines.alike),
                lambda: read("unlike", engines.unlike),
                hand_over,
            ],
        )
        self._otherwise += len(answers) > 1
        return times

    def _saving(self, number: int) -> dict[str, float]:
        """Tokens a second of new prompts, with all chunks saved, and without a pool."""
        engines = self._engines
        prompts = [self._prompts.make(self._tokens) for _ in range(SAVED_AT_ONCE)]
        times = {}

        def compute(name: str, engine: VllmEngine) -> None:
            before, expected = engines.chunks(), len(prompts) * (self._tokens // CHUNK_TOKENS)
            began = time.perf_counter()
            _at_once(engine, (engines.body(prompt) for prompt in prompts))
            times[name] = len(prompts) * self._tokens / (time.perf_counter() - began)
            if engine is engines.writer:
                self._unsaved += expected - engines.saved(before, expected)

        turns = [
            lambda: compute("saving", engines.writer),
            lambda: compute("plain", engines.plain),
        ]
        _in_turn(number, turns)
        return times

    def _burst(self, number: int) -> dict[str, float]:
        """Requests at once on a prefix that is in the pool, then on the same prefix in the engine's own cache."""
        engines, prefix = self._engines, self._prompts.make(PREFIX_TOKENS)
        chunks = PREFIX_TOKENS // CHUNK_TOKENS
        self._write([*prefix, *self._prompts.make(1)], chunks)
        times = {}
        before = engines.hits(engines.alike)
        for name in ("burst", "burst own"):
            bodies = [
                engines.body(prefix + self._prompts.make(_SUFFIX_TOKENS)) for _ in range(AT_ONCE)
            ]
            times[name] = mean(_at_once(engines.alike, bodies)) * 1e3
        times["burst reads"] = (engines.hits(engines.alike) - before) / chunks
        if not times["burst reads"]:
            raise BenchError(f"alike loaded nothing. See {engines.alike.log_path}")
        return times

    def _write(self, prompt: list[int], chunks: int) -> None:
        """Have the writer compute a prompt, and wait until its chunks are in the pool."""
        before = self._engines.chunks()
        first_token(self._engines.writer.client, self._engines.body(prompt))
        if (saved := self._engines.saved(before, chunks)) < chunks:
            raise BenchError(f"the writer saved {saved} of {chunks} chunks")


def _in_turn(number: int, turns: Sequence[Callable[[], None]]) -> None:
    """Call all, in another order in every second round."""
    for turn in turns if number % 2 else reversed(turns):
        turn()


def _at_once(engine: VllmEngine, bodies: Iterable[dict[str, object]]) -> list[float]:
    """Seconds until the first token of each request, all sent at once."""
    waiting = list(bodies)
    with ThreadPoolExecutor(len(waiting)) as threads:
        return [
            first_s
            for first_s, _ in threads.map(lambda body: first_token(engine.client, body), waiting)
        ]
