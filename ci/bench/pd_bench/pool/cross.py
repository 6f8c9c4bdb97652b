# SPDX-License-Identifier: Apache-2.0
"""A vLLM and an SGLang engine of one host behind our router, with one pool, under a trace. Each engine is killed once.

Requests are not streamed: the router asks another engine for an answer whose engine has died. It cannot go on with a
stream of SGLang's.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from pd_bench.pool.engines import need_vllm, until
from pd_bench.pool.folders import own_folder
from pd_bench.report import BenchError, Comparison, Say
from pd_bench.sample import single
from pd_bench.serve.trace import TimedRequest, read, timed
from pd_connector.pool.settings import SHM_VARIABLE
from pd_connector.tools.demo import MODEL_DIR
from pd_connector.tools.launch import Client, RouterProcess, VllmEngine, stop_services, wait_all
from pd_connector.tools.launch.client import HttpError
from pd_connector.tools.launch.service import Service, log_folder
from pd_connector.tools.launch.sglang import SglangEngine

SCALE = 16.0
"""Divisor of the trace's lengths. A chunk has 128 tokens: prompts have to be longer than that."""
MOST_TOKENS = 3500
"""Longest prompt; each letter is a token. Longer ones are cut, so that both engines' contexts have room."""
PER_S = 1.0
"""Requests a second."""
_MEMORY = "2GiB"
_EXACT = ("--dtype", "float32")
_NO_POOL = {"pool": {"read": False, "write": False}}
_STARTS_S = 300.0
_PATIENCE_S = 300.0
_PATH = "/v1/completions"
_IN_USE = "pool: in use"


class CrossHost:
    """The engines and their router. Made by `running`."""

    def __init__(self, shm: Path, logs: Path) -> None:
        env, config = {SHM_VARIABLE: str(shm)}, {"pool": {"memory": _MEMORY}}
        middleware = "scheduler_plugins.vllm.PoolMiddleware"
        self.vllm = VllmEngine(
            MODEL_DIR,
            "kv_both",
            "PDConnector",
            config,
            name="vllm",
            args=[*_EXACT, "--middleware", middleware],
            env={**env, "VLLM_CPU_KVCACHE_SPACE": "1"},
            log_path=logs / "vllm.log",
        )
        self.sglang = SglangEngine(
            MODEL_DIR,
            None,
            extra_config=config,
            page_size=64,
            name="sglang",
            args=(*_EXACT, "--random-seed", "1"),
            env=env,
            log_path=logs / "sglang.log",
        )
        self.engines: tuple[Service, Service] = (self.vllm, self.sglang)
        urls = [engine.base_url for engine in self.engines]
        self.router = RouterProcess(
            [self.vllm.base_url],
            urls,
            args=["--policy", "round_robin"],
            hands_over=False,
            log_path=logs / "router.log",
        )
        self.model = ""

    def start(self, console: Console) -> None:
        for engine in self.engines:
            engine.start()
        wait_all(self.engines, console=console)
        self.model = self.vllm.client.model()
        self.router.start().wait_ready()
        self.wait_for_router()
        self.wait_for_pool(1)

    def wait_for_pool(self, starts: int) -> None:
        """Wait until both engines use the pool, each for the time of this number."""
        for engine in self.engines:
            until(
                lambda log=engine.log_path: log.read_text().count(_IN_USE) >= starts,  # type: ignore[misc]
                _STARTS_S,
                f"{engine.name} does not use the pool; see {engine.log_path}",
            )

    def wait_for_router(self) -> None:
        """Wait until the router knows that both engines are up. Until then it would have none if the other one died."""
        problem = f"the router does not ask both; see {self.router.log_path}"
        until(self.router.all_up, _STARTS_S, problem)

    def counted(self, name: str) -> dict[str, float]:
        """A counter of each engine, since its start."""
        name = f"pd_connector:{name}_total"
        return {engine.name: engine.client.metrics().total(name) for engine in self.engines}

    def ask(self, client: Client, request: TimedRequest, **more: Any) -> str:
        """The text of an answer; an error's starts with a mark."""
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }
        try:
            choice = client.post(_PATH, body, _PATIENCE_S)["choices"][0]
        except (HttpError, OSError, ValueError) as error:
            return f"{_LOST}{error}"
        aborted = choice.get("finish_reason") not in ("length", "stop")
        return f"{_ABORTED}{choice}" if aborted else str(choice["text"])

    def play(self, requests: Sequence[TimedRequest], *, kills: bool) -> list[str]:
        """Send every request through the router when it is due. With `kills` each engine is killed, and started again."""
        began_s, lasts_s = time.monotonic(), max(request.at_s for request in requests)
        with ThreadPoolExecutor(len(requests) + 1) as threads:

            def due(request: TimedRequest) -> str:
                time.sleep(max(0.0, began_s + request.at_s - time.monotonic()))
                return self.ask(self.router.client, request)

            answers = [threads.submit(due, request) for request in requests]
            if kills:
                for place, engine in enumerate(self.engines, 1):
                    time.sleep(max(0.0, began_s + place * lasts_s / 3 - time.monotonic()))
                    engine.kill()
                    engine.start()
                    wait_all([engine])
                    self.wait_for_router()
            return [answer.result() for answer in answers]


