# SPDX-License-Identifier: Apache-2.0
"""vLLM engines with one pool: one that writes, two that read (with like and unlike pages), and one without a pool."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console

from pd_bench.harness import require
from pd_bench.model import write_model, write_weights
from pd_bench.pool.folders import own_folder
from pd_bench.report import BenchError
from pd_connector.pool.settings import SHM_VARIABLE, memory_folder
from pd_connector.pool.store.local import LocalStore
from pd_connector.pool.store.tier_storage import Space
from pd_connector.tools.launch import Client, Service, VllmEngine, stop_services, wait_all
from pd_connector.tools.launch.engine import PAGE_TOKENS
from pd_connector.tools.launch.service import log_folder

OTHER_PAGE_TOKENS = 2 * PAGE_TOKENS
MEMORY = "6GiB"
"""More than all runs write, so that nothing is evicted."""
_CACHE_GIB = "2"
"""Room for 16 prompts at once."""
_STARTS_S = 120.0
_SAVES_S = 20.0
_PATH = "/v1/completions"


class PooledEngines:
    """Engines that share a pool, and the pool.

    Args:
        shm: folder of the pool.

    Attributes:
        all: those that are started.
        plain: has no pool.
    """

    all: Sequence[Service]
    plain: Service
    starts_s = _STARTS_S

    def __init__(self, shm: Path) -> None:
        self._memory = memory_folder({SHM_VARIABLE: str(shm)})
        self._store: LocalStore | None = None

    def wait(self, console: Console) -> None:
        """Wait until they answer, and use the pool: each reads all bytes of its weights first."""
        wait_all(self.all, console=console)
        wait_for_pool((engine for engine in self.all if engine is not self.plain), self.starts_s)
        self._store = LocalStore(Space(self._memory, 0), visits=True)

    def chunks(self) -> int:
        """Chunks in the pool."""
        assert self._store is not None
        return self._store.status().tiers[0].chunks

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class PoolEngines(PooledEngines):
    """The engines, ready, and the pool that they share. Made by `running`.

    Attributes:
        writer: saves what it computes.
        alike: reads, with pages like the writer's.
        unlike: reads, with pages twice as large.
        plain: its pages are like the writer's.
    """

    plain: VllmEngine

    def __init__(self, model: Path, shm: Path, logs: Path) -> None:
        super().__init__(shm)

        def engine(name: str, page: int, pool: Mapping[str, Any] | None) -> VllmEngine:
            # An audit would take the first prompt of a run out of the measurement.
            config = {"audit": "off"} | ({"pool": dict(pool)} if pool else {})
            return VllmEngine(
                model,
                "kv_both",
                "PDConnector",
                config,
                name=name,
                args=["--block-size", str(page)],
                env={SHM_VARIABLE: str(shm), "VLLM_CPU_KVCACHE_SPACE": _CACHE_GIB},
                log_path=logs / f"{name}.log",
            )

        reads = {"memory": MEMORY, "write": False}
        self.writer = engine("writer", PAGE_TOKENS, {"memory": MEMORY})
        self.alike = engine("alike", PAGE_TOKENS, reads)
        self.unlike = engine("unlike", OTHER_PAGE_TOKENS, reads)
        self.plain = engine("plain", PAGE_TOKENS, None)
        self.all = (self.writer, self.alike, self.unlike, self.plain)
        self.model = ""

    def wait(self, console: Console) -> None:
        super().wait(console)
        self.model = self.writer.client.model()

    def saved(self, before: int, chunks: int) -> int:
        """Wait until `chunks` chunks more are in the pool, or no more come; returns how many did."""
        ends = time.monotonic() + _SAVES_S
        while (there := self.chunks() - before) < chunks and time.monotonic() < ends:
            time.sleep(0.05)
        return there

    def hits(self, engine: VllmEngine) -> float:
        """Chunks that this engine has loaded. One more step is run first, because steps update the metric."""
        first_token(engine.client, self.body([1, 2, 3]))
        return engine.metrics().total("pd_connector:pool_hits_total")

    def body(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """A request without `max_tokens`."""
        fields = {"model": self.model, "prompt": prompt, "temperature": 0, "ignore_eos": True}
        return fields | more


@contextlib.contextmanager
def running(console: Console) -> Iterator[PoolEngines]:
    """Engines with a pool of their own. At the end no engine and no chunk is left.

    Raises:
        PDConnectorError: vLLM is missing, or an engine did not start.
    """
    with begun(PoolEngines, console) as engines, contextlib.closing(engines):
        engines.wait(console)
        yield engines


class Engines(Protocol):
    """Engines that share a pool."""

    @property
    def all(self) -> Sequence[Service]: ...


Made = TypeVar("Made", bound=Engines)


def need_vllm() -> None:
    """Raises BenchError if vLLM is missing."""
    require(("vllm", "use the environment that has it, or --raw"))


@contextlib.contextmanager
def begun(make: Callable[[Path, Path, Path], Made], console: Console) -> Iterator[Made]:
    """Engines of a model with made-up weights, starting, with a pool of their own. At the end no engine and no chunk is left.

    Args:
        make: takes the folders of the model, of the pool and of logs.

    Raises:
        PDConnectorError: vLLM is missing, or an engine did not start.
    """
    need_vllm()
    with contextlib.ExitStack() as stack:
        shm = stack.enter_context(own_folder())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-connector-model-"))
        logs = log_folder()
        console.print(f"engines' logs in {logs}", highlight=False)
        model = write_model(Path(folder))
        write_weights(model)  # the pool keeps nothing of weights that are not from files
        engines = make(model, shm, logs)
        stack.callback(stop_services, engines.all)
        for engine in engines.all:
            engine.start()
        yield engines


def wait_for_pool(engines: Iterable[Service], timeout_s: float) -> None:
    """Wait until each uses the pool: it reads all bytes of its weights first. Raises BenchError."""
    for engine in engines:
        until(
            lambda waiting=engine: "pool: in use" in waiting.log_path.read_text(),  # type: ignore[misc]
            timeout_s,
            f"{engine.name} does not use the pool; see {engine.log_path}",
        )


def first_token(client: Client, body: Mapping[str, Any]) -> tuple[float, str]:
    """Seconds until the first token of an answer of two, and the answer."""
    began, first_s, texts = time.perf_counter(), 0.0, []
    for event in client.stream(_PATH, {**body, "max_tokens": 2}):
        if event.get("choices"):
            first_s = first_s or time.perf_counter() - began
            texts += [choice["text"] for choice in event["choices"]]
    if not first_s:
        raise BenchError(f"{client.base_url} ended its answer without a token")
    return first_s, "".join(texts)


def until(condition: Callable[[], bool], timeout_s: float, problem: str) -> None:
    """Wait for something. Raises BenchError with this problem."""
    ends = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= ends:
            raise BenchError(problem)
        time.sleep(0.2)
