# SPDX-License-Identifier: Apache-2.0
"""Engines whose pool reaches another host: two network namespaces with a link of 1 Gbit/s between them, 10 Gbit/s for `stopped`.

    host a: engines that compute, the far store [ namespace ] === link === [ namespace ] host b: engines that load

| row | ours | beside it |
|---|---|---|
| `link`, `link-int8` | first token of a prompt that host a has computed, brought through Mooncake | vLLM's MooncakeStoreConnector |
| `prefill` | CPU time of an engine for each token, all chunks put into Redis | the same without a carrier |
| `stopped` | first token while Redis, Mooncake's master or its node stands still | an engine without a far store |
"""

from __future__ import annotations

import contextlib
import json
import secrets
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from pd_bench.handoff.pair import Prompts
from pd_bench.harness import VLLM, pids_of, require
from pd_bench.machine import cpu_seconds
from pd_bench.netns import Bed, Namespace
from pd_bench.pool.engines import begun, first_token, until, wait_for_pool
from pd_bench.pool.folders import own_folder
from pd_bench.report import BenchError, Compared, Comparison, Say
from pd_bench.sample import Sample, single
from pd_bench.serve.hosts import (
    MOONCAKE,
    REDIS,
    BenchHost,
    Server,
    carrier_command,
    counted,
    key_file,
    need_namespaces,
    need_store,
)
from pd_connector.config import KEY_VARIABLE
from pd_connector.pool.keys import CHUNK_TOKENS
from pd_connector.pool.load_breakeven import FIRST_PAUSE_S
from pd_connector.pool.settings import SHM_VARIABLE, memory_folder
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space
from pd_connector.tools.launch import VllmEngine, wait_all
from pd_connector.tools.launch.service import log_folder

LINK, LINK_INT8, PREFILL, STOPPED = "link", "link-int8", "prefill", "stopped"
ROWS = (LINK, LINK_INT8, PREFILL, STOPPED)
BARS = {LINK: 1.0, LINK_INT8: 0.65, PREFILL: 1.05, STOPPED: 1.05}
LINK_MBIT = 1000.0
FAST_LINK_MBIT = 10_000.0
"""The link of `stopped`: over the slower link these short prompts take as long to load as to compute, so they would not be loaded."""
_MEMORY = "3GiB"
_LENT, _LEAST_LENT = 2 << 30, 16 << 20
_STARTS_S, _PUTS_S = 180.0, 60.0
_SAVES_S = 3.0
"""After the answer of an engine with MooncakeStoreConnector, which does not say when all is stored."""
_AT_ONCE = 3
"""Prompts of one run of `prefill`."""
_STOPPED_REQUESTS, _BEFORE = 12, 4
"""Requests to each engine while a server stands still; the first ones can wait."""
_STOPPED_TOKENS, _WARM_UPS = 2048, 3
_LONGEST_WAIT_S = 0.25
_LOOKS_AGAIN_S = 60.0
"""After a fault an engine leaves the far store alone for at most 30 s."""


class _Engines(NamedTuple):
    """For `begun`."""

    all: Sequence[VllmEngine]