_LOST, _ABORTED = "lost: ", "aborted: "


@contextlib.contextmanager
def running(console: Console) -> Iterator[CrossHost]:
    """The engines and their router, with a pool of their own. At the end nothing of them is left.

    Raises:
        PDConnectorError: vLLM or SGLang is missing, or an engine did not start.
    """
    need_vllm()
    with contextlib.ExitStack() as stack:
        shm = stack.enter_context(own_folder())
        logs = log_folder()
        console.print(f"engines' logs in {logs}", highlight=False)
        host = CrossHost(shm, logs)
        stack.callback(stop_services, [host.router, *host.engines])
        host.start(console)
        yield host


def measure(
    host: CrossHost, trace: Path, count: int, say: Say
) -> tuple[list[Comparison], list[str]]:
    """Play the trace twice: the engines are killed in the first round, and read what both have saved in the second.

    Raises:
        BenchError: the trace cannot be read, or an engine was not asked, or has not used the pool.
    """
    requests = [
        replace(request, prompt=request.prompt[:MOST_TOKENS])
        for request in timed(read(trace, count), PER_S, SCALE, 1)
    ]
    alone = [
        host.ask(host.vllm.client, request, kv_transfer_params=_NO_POOL) for request in requests
    ]
    if any(answer.startswith((_LOST, _ABORTED)) for answer in alone):
        raise BenchError(f"the engine that answers alone does not. See {host.vllm.log_path}")
    ended: Counter[str] = Counter()
    notes = []
    for round_, kills in (("engines killed", True), ("again", False)):
        answers = host.play(requests, kills=kills)
        kinds = Counter(
            _LOST
            if answer.startswith(_LOST)
            else _ABORTED
            if answer.startswith(_ABORTED)
            else "equal"
            if answer == reference
            else "otherwise"
            for answer, reference in zip(answers, alone, strict=True)
        )
        ended += kinds
        time.sleep(2.0)  # SGLang's metrics are brought up to date once a second
        answered = ", ".join(f"{kind.strip(': ')} {number}" for kind, number in kinds.items())
        loaded, saved, compared = map(host.counted, ("pool_hits", "pool_saves", "audits"))
        note = f"{round_}: {answered}; loaded {loaded}, saved {saved}, compared {compared}"
        say(note)
        notes.append(note)
        notes += [each[:300] for each in answers if each.startswith((_LOST, _ABORTED))]
        if kills:
            host.wait_for_pool(2)
            continue
        for engine in host.engines:
            if not any(counts[engine.name] for counts in (loaded, saved, compared)):
                raise BenchError(f"{engine.name} had no use of the pool: see {engine.log_path}")
    whole, params = 2.0 * len(requests), {"requests": len(requests), "rounds": 2}
    right = Comparison(
        "answers as one engine's, each engine killed once",
        params,
        single(float(ended["equal"])),
        single(whole),
        "",
        1.0,
        True,
    )
    return [right], notes
