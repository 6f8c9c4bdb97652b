# SPDX-License-Identifier: Apache-2.0
"""vLLM engines that load what another process computed: through our pool, LMCache's server and Mooncake's store."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from pd_bench.handoff.pair import Prompts
from pd_bench.peer_environment import installed_version
from pd_bench.pool.engines import (
    begun,
    first_token,
    until,
    wait_for_pool,
)
from pd_bench.pool.raw import RIVAL_PACKAGE, RIVAL_VERSION, mooncake_master
from pd_bench.report import BenchError, Compared, Comparison, Say
from pd_bench.sample import Sample
from pd_connector.pool.settings import SHM_VARIABLE
from pd_connector.tools.launch import VllmEngine, wait_all
from pd_connector.tools.launch.family import Family
from pd_connector.tools.launch.ports import Port

OURS, LMCACHE, MOONCAKE, COLD = "ours", "LMCache", "MooncakeStore", "computed"
BAR = 0.8
PACKAGES = {"lmcache": "0.5.6", RIVAL_PACKAGE: RIVAL_VERSION}
_MEMORY_GIB = 2
_STARTS_S = 120.0
_SAVES_S = 3.0
"""After the writer's answer. All stores save beside the computation."""
_CHUNK_TOKENS = 256
"""LMCache's, the longest of the three: less than a chunk of a prompt's end is computed again."""


class Store(NamedTuple):
    """How engines are told to use a store: connector, its config, and variables of their environment."""

    connector: str
    config: Mapping[str, Any]
    variables: Mapping[str, str]


class RivalEngines:
    """For each store an engine that computes prompts and one that loads them. Made by `running`.

    Args:
        rivals: stores that are not ours, by name.
        python: of the environment that has them.
    """

    def __init__(
        self, model: Path, shm: Path, logs: Path, rivals: Mapping[str, Store], python: Path
    ) -> None:
        def engines(
            name: str, store: Store, python: str = sys.executable
        ) -> tuple[VllmEngine, VllmEngine]:
            variables = {"VLLM_CPU_KVCACHE_SPACE": "1", **store.variables}
            writer, reader = (
                VllmEngine(
                    model,
                    "kv_both",
                    store.connector,
                    store.config,
                    name=f"{name} {side}",
                    env=variables,
                    log_path=logs / f"{name}-{side}.log",
                    python=python,
                )
                for side in ("writer", "reader")
            )
            return writer, reader

        # An audit would take the first prompt of a run out of the measurement.
        config = {"audit": "off", "pool": {"memory": f"{_MEMORY_GIB}GiB"}}
        ours = Store("PDConnector", config, {SHM_VARIABLE: str(shm)})
        self.pairs = {OURS: engines(OURS, ours)}
        for name, store in rivals.items():
            self.pairs[name] = engines(name, store, str(python))
        self.all = [engine for pair in self.pairs.values() for engine in pair]

    def measure(self, tokens: int, runs: int, warm_ups: int, say: Say) -> list[Compared]:
        """Time to the first token of prompts that another process has computed.

        Args:
            tokens: of each prompt.
            runs: measured rounds, in which each store is first, and last, in turn.
            warm_ups: rounds before them, not counted.

        Raises:
            BenchError: a reader computed what it should have loaded, or answered otherwise than its writer.
        """
        client = self.pairs[OURS][0].client
        prompts, model = Prompts(client), client.model()
        times: dict[str, list[float]] = {name: [] for name in (*self.pairs, COLD)}
        names = list(self.pairs)
        for number in range(warm_ups + runs):
            given = {"model": model, "prompt": prompts.make(tokens)}
            body = {**given, "temperature": 0, "ignore_eos": True}
            turn = number % len(names)
            times_of = {}
            for name in (*names[turn:], *names[:turn]):
                computed, times_of[name] = self._first_tokens(name, body, tokens)
                if name == OURS:
                    times_of[COLD] = computed
            warming = number < warm_ups
            shown = ", ".join(f"{name} {times_of[name]:.4g}" for name in times)
            say(f"stores, {'warm-up' if warming else 'run'}, ms: {shown}")
            for name, values in times.items():
                if not warming:
                    values.append(times_of[name])
        samples = {name: Sample(tuple(values)) for name, values in times.items()}
        ours = samples.pop(OURS)
        params = {"tokens": tokens}
        return [
            (
                name,
                [
                    Comparison(
                        "first token", params, ours, theirs, "ms", None if name == COLD else BAR
                    )
                ],
            )
            for name, theirs in samples.items()
        ]

    def _first_tokens(self, name: str, body: Mapping[str, Any], tokens: int) -> tuple[float, float]:
        """Milliseconds to the first token: computed by the first engine, loaded by the second."""
        writer, reader = self.pairs[name]
        computed_s, answer = first_token(writer.client, body)
        time.sleep(_SAVES_S)
        before = _loaded(reader)
        loaded_s, text = first_token(reader.client, body)
        loaded = _loaded(reader) - before
        if loaded < tokens - _CHUNK_TOKENS:
            raise BenchError(
                f"{reader.name} loaded {loaded:.0f} of {tokens} tokens, so its time is not the time of a load: read "
                f"{reader.log_path}"
            )
        if text != answer:
            raise BenchError(f"{reader.name} answered {text!r}, and {writer.name} {answer!r}")
        return computed_s * 1e3, loaded_s * 1e3


