# SPDX-License-Identifier: Apache-2.0
"""The compared routers: ours, vLLM's and SGLang's, each started as in its documentation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pd_bench.peer_environment import how_to_make, installed_version
from pd_bench.report import BenchError
from pd_bench.router.mocks import MockProcess
from pd_connector.tools.launch import RouterProcess, Service
from scheduler_plugins.router.policies.registry import DEFAULT

OURS = "ours"
VLLM = "vllm-router PD"
SGLANG = "sglang-router PD"
SGLANG_REGULAR = "sglang-router regular"
_PACKAGES = {"vllm-router": "0.1.17", "sglang-router": "0.3.2"}
"""Peers, with the tested versions."""


class PeerProcess(Service):
    """A peer's router from a separate environment."""

    def __init__(self, name: str, program: Path, args: Sequence[str], log: Path) -> None:
        super().__init__(name, log)
        self._program, self._args, self._metrics = program, list(args), self.reserve()

    def command(self) -> list[str]:
        address = ["--host", self.host, "--port", str(self.port)]
        address += ["--prometheus-port", str(self._metrics), "--log-level", "error"]
        return [str(self._program), *self._args, *address]

    def phase(self) -> str:
        return "waiting for the engines"


class Engines(NamedTuple):
    """The engines behind one router, and what the router is started with."""

    prefill: Sequence[MockProcess]
    decode: Sequence[MockProcess]
    profile: Path  # their cost model
    log: Path  # of the router

    @property
    def urls(self) -> tuple[list[str], list[str]]:
        """Base URLs of the prefill and of the decode engines."""
        prefill, decode = ([engine.base_url for engine in side] for side in self[:2])
        return prefill, decode


@dataclass(frozen=True)
class Contender(ABC):
    """A router and the engines that it needs."""

    name: str
    prefill: int = 4
    decode: int = 4
    mock_args: tuple[str, ...] = ()

    @abstractmethod
    def router(self, engines: Engines) -> Service:
        """The router in front of these engines, not yet started."""


@dataclass(frozen=True)
class Ours(Contender):
    """Our router, which follows the engines' KV events."""

    policy: str = DEFAULT
    profiled: bool = True
    """Whether it gets the engines' cost model. If not, it learns the model."""
    args: tuple[str, ...] = ()

    def router(self, engines: Engines) -> Service:
        args = ["--policy", self.policy, "--log-level", "WARNING"]
        args += ["--profile", str(engines.profile)] if self.profiled else []
        args += ["--kv-events", *(engine.events for engine in engines.prefill), *self.args]
        return RouterProcess(*engines.urls, name=self.name, args=args, log_path=engines.log)


@dataclass(frozen=True)
class Vllms(Contender):
    """vLLM's router with its default policy; it asks the engines' `/tokenize`."""

    env: Path = Path()

    def router(self, engines: Engines) -> Service:
        args = ["--vllm-pd-disaggregation", "--policy", "cache_aware", "--kv-connector", "nixl"]
        for option, urls in zip(("--prefill", "--decode"), engines.urls, strict=True):
            for url in urls:
                args += [option, url]
        return PeerProcess(self.name, _program(self.env, "vllm-router"), args, engines.log)


@dataclass(frozen=True)
class Sglangs(Contender):
    """SGLang's router with its default policy.

    In regular mode an engine decodes beside its prefills. Here each of four addresses is a prefill and a decode engine,
    so the same machines serve as behind the other routers.
    """

    env: Path = Path()

    def router(self, engines: Engines) -> Service:
        args = ["launch", "--policy", "cache_aware"]
        prefill, decode = engines.urls
        if decode:
            args.append("--pd-disaggregation")
            for engine in engines.prefill:
                args += ["--prefill", engine.base_url, str(engine.port)]
            for url in decode:
                args += ["--decode", url]
        else:
            args += ["--worker-urls", *prefill]
        return PeerProcess(self.name, _program(self.env, "smg"), args, engines.log)


def peers(vllm_env: Path | None, sglang_env: Path | None) -> list[Contender]:
    """The peers whose environments are given.

    Raises:
        BenchError: an environment lacks its router; the message says how to make it.
    """
    contenders: list[Contender] = []
    if vllm_env is not None:
        version(vllm_env, "vllm-router")
        contenders.append(Vllms(VLLM, env=vllm_env))
    if sglang_env is not None:
        version(sglang_env, "sglang-router")
        contenders.append(Sglangs(SGLANG, mock_args=("--sglang",), env=sglang_env))
        apart = ("--sglang", "--decode-apart")
        contenders.append(Sglangs(SGLANG_REGULAR, 4, 0, apart, env=sglang_env))
    return contenders


def version(env: Path, package: str) -> str:
    """The version of a peer. Raises BenchError: the peer is missing; the message says how to make it."""
    if installed := installed_version(env, package):
        return installed
    raise BenchError(
        f"no {package} in {env}: {how_to_make(env, f'{package}=={_PACKAGES[package]}')}"
    )


def _program(env: Path, name: str) -> Path:
    return env / "bin" / name
