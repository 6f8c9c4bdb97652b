# SPDX-License-Identifier: Apache-2.0
"""SGLang engines with a pool, beside one without SGLang's external linker. Each row can be measured alone.

HiCache cannot be compared on a CPU: it needs pinned memory, so such an engine ends at its start.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console

from pd_bench.harness import pids_of
from pd_bench.machine import cpu_seconds
from pd_bench.model import write_model, write_weights
from pd_bench.pool.engines import PooledEngines, first_token, until
from pd_bench.pool.folders import own_folder
from pd_bench.report import BenchError, Compared, Comparison, Say
from pd_bench.sample import Sample, single
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.settings import SHM_VARIABLE
from pd_connector.tools.launch import stop_services
from pd_connector.tools.launch.service import log_folder
from pd_connector.tools.launch.sglang import SglangEngine

STORED_TOKENS = 2000
AT_ONCE = 16
LOOKUP_LIMIT_MS = 1.0
MEMORY = "6GiB"
"""More than all runs write, so that nothing is evicted."""
NOT_COMPARED = "NOT COMPARED: HiCache with its file backend needs pinned memory; on a CPU SGLang ends at its start"
_BURST_TOKENS = 512
_SAVED_TOKENS = 1500
_SAVED_PROMPTS = 4
_PAGE_TOKENS = 64
_SAVES_S = 30.0
_TIMES = "PD_BENCH_LOOKUPS"
_LOOKUP_PLUGIN = f"""
import os, time

def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("pd_connector.sglang.pool.PoolLinker.lookup", timed, HookType.AROUND)

def timed(original, *args, **options):
    began_ns = time.thread_time_ns()
    found = original(*args, **options)
    taken_ns = time.thread_time_ns() - began_ns
    with open(os.environ[{_TIMES!r}], "a") as file:
        file.write(f"{{taken_ns}} {{len(found)}}\\n")
    return found
