# SPDX-License-Identifier: Apache-2.0
"""A prefill engine, a decode engine and a router in front of them: ours, and vLLM's own."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pd_bench.harness import Processes
from pd_bench.netns import Namespace
from pd_bench.peer_environment import installed_version
from pd_connector.tools.launch import HttpError, RouterProcess, Service, VllmEngine
from pd_connector.tools.launch.engine import Role

RIVAL_ROUTER = "vllm-router"
OUR_SCHEDULER = ("--scheduler-cls", "scheduler_plugins.vllm.PrefixAwareScheduler")
OURS = "ours"
RIVAL = "vLLM's own"
PARTS = {
    OURS: "PDConnector (codec auto), pd-router, PrefixAwareScheduler",
    RIVAL: "NixlConnector, vllm-router, vLLM's scheduler",
}
"""The parts of each stack, by name."""

POOL_REPORTS = ("--middleware", "scheduler_plugins.vllm.PoolMiddleware")
_POOL_IN_USE = "pool: in use"
_STARTED = "\n$ "
"""Before the command, at the beginning of each run's part of a log."""
_PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"


@dataclass(frozen=True)
class StackSetup:
    """What both stacks share.

    Args:
        model: folder of the model.
        max_model_len: tokens of the longest request.
        logs: folder for logs.
        namespaces: where prefill and decode engines run; None: here.
        args: further arguments of all engines.
        env: further variables of all engines.
    """

    model: str
    max_model_len: int
    logs: Path
    namespaces: tuple[Namespace | None, Namespace | None]
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class VllmRouterProcess(Service):
    """vLLM's router, from an environment of its own."""

    def __init__(self, environment: Path, prefill: str, decode: str, log_path: Path) -> None:
        super().__init__(RIVAL_ROUTER, log_path)
        self._program = str(program(environment))
        self._engines = ["--prefill", prefill, "--decode", decode]
        self._metrics_port = self.reserve()

    def command(self) -> list[str]:
        address = ["--host", self.host, "--port", str(self.port)]
        address += ["--prometheus-port", str(self._metrics_port)]
        # There is one engine of each role: policies that inspect prompts would only cost time.
        mode = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"]
        return [self._program, *address, *mode, *self._engines]

    def phase(self) -> str:
        return "waiting for the engines"


class Stack(ABC):
    """Engines with a router. The caller starts and stops them."""

    name: str

    def __init__(self, prefill: VllmEngine, decode: VllmEngine, router: Service) -> None:
        self.engines = (prefill, decode)
        self.router = router
        self._processes = Processes(lambda: self.services)

    @property
    def services(self) -> tuple[Service, ...]:
        """All services, engines first: a router looks for its engines when it starts."""
        return (*self.engines, self.router)

    def cpu_seconds(self) -> float:
        """CPU time used by the whole stack."""
        return self._processes.cpu_seconds()

    @abstractmethod
    def rest(self) -> None:
        """The other stack's turn begins."""

    def wake(self) -> None:
        """Its own turn begins."""
        for service in self.services:
            service.resume()

    def prompt_tokens(self) -> dict[str, float]:
        """The decode engine's prompt tokens up to now, by their source."""
        tokens: dict[str, float] = {}
        for (name, labels), value in self.engines[1].metrics().items():
            if name == _PROMPT_TOKENS:
                source = dict(labels)["source"]
                tokens[source] = tokens.get(source, 0.0) + value
        return tokens


class OurStack(Stack):
    """PDConnector with `codec: auto`, our router and our scheduler."""

    name = OURS

    def __init__(self, setup: StackSetup, key: Mapping[str, str]) -> None:
        # Shared memory would bypass the link.
        config = {"transports": ["tcp"], "codec": "auto", "overlap": "auto"}
        self._begin("ours", config, setup, OUR_SCHEDULER, key)

    def _begin(
        self,
        side: str,
        config: Mapping[str, Any],
        setup: StackSetup,
        args: Sequence[str],
        env: Mapping[str, str],
    ) -> None:
        prefill, decode = _engines(side, "PDConnector", config, setup, args, env)
        log = setup.logs / f"{side}-router.log"
        urls = [prefill.base_url], [decode.base_url]
        super().__init__(prefill, decode, RouterProcess(*urls, name=f"{side} router", log_path=log))

    def rest(self) -> None:
        """Nothing to do: a waiting stack uses a hundredth of a core."""