class _Site:
    """Two hosts with engines of one row, which are ready.

    Attributes:
        hosts: with a pool of ours; their carriers are not started.
    """

    def __init__(self, stack: ExitStack, row: str, sides: Sequence[Namespace], shm: Path) -> None:
        self._stack, self._row, self.sides, self._shm = stack, row, sides, shm
        self.hosts: list[BenchHost] = []
        self.rivals: list[VllmEngine] = []
        self.model = ""

    def make(self, model: Path, _: Path, logs: Path) -> _Engines:
        """The engines of the row, not started."""
        self.logs = logs
        key, secret = key_file(logs), secrets.token_hex(32)
        for name, side in zip("ab", self.sides, strict=True):
            shm = self._shm / name
            shm.mkdir()
            engine = VllmEngine(
                model,
                "kv_both",
                "PDConnector",
                # An audit would take the first prompt of a run out of the measurement.
                {"transports": ["tcp"], "audit": "off", "pool": self._pool()},
                name=f"ours-{name}",
                env={
                    SHM_VARIABLE: str(shm),
                    KEY_VARIABLE: secret,
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
                },
                log_path=logs / f"ours-{name}.log",
                namespace=side,
            )
            host = BenchHost(
                name, side, shm, [engine], carrier_command(key), "", logs / f"carrier-{name}.log"
            )
            self._stack.callback(host.kill_carrier)
            self.hosts.append(host)
        if self._row in (LINK, LINK_INT8):
            self.rivals = [self._rival(model, place) for place in range(2)]
        return _Engines([*(host.engines[0] for host in self.hosts), *self.rivals])

    def _pool(self) -> Mapping[str, str]:
        return {"memory": _MEMORY, "codec": "int8" if self._row == LINK_INT8 else "raw"}

    def _rival(self, model: Path, place: int) -> VllmEngine:
        """An engine with MooncakeStoreConnector. What it has computed is on the first host: the other one lends the least
        that it can."""
        name = f"mooncake-{'ab'[place]}"
        config = self.logs / f"{name}.json"
        config.write_text(
            json.dumps(
                {
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": f"{self.sides[0].address}:{self.server.port}",
                    "protocol": "tcp",
                    "device_name": "",
                    "global_segment_size": _LEAST_LENT if place else _LENT,
                    "local_buffer_size": 512 << 20,
                }
            )
        )
        return VllmEngine(
            model,
            "kv_both",
            "MooncakeStoreConnector",
            name=name,
            env={
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "MOONCAKE_CONFIG_PATH": str(config),
                "PYTHONHASHSEED": "0",  # vLLM's hashes of blocks are then alike in all processes
            },
            log_path=self.logs / f"{name}.log",
            namespace=self.sides[place],
        )

    def serve(self, kind: str, logs: Path) -> None:
        """Start the far store, all of whose memory is on the first host."""
        self.server = Server(kind, self.sides, logs, lends=self.sides[:1], lent=_LENT)
        self._stack.callback(self.server.kill)
        self.server.start()

    def carry(self, *hosts: BenchHost) -> None:
        """Start the carriers of these hosts."""
        for host in hosts:
            host.far = self.server.address(host.side)
            host.start_carrier()
        for host in hosts:
            until(
                lambda host=host: _is_well(host),  # type: ignore[misc]
                _STARTS_S,
                f"the carrier of host {host.name} does not reach the far store; see {host.log}",
            )

    def body(self, prompt: list[int]) -> dict[str, Any]:
        """A request without `max_tokens`."""
        return {"model": self.model, "prompt": prompt, "temperature": 0, "ignore_eos": True}

    def first_s(self, engine: VllmEngine, prompt: list[int]) -> tuple[float, str]:
        """Seconds to the first token, and the answer."""
        return first_token(engine.client, self.body(prompt))

    def wait_saved(self, host: BenchHost, chunks: int) -> None:
        """Wait until a host has this many chunks: its engine saves after its answer, too. Raises BenchError."""
        engine = host.engines[0]
        problem = f"{engine.name} has not saved all chunks; see {engine.log_path}"
        until(lambda: _chunks(host) >= chunks, _PUTS_S, problem)

    def put_all(self, host: BenchHost) -> None:
        """Wait until all chunks of a host are in the far store. Raises BenchError."""
        problem = f"host {host.name} has not put its chunks within {_PUTS_S:g} s; see {host.log}"
        until(host.has_put_all, _PUTS_S, problem)


def check_possible(row: str) -> None:
    """Raises BenchError that names what the row needs and this machine lacks."""
    require(VLLM)
    if row != PREFILL:
        need_store(MOONCAKE)
    if row in (PREFILL, STOPPED):
        need_store(REDIS)
    need_namespaces(f"--far {row}")


@contextlib.contextmanager
def _running(row: str, kind: str, console: Console) -> Iterator[_Site]:
    """Engines of a row. At the end no process, namespace or chunk is left."""
    with ExitStack() as stack:
        rate = FAST_LINK_MBIT if row == STOPPED else LINK_MBIT
        sides = stack.enter_context(Bed(rate)).namespaces
        shm = stack.enter_context(own_folder())
        site = _Site(stack, row, sides, shm)
        if row != STOPPED:
            site.serve(kind, log_folder())
        engines = stack.enter_context(begun(site.make, console))
        wait_all(engines.all, console=console)
        wait_for_pool((host.engines[0] for host in site.hosts), _STARTS_S)
        site.model = site.hosts[0].engines[0].client.model()
        yield site


def measure(
    row: str, prompt_tokens: int, runs: int, warm_ups: int, console: Console, say: Say
) -> list[Compared]:
    """Measure one row.

    Raises:
        BenchError: it cannot be run, an answer differs, or nothing was loaded.
        PDConnectorError: an engine did not start.
    """
    kind = REDIS if row == PREFILL else MOONCAKE
    with _running(row, kind, console) as site:
        prompts = Prompts(site.hosts[0].engines[0].client)
        if row == PREFILL:
            return _prefill(site, prompts, prompt_tokens, runs, warm_ups, say)
        if row == STOPPED:
            return _stopped(site, prompts, min(prompt_tokens, _STOPPED_TOKENS), say)
        return _link(site, row, prompts, prompt_tokens, runs, warm_ups, say)