"""
"""A plug-in of SGLang's: it writes down what each look-up takes of its scheduler's thread."""


class Row(StrEnum):
    """A row of the report, or several that are measured together."""

    STORED = "stored"
    NO_HITS = "no-hits"
    LOOKUP = "lookup"
    THROUGHPUT = "throughput"
    CPU = "cpu"


_NEEDED = {
    Row.STORED: {"writer", "reader", "plain"},
    Row.NO_HITS: {"reader", "plain"},
    Row.LOOKUP: {"writer", "reader"},
    Row.THROUGHPUT: {"writer", "plain"},
    Row.CPU: {"writer", "reader"},
}
"""Engines of each row. No other engine is started."""


class SglangPool(PooledEngines):
    """The engines, ready. Made by `running`.

    Attributes:
        writer: saves what it computes.
        reader: loads, and saves nothing.
        plain: has no linker.
    """

    def __init__(
        self, model: Path, shm: Path, logs: Path, plugins: Path, rows: Collection[Row]
    ) -> None:
        super().__init__(shm)
        self.lookups = logs / "lookups"
        self._random = random.Random(1)

        def engine(name: str, pool: Mapping[str, Any] | None) -> SglangEngine:
            # An audit would take the first prompt of a run out of the measurement.
            config = {"audit": "off", "pool": dict(pool)} if pool else {}
            env = {SHM_VARIABLE: str(shm)}
            if name == "reader":
                env |= {"PYTHONPATH": str(plugins), _TIMES: str(self.lookups)}
            return SglangEngine(
                model,
                None,
                extra_config=config,
                page_size=_PAGE_TOKENS,
                name=name,
                # Otherwise an idle engine keeps a core busy, and CPU time is waiting time.
                args=("--random-seed", "1", "--sleep-on-idle"),
                env=env,
                log_path=logs / f"{name}.log",
            )

        self.writer = engine("writer", {"memory": MEMORY})
        self.reader = engine("reader", {"memory": MEMORY, "write": False})
        self.plain = engine("plain", None)
        needed = {name for row in rows for name in _NEEDED[row]}
        every = (self.writer, self.reader, self.plain)
        self.all = tuple(engine for engine in every if engine.name in needed)

    def prompt(self, tokens: int) -> list[int]:
        """A new prompt."""
        return self._random.choices(range(3, 250), k=tokens)

    def write(self, prompt: list[int]) -> None:
        """Have the writer compute a prompt, and wait until its chunks are in the pool."""
        target = self.chunks() + len(prompt) // CHUNK_TOKENS
        first_token(self.writer.client, body(prompt))
        until(
            lambda: self.chunks() >= target,
            _SAVES_S,
            f"the writer saved {self.chunks()} of {target} chunks; see {self.writer.log_path}",
        )

    def loaded(self) -> float:
        """Chunks that the reader has loaded. An engine brings its metrics up to date once a second."""
        time.sleep(2.0)
        return self.reader.metrics().total("pd_connector:pool_hits_total")


def body(prompt: list[int]) -> dict[str, Any]:
    """A request without `max_tokens`."""
    return {"model": "default", "prompt": prompt, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def running(rows: Collection[Row], console: Console) -> Iterator[SglangPool]:
    """The engines of these rows, with a pool of their own. At the end no engine and no chunk is left.

    Raises:
        PDConnectorError: SGLang is missing, or an engine did not start.
    """
    with contextlib.ExitStack() as stack:
        shm = stack.enter_context(own_folder())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-bench-sglang-")))
        logs = log_folder()
        console.print(f"engines' logs in {logs}", highlight=False)
        # SGLang's attention on a CPU computes all queries of a prompt again behind a cached prefix (1.5 s for 2,000
        # tokens of this model). With narrow layers nothing but that would be measured.
        model = write_model(folder / "model", wide=True)
        write_weights(model)  # the pool keeps nothing of weights that are not from files
        engines = SglangPool(model, shm, logs, _plugin(folder / "plugins"), rows)
        stack.callback(engines.close)
        stack.callback(stop_services, engines.all)
        for engine in engines.all:
            engine.start()
        engines.wait(console)
        yield engines


def _plugin(folder: Path) -> Path:
    info = folder / "pd_bench_lookups-0.dist-info"
    info.mkdir(parents=True)
    (folder / "pd_bench_lookups.py").write_text(_LOOKUP_PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pd_bench_lookups\nVersion: 0\n")
    entry = "[sglang.srt.plugins]\npd_bench_lookups = pd_bench_lookups:register\n"
    (info / "entry_points.txt").write_text(entry)
    return folder


def measure(
    engines: SglangPool, rows: Collection[Row], runs: int, warm_ups: int, say: Say
) -> list[Compared]:
    """Measure these rows. Both sides of each take turns.

    Raises:
        BenchError: an engine computed what it should have loaded, or did not save.
    """
    measured: dict[Row, Callable[[int], dict[str, float]]] = {
        Row.STORED: lambda number: _stored(engines, number),
        Row.NO_HITS: lambda number: _no_hits(engines, number),
        Row.THROUGHPUT: lambda number: _throughput(engines, number),
        Row.CPU: lambda number: _cpu(engines, number),
    }
    for engine in engines.all:  # the reader learns how long a chunk takes to compute
        first_token(engine.client, body(engines.prompt(STORED_TOKENS)))
    tables: list[Compared] = []
    for row, once in measured.items():
        if row not in rows:
            continue
        values: dict[str, list[float]] = defaultdict(list)
        for number in range(warm_ups + runs):
            sides = once(number)
            shown = ", ".join(f"{name} {value:.4g}" for name, value in sides.items())
            say(f"{row} {'warm-up' if number < warm_ups else 'run'}: {shown}")
            for name, value in sides.items() if number >= warm_ups else ():
                values[name].append(value)
        tables += _compared(row, values)
    if Row.LOOKUP in rows:
        tables.append(_lookups(engines, runs))
    return tables


def _compared(row: Row, values: Mapping[str, Sequence[float]]) -> list[Compared]:
    samples = {side: Sample(tuple(measured)) for side, measured in values.items()}
    ours, theirs = samples["ours"], samples["theirs"]
    tokens: dict[str, str | int] = {"tokens": STORED_TOKENS}
    if row is Row.STORED:
        name = "SGLang, first token, stored"
        cached = samples["cached"]
        return [
            ("computed", [Comparison(name, tokens, ours, theirs, "ms", 0.3)]),
            ("cached", [Comparison(f"{name} / cached", tokens, ours, cached, "ms", 1.1)]),
        ]
    if row is Row.NO_HITS:
        name = "SGLang, first token, no hits"
        return [("no linker", [Comparison(name, tokens, ours, theirs, "ms", 1.05)])]
    if row is Row.THROUGHPUT:
        burst: dict[str, str | int] = {"tokens": _BURST_TOKENS, "at once": AT_ONCE}
        name = "SGLang, all new and saved"
        return [("no linker", [Comparison(name, burst, ours, theirs, "tokens/s", 0.95, True)])]
    saved: dict[str, str | int] = {"tokens": _SAVED_TOKENS, "prompts": _SAVED_PROMPTS}
    name = "SGLang, CPU while all is saved"
    return [("nothing saved", [Comparison(name, saved, ours, theirs, "s", 1.05)])]


def _stored(engines: SglangPool, number: int) -> dict[str, float]:
    """Milliseconds until the first token of a stored prompt: loaded, computed, and from SGLang's own cache."""
    prompt = engines.prompt(STORED_TOKENS)
    engines.write(prompt)
    before = engines.loaded()
    times = _in_turn(number, engines, prompt, engines.reader)
    loaded, expected = engines.loaded() - before, STORED_TOKENS // CHUNK_TOKENS
    if loaded < expected:
        raise BenchError(
            f"the reader loaded {loaded:.0f} of {expected} chunks and computed the rest: its time is not that of a load. "
            f"See {engines.reader.log_path}"
        )
    return times | {"cached": first_token(engines.plain.client, body(prompt))[0] * 1e3}


