# SPDX-License-Identifier: Apache-2.0
"""Engines that share a KV pool of their own, and what tests ask of them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from harness import Answer, completion, wait_until
from recipes import (
    COMPILE_NOTHING,
    EXACT_ARGS,
    MODEL,
    NAME_ARGS,
    PROBE_ARGS,
    PROBE_ENVIRONMENT,
    USUAL,
    VLLM,
    WORKER_IN_CORE,
    Recipe,
    Vllm,
    frozen,
)

from pd_connector.pool.settings import SHM_VARIABLE
from pd_connector.tools.launch import VllmEngine, stop_services

CHUNKS = 5
PROMPT = [3 + (7 * place) % 250 for place in range(700)]
IN_USE = "pool: in use"


class PooledEngines:
    """Starts engines that share a pool, each ready to use it. Made by `sharing_a_pool`."""

    def __init__(self, shm: Path, logs: Path) -> None:
        self.shm = shm
        self.started: list[VllmEngine] = []
        self._logs = logs

    def start(
        self,
        page: int = 32,
        *args: str,
        audit: str = "off",
        model: Path = MODEL,
        beside: dict[str, Any] | None = None,
        known: bool = True,
        apart: bool = False,
        vllm: Vllm = USUAL,
        packages: Path | None = None,
        **more: Any,
    ) -> VllmEngine:
        """`packages`: a folder whose packages go before the environment's. `beside`: another connector in a `MultiConnector`. `known`: wait until it knows its weights. `apart`: workers have processes of their own. `more`: config keys."""
        config: dict[str, Any] = {"audit": audit, "pool": {"memory": "256MiB"}, **more}
        connector = "PDConnector"
        if beside is not None:
            own = {
                "kv_connector": connector,
                "kv_role": "kv_both",
                "kv_connector_extra_config": config,
            }
            config, connector = {"connectors": [own, beside]}, "MultiConnector"
        recipe = Recipe(
            str(model),
            (*EXACT_ARGS, *NAME_ARGS, *PROBE_ARGS, "--block-size", str(page), *args),
            frozen(
                PROBE_ENVIRONMENT,
                COMPILE_NOTHING,
                {} if apart else WORKER_IN_CORE,
                {SHM_VARIABLE: str(self.shm)},
                VLLM[vllm],
                {"PYTHONPATH": str(packages)} if packages else {},
            ),
            "kv_both",
            connector,
            json.dumps(config),
        )
        if vllm == "0.31":
            recipe = recipe._replace(forked=False)
        log = self._logs / f"{len(self.started)}.log"
        engine = recipe.engine(f"engine {len(self.started)}", log)
        self.started.append(engine)
        engine.start().wait_ready()
        if known:
            wait_until(lambda: in_use(engine), "the engine knows its weights")
        return engine

    def files(self) -> list[Path]:
        """Those of all chunks."""
        return list(self.shm.glob("*/pool/*/data/*"))

    def damage(self) -> None:
        """Change a byte in the middle of each file."""
        for file in self.files():
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)

    def computed(self, engine: VllmEngine, salt: str, chunks: int = CHUNKS, **extra: Any) -> Answer:
        """Have an engine compute the prompt, and wait until its chunks are in the pool."""
        before = len(self.files())
        answer = completion(engine, PROMPT, 32, cache_salt=salt, **extra)
        wait_until(lambda: len(self.files()) >= before + chunks, "the chunks in the pool")
        return answer


@contextmanager
def sharing_a_pool(logs: Path) -> Iterator[PooledEngines]:
    """At the end no engine and no chunk is left."""
    shm = Path(tempfile.mkdtemp(prefix="pd-test-", dir="/dev/shm"))
    engines = PooledEngines(shm, logs)
    try:
        yield engines
    finally:
        stop_services(engines.started)
        shutil.rmtree(shm)


def counted(engine: VllmEngine, name: str, **labels: str) -> float:
    """A counter of the connector."""
    return engine.metrics().total(f"pd_connector:{name}_total", **labels)


def in_use(engine: VllmEngine) -> int:
    """How often this engine has said that it uses the pool: after its start, and each time that it knows other weights."""
    return engine.log_path.read_text().count(IN_USE)


def hits(engine: VllmEngine) -> float:
    """Chunks that this engine has loaded, told with one more step."""
    completion(engine, [1, 2, 3], 2)
    return counted(engine, "pool_hits")


def forget(engine: VllmEngine, *, pool: bool = False) -> bool:
    """Have an engine empty its own prefix cache, and with `pool` not use what the pool has. Returns whether it did."""
    external = "?reset_external=true" if pool else ""
    url = f"{engine.base_url}/reset_prefix_cache{external}"
    with urlopen(Request(url, method="POST"), timeout=60) as answer:
        assert answer.status == 200
        return bool(json.loads(answer.read())["success"])
