# SPDX-License-Identifier: Apache-2.0
"""The engines of `pd-connector demo`, a pair for each choice, and the askers that send them prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from pd_connector.tools.cli.asker import Asker, CrossAsker, SglangAsker, VllmAsker
from pd_connector.tools.launch import RouterProcess, Service, VllmEngine
from pd_connector.tools.launch.engine import Role, on_cpu
from pd_connector.tools.launch.sglang import (
    SglangEngine,
    SglangRole,
    sglang_on_cpu,
    sglang_python,
)


class EngineName(StrEnum):
    """Engines that the demo can start: one for both sides, or one for prefill and one for decode."""

    VLLM = "vllm"
    SGLANG = "sglang"
    VLLM_SGLANG = "vllm:sglang"
    SGLANG_VLLM = "sglang:vllm"


class Stage(NamedTuple):
    """Shared by the engines of a demo."""

    model: Path
    config: dict[str, Any]  # the connector's keys
    args: list[str]  # further arguments of each engine
    logs: Path


Demo = tuple[list[Service], Callable[[], Asker]]
"""A demo's services, and a function that makes their asker once they run."""


def _vllm(stage: Stage) -> Demo:
    """A pair of vLLM engines and a router, and their asker's maker."""
    prefill = _vllm_engine(stage, "prefill", "kv_producer")
    decode = _vllm_engine(stage, "decode", "kv_consumer")
    router = _router(stage, prefill, decode)
    return [prefill, decode, router], lambda: VllmAsker(
        prefill.client, decode.client, router.client
    )


def _sglang(stage: Stage) -> Demo:
    """A pair of SGLang engines and an engine that works alone, and their asker's maker."""
    prefill, decode = _sglang_engine(stage, "prefill"), _sglang_engine(stage, "decode")
    reference = _sglang_engine(stage, None)
    return [prefill, decode, reference], lambda: SglangAsker(prefill, decode, reference)


def _vllm_to_sglang(stage: Stage) -> Demo:
    """vLLM prefills, SGLang decodes."""
    prefill = _vllm_engine(stage, "prefill", "kv_producer", _EXACT)
    decode = _sglang_engine(stage, "decode")
    router = _router(stage, prefill, decode)
    services: list[Service] = [prefill, decode, router]
    return services, lambda: CrossAsker(decode.client, router.client, reference=prefill.client)


def _sglang_to_vllm(stage: Stage) -> Demo:
    """SGLang prefills, vLLM decodes."""
    prefill = _sglang_engine(stage, "prefill")
    decode = _vllm_engine(stage, "decode", "kv_consumer", _EXACT)
    router = _router(stage, prefill, decode)
    services: list[Service] = [prefill, decode, router]
    return services, lambda: CrossAsker(decode.client, router.client, reference=decode.client)


_EXACT = ("--dtype", "float32")
"""In bfloat16, tokens of different engines may tie. On a GPU, memory and speed count for more."""


def _vllm_engine(stage: Stage, name: str, role: Role, cpu_args: Sequence[str] = ()) -> VllmEngine:
    args = [*(cpu_args if on_cpu() else ()), *stage.args]
    return VllmEngine(
        stage.model,
        role,
        extra_config=stage.config,
        name=name,
        args=args,
        log_path=stage.logs / f"{name}.log",
    )


def _sglang_engine(stage: Stage, role: SglangRole | None) -> SglangEngine:
    # Three engines may have to share one GPU.
    on_gpu = ("--dtype", "bfloat16", "--mem-fraction-static", "0.25")
    name = role or "reference"
    return SglangEngine(
        stage.model,
        role,
        extra_config=stage.config,
        name=name,
        args=[*(_EXACT if sglang_on_cpu(sglang_python()) else on_gpu), *stage.args],
        log_path=stage.logs / f"{name}.log",
    )


def _router(stage: Stage, prefill: Service, decode: Service) -> RouterProcess:
    log = stage.logs / "router.log"
    return RouterProcess([prefill.base_url], [decode.base_url], log_path=log)


MAKERS: Mapping[EngineName, Callable[[Stage], Demo]] = {
    EngineName.VLLM: _vllm,
    EngineName.SGLANG: _sglang,
    EngineName.VLLM_SGLANG: _vllm_to_sglang,
    EngineName.SGLANG_VLLM: _sglang_to_vllm,
}