class PoolStack(OurStack):
    """PDConnector on one host, with or without a KV pool, our router and our scheduler."""

    def __init__(
        self, name: str, setup: StackSetup, pool: Mapping[str, Any] | None, env: Mapping[str, str]
    ) -> None:
        self.name = name
        # Answers are compared with each other, so nothing may be rounded on the way.
        config = {"codec": "raw", "overlap": "auto"} | ({"pool": dict(pool)} if pool else {})
        side = "pool" if pool else "plain"
        self._begin(side, config, setup, (*OUR_SCHEDULER, *POOL_REPORTS), env)

    def kill_engines(self) -> None:
        """End both engines with SIGKILL, and start them again."""
        for engine in self.engines:
            engine.kill()
        for engine in self.engines:
            engine.start()
        self._processes = Processes(lambda: self.services)

    def uses_pool(self) -> bool:
        """Whether both engines use the pool, and the router knows what is in it."""
        logs = (engine.log_path.read_text() for engine in self.engines)
        if not all(_POOL_IN_USE in log.rpartition(_STARTED)[2] for log in logs):
            return False
        try:
            state = json.loads(self.router.client.get("/health", timeout_s=10.0))
        except HttpError:  # the router has not seen yet that the engines are back
            return False
        up = all(state_of["state"] == "up" for state_of in state["engines"])
        return up and all(state_of.get("cache", {}).get("pool") for state_of in state["engines"])

    def named_pool(self) -> float:
        """Decisions of the router that named a pool."""
        return self.router.metrics().total("pd_router:pool_requests_total")

    def loaded_chunks(self) -> float:
        """Chunks that both engines have loaded since their start."""
        return sum(
            engine.metrics().total("pd_connector:pool_hits_total") for engine in self.engines
        )


class RivalStack(Stack):
    """NixlConnector, vllm-router and vLLM's own scheduler."""

    name = RIVAL

    def __init__(self, setup: StackSetup, environment: Path) -> None:
        prefill, decode = _engines("rival", "NixlConnector", {}, setup, (), {})
        log = setup.logs / "rival-router.log"
        router = VllmRouterProcess(environment, prefill.base_url, decode.base_url, log)
        super().__init__(prefill, decode, router)

    def rest(self) -> None:
        """Freeze it: NIXL's progress threads poll, and would take both cores from the other stack."""
        for service in self.services:
            service.pause()


def program(environment: Path) -> Path:
    """The rival's router in that environment."""
    return environment / "bin" / RIVAL_ROUTER


def router_version(environment: Path) -> str:
    """The version of the rival's router; empty if it is missing."""
    return installed_version(environment, RIVAL_ROUTER) if program(environment).exists() else ""


def _engines(
    side: str,
    connector: str,
    config: Mapping[str, Any],
    setup: StackSetup,
    args: Sequence[str],
    env: Mapping[str, str],
) -> tuple[VllmEngine, VllmEngine]:
    def engine(part: str, role: Role, namespace: Namespace | None) -> VllmEngine:
        return VllmEngine(
            setup.model,
            role,
            connector,
            config,
            name=f"{side} {part}",
            max_model_len=setup.max_model_len,
            args=[*setup.args, *args],
            env={**setup.env, **env},
            log_path=setup.logs / f"{side}-{part}.log",
            namespace=namespace,
        )

    producer, consumer = setup.namespaces
    return engine("prefill", "kv_producer", producer), engine("decode", "kv_consumer", consumer)