def _link(
    site: _Site, row: str, prompts: Prompts, tokens: int, runs: int, warm_ups: int, say: Say
) -> list[Compared]:
    a, b = site.hosts
    site.carry(a, b)
    for engine in (b.engines[0], site.rivals[1]):
        # An engine that has only loaded computes the last chunk of a hit, to learn how long that takes.
        site.first_s(engine, prompts.make(tokens))
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    loaded: dict[str, list[float]] = {"ours": [], "theirs": []}

    def run(name: str, prompt: list[int]) -> tuple[float, float]:
        """Milliseconds to the first token, and tokens loaded."""
        writer, reader = (a.engines[0], b.engines[0]) if name == "ours" else site.rivals
        chunks = _chunks(a) + tokens // CHUNK_TOKENS
        _, computed = site.first_s(writer, prompt)
        if name == "ours":
            site.wait_saved(a, chunks)
            site.put_all(a)
        else:
            time.sleep(_SAVES_S)
        before = _loaded_tokens(reader)
        first_s, text = site.first_s(reader, prompt)
        site.first_s(reader, [1, 2, 3])  # steps update the metrics
        if text != computed and not (name == "ours" and row == LINK_INT8):
            raise BenchError(f"{reader.name} answered {text!r}, and {writer.name} {computed!r}")
        return first_s * 1e3, _loaded_tokens(reader) - before

    for number in range(warm_ups + runs):
        prompt = prompts.make(tokens)
        names = list(times) if number % 2 else list(times)[::-1]
        measured = {name: run(name, prompt) for name in names}
        shown = ", ".join(
            f"{name} {measured[name][0]:.4g} ms with {measured[name][1]:.0f} tokens loaded"
            for name in times
        )
        say(f"{row}, {'warm-up' if number < warm_ups else 'run'}: {shown}")
        if number >= warm_ups:
            for name, (first_ms, tokens_loaded) in measured.items():
                times[name].append(first_ms)
                loaded[name].append(tokens_loaded)
    for name, tokens_of in loaded.items():
        if not max(tokens_of):
            raise BenchError(f"{name}: nothing was loaded, so its times are not those of loads")
    params: dict[str, str | int | float] = {
        "tokens": tokens,
        "codec": "int8" if row == LINK_INT8 else "raw",
    }
    first, counts = (
        [Sample(tuple(by_name[name])) for name in ("ours", "theirs")] for by_name in (times, loaded)
    )
    return [
        (
            "MooncakeStore",
            [
                Comparison("first token", params, first[0], first[1], "ms", BARS[row]),
                Comparison("loaded", params, counts[0], counts[1], "tokens"),
            ],
        )
    ]