def _no_hits(engines: SglangPool, number: int) -> dict[str, float]:
    """Milliseconds until the first token of a prompt that is nowhere."""
    return _in_turn(number, engines, engines.prompt(STORED_TOKENS), engines.reader)


def _in_turn(
    number: int, engines: SglangPool, prompt: list[int], ours: SglangEngine
) -> dict[str, float]:
    """Milliseconds until both engines' first token, in another order in every second round."""
    times: dict[str, float] = {}
    turns = [("ours", ours), ("theirs", engines.plain)]
    for name, engine in turns if number % 2 else reversed(turns):
        times[name] = first_token(engine.client, body(prompt))[0] * 1e3
    return times


def _throughput(engines: SglangPool, number: int) -> dict[str, float]:
    """Tokens a second of prompts that come at once and are all new."""
    prompts = [engines.prompt(_BURST_TOKENS) for _ in range(AT_ONCE)]
    rates: dict[str, float] = {}
    turns = [("ours", engines.writer), ("theirs", engines.plain)]
    for name, engine in turns if number % 2 else reversed(turns):
        began_s = time.perf_counter()
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(
                threads.map(lambda prompt, at=engine: first_token(at.client, body(prompt)), prompts)
            )
        rates[name] = AT_ONCE * _BURST_TOKENS / (time.perf_counter() - began_s)
    return rates


def _cpu(engines: SglangPool, number: int) -> dict[str, float]:
    """Seconds of CPU time of an engine that saves all that it computes, and of one that saves nothing."""
    used: dict[str, float] = {}
    turns = [("ours", engines.writer), ("theirs", engines.reader)]
    for name, engine in turns if number % 2 else reversed(turns):
        # Prompts of each side's own: the reader would load what the writer has saved.
        prompts = [engines.prompt(_SAVED_TOKENS) for _ in range(_SAVED_PROMPTS)]
        pids = pids_of([engine])
        before = cpu_seconds(pids)
        for prompt in prompts:
            if engine is engines.writer:
                engines.write(prompt)
            else:
                first_token(engine.client, body(prompt))
        used[name] = cpu_seconds(pids) - before
    return used


def _lookups(engines: SglangPool, runs: int) -> Compared:
    """CPU time of SGLang's thread in look-ups that name chunks, p99."""
    for _ in range(runs):
        prompt = engines.prompt(STORED_TOKENS)
        engines.write(prompt)
        first_token(engines.reader.client, body(prompt))
    lines = (line.split() for line in engines.lookups.read_text().splitlines())
    times = sorted(int(taken) / 1e6 for taken, named in lines if int(named))
    if not times:
        raise BenchError(f"the reader named no chunks. See {engines.reader.log_path}")
    worst = times[min(len(times) - 1, int(0.99 * len(times)))]
    params: dict[str, str | int] = {"tokens": STORED_TOKENS, "look-ups": len(times)}
    name = "SGLang, look-up, CPU, p99"
    return "limit", [Comparison(name, params, single(worst), single(LOOKUP_LIMIT_MS), "ms", 1.0)]