def _loaded(engine: VllmEngine) -> float:
    """Prompt tokens that it has loaded by its connector."""
    return engine.metrics().total("vllm:external_prefix_cache_hits_total")


@contextlib.contextmanager
def running(environment: Path, console: Console) -> Iterator[RivalEngines]:
    """Six engines and the rivals' servers. At the end none of them is left.

    Args:
        environment: virtual environment with LMCache, Mooncake and this environment's vLLM.

    Raises:
        BenchError: a package is missing there, or a server did not start.
        PDConnectorError: vLLM is missing, or an engine did not start.
    """
    for package, version in PACKAGES.items():
        if (present := installed_version(environment, package)) != version:
            raise BenchError(
                f"{environment} has {package} {present or 'not at all'}, wanted {version}: docs/benchmarks/README.md#bench-pool says how to make it"
            )
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-bench-")))
        master = stack.enter_context(mooncake_master(environment, folder / "master.log"))
        port = stack.enter_context(_lmcache_server(environment, folder / "lmcache.log"))
        config = folder / "mooncake.json"
        config.write_text(json.dumps(_mooncake_config(master)))
        lmcache = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
        seed = {"PYTHONHASHSEED": "0"}  # vLLM's hashes of blocks are then alike in all processes
        env = {"MOONCAKE_CONFIG_PATH": str(config), "VLLM_HOST_IP": "127.0.0.1"}
        rivals = {
            LMCACHE: Store("LMCacheMPConnector", lmcache, seed),
            MOONCAKE: Store("MooncakeStoreConnector", {}, env | seed),
        }
        python = environment / "bin" / "python"
        engines = stack.enter_context(
            begun(lambda model, shm, logs: RivalEngines(model, shm, logs, rivals, python), console)
        )
        wait_all(engines.all, console=console)
        wait_for_pool(engines.pairs[OURS], _STARTS_S)
        yield engines


def _mooncake_config(master: str) -> dict[str, Any]:
    return {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": _MEMORY_GIB << 29,  # each engine lends half
        "local_buffer_size": 512 << 20,
    }


@contextlib.contextmanager
def _lmcache_server(environment: Path, log: Path) -> Iterator[int]:
    """LMCache's server for engines of this host, over shared memory; yields its port."""
    with Port() as port, Port() as http, Port() as metrics:
        ports = int(port), int(http), int(metrics)
    options = {
        "--supported-transfer-mode": "engine_driven",
        "--shm-name": f"pd-bench-{ports[0]}",
        "--host": "127.0.0.1",
        "--port": str(ports[0]),
        "--http-host": "127.0.0.1",
        "--http-port": str(ports[1]),
        "--prometheus-port": str(ports[2]),
        "--l1-size-gb": str(_MEMORY_GIB),
        "--eviction-policy": "LRU",
    }
    words = [word for option in options.items() for word in option]
    with Family([str(environment / "bin" / "lmcache"), "server", *words], log=log) as family:

        def answers() -> bool:
            if family.returncode is not None:
                raise BenchError(f"LMCache's server has ended: {log.read_text()[-500:]}")
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", ports[0])) == 0

        until(answers, _STARTS_S, f"LMCache's server does not answer: read {log}")
        yield ports[0]