def _prefill(
    site: _Site, prompts: Prompts, tokens: int, runs: int, warm_ups: int, say: Say
) -> list[Compared]:
    far, alone = site.hosts
    site.carry(far)
    pids = {host.name: pids_of(host.engines) for host in site.hosts}
    spent: dict[str, list[float]] = {host.name: [] for host in site.hosts}
    for number in range(warm_ups + runs):
        turn = {}
        for host in site.hosts if number % 2 else site.hosts[::-1]:
            chunks, before_s = _chunks(host), cpu_seconds(pids[host.name])
            for _ in range(_AT_ONCE):
                site.first_s(host.engines[0], prompts.make(tokens))
            site.wait_saved(host, chunks + _AT_ONCE * (tokens // CHUNK_TOKENS))
            turn[host.name] = (cpu_seconds(pids[host.name]) - before_s) / (_AT_ONCE * tokens) * 1e6
            if host is far:
                site.put_all(far)
            _empty(host)
        shown = ", ".join(f"host {name} {turn[name]:.1f}" for name in sorted(turn))
        say(f"prefill, {'warm-up' if number < warm_ups else 'run'}, CPU us a token: {shown}")
        if number >= warm_ups:
            for name, each in turn.items():
                spent[name].append(each)
    params = {"tokens": tokens, "prompts": _AT_ONCE}
    ours, theirs = (Sample(tuple(spent[host.name])) for host in (far, alone))
    figure = Comparison("engine, a token", params, ours, theirs, "us CPU", BARS[PREFILL])
    return [("host only", [figure])]


def _stopped(site: _Site, prompts: Prompts, tokens: int, say: Say) -> list[Compared]:
    from_fifth, longest = [], []
    for kind, target in ((REDIS, "redis"), (MOONCAKE, "master"), (MOONCAKE, "node-a")):
        site.serve(kind, site.logs)
        alone, far = site.hosts
        _empty(far)  # it has computed the prompts of the turn before
        site.carry(far)
        stored = [prompts.make(tokens) for _ in range(_STOPPED_REQUESTS)]
        warm_ups = [prompts.make(tokens) for _ in range(_WARM_UPS)]
        for prompt in (*warm_ups, *stored):
            site.first_s(far.engines[0], prompt)
        site.wait_saved(far, (_WARM_UPS + _STOPPED_REQUESTS) * (tokens // CHUNK_TOKENS))
        site.put_all(far)
        _empty(far)
        with contextlib.suppress(ValueError):  # it answers nothing
            far.engines[0].client.post("/reset_prefix_cache", {})
        for host in (far, alone):
            site.first_s(host.engines[0], prompts.make(tokens))
        until(
            lambda far=far: _looks_far(site, far, prompts),  # type: ignore[misc]
            _LOOKS_AGAIN_S,
            f"{far.engines[0].name} does not look in the far store; see {far.engines[0].log_path}",
        )
        until(
            lambda far=far, warm_ups=warm_ups: _loads_far(site, far, warm_ups),  # type: ignore[misc]
            _LOOKS_AGAIN_S,
            f"{far.engines[0].name} has loaded nothing from the far store; see {far.log}",
        )
        before = _not_answered(far)
        stopped = site.server.family(target)
        stopped.pause()
        waits: dict[str, list[float]] = {"far": [], "alone": []}
        try:
            for prompt in stored:
                waits["far"].append(site.first_s(far.engines[0], prompt)[0])
                waits["alone"].append(site.first_s(alone.engines[0], prompts.make(tokens))[0])
            if _not_answered(far) == before:
                raise BenchError(
                    f"the far store was not asked while its {target} was stopped; see {far.log}"
                )
        finally:
            stopped.resume()
            site.server.kill()
            far.kill_carrier()
        usual = statistics.median(waits["alone"])
        most = max(waits["far"][:_BEFORE]) - usual
        say(
            f"stopped, {target}, first tokens in s: far {[round(each, 2) for each in waits['far']]}, "
            f"alone {[round(each, 2) for each in waits['alone']]}"
        )
        params: dict[str, str | int | float] = {"stopped": target, "tokens": tokens}
        ours, theirs = (Sample(tuple(waits[name][_BEFORE:])) for name in ("far", "alone"))
        from_fifth.append(Comparison("first token", params, ours, theirs, "s", BARS[STOPPED]))
        longest.append(
            Comparison(
                "longest wait", params, single(max(most, 0.0)), single(_LONGEST_WAIT_S), "s", 1.0
            )
        )
    return [("no far store, from the fifth request on", from_fifth), ("limit", longest)]


def _is_well(host: BenchHost) -> bool:
    status = host.status()
    return status is not None and not status.problem


def _looks_far(site: _Site, host: BenchHost, prompts: Prompts) -> bool:
    """Whether an engine looks for prompts in the far store. While it leaves the store alone it makes a look-up now and then:
    of two prompts in a row it looks for one at most."""
    before = _counted(host, "finds_found", "finds_none")
    for _ in range(2):
        site.first_s(host.engines[0], prompts.make(2 * CHUNK_TOKENS))
    return _counted(host, "finds_found", "finds_none") >= before + 2


def _loads_far(site: _Site, host: BenchHost, warm_ups: list[list[int]]) -> bool:
    """Whether an engine loads from the far store: it has shown its speed then. Takes one of the prompts that are there.
    Waits after a load that failed, as a first one can on a busy machine: the engine probes the store before the next one.

    Raises:
        BenchError: no prompt is left.
    """
    if not warm_ups:
        counts = status.counts if (status := host.status()) else {}
        raise BenchError(f"{host.engines[0].name} loads nothing from the far store: {counts}")
    loaded = host.chunks()[1]
    site.first_s(host.engines[0], warm_ups.pop())
    site.first_s(host.engines[0], [1, 2, 3])  # steps update the metrics
    if host.chunks()[1] > loaded:
        return True
    time.sleep(FIRST_PAUSE_S + 1.0)
    return False


def _not_answered(host: BenchHost) -> int:
    """Look-ups and chunks that the far store has not answered in time."""
    return _counted(host, "silent_finds", "not_brought_late")


def _counted(host: BenchHost, *names: str) -> int:
    """A sum of counts of a host's carrier. Raises BenchError: it does not answer."""
    if (number := counted(host.status(), *names)) is None:
        raise BenchError(f"the carrier of host {host.name} does not answer; see {host.log}")
    return number


def _loaded_tokens(engine: VllmEngine) -> float:
    """Prompt tokens that it has loaded by its connector."""
    return engine.metrics().total("vllm:external_prefix_cache_hits_total")


@contextlib.contextmanager
def _store(host: BenchHost) -> Iterator[LocalStore]:
    store = LocalStore(Space(memory_folder({SHM_VARIABLE: str(host.shm)}), 0), visits=True)
    try:
        yield store
    finally:
        store.close()


def _chunks(host: BenchHost) -> int:
    with _store(host) as store:
        return store.status().tiers[0].chunks


def _empty(host: BenchHost) -> None:
    """Remove all chunks of a host's pool."""
    with _store(host) as store:
        store.remove(store.keys())
