# SPDX-License-Identifier: Apache-2.0
"""An SGLang engine with its HTTP server, on this machine's GPU or on its CPU."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pd_connector.config import CONFIG_VARIABLE, HOST_VARIABLE
from pd_connector.errors import PDConnectorError
from pd_connector.tools.launch.engine import LINK_ONLY
from pd_connector.tools.launch.service import LINK, Network, Service

SglangRole = Literal["prefill", "decode"]

PYTHON_VARIABLE = "PD_CONNECTOR_SGLANG_PYTHON"
"""Variable that names the Python of the environment with SGLang, which cannot share one with vLLM."""

CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    # Otherwise the first request would wait a minute for a C++ compiler.
    "TORCH_COMPILE_DISABLE": "1",
    # SGLang makes a CUDA event for a cached prefix that it sends early.
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
}
CPU_ARGS = ("--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph")
CPU_DECODE_ARGS = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
"""SGLang's default needs pinned memory, and so CUDA."""


SWITCH_ARG = "--enable-pd-role-switch"


def sglang_python() -> str:
    """The Python of an environment with SGLang: this one, the one that ci/setup-sglang makes beside it, or the
    one that the variable names.

    Raises:
        PDConnectorError: there is no such Python.
    """
    if named := os.environ.get(PYTHON_VARIABLE):
        return named
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.version("sglang")
        return sys.executable
    beside = Path(sys.prefix).parent / ".venv-sglang"
    if (beside / ".setup-done").exists():
        return str(beside / "bin" / "python")
    raise PDConnectorError(
        f"SGLang is not installed in {sys.prefix}, and {beside} was not made: install it, or name the "
        f"Python that has it in {PYTHON_VARIABLE}"
    )


@cache
def sglang_on_cpu(python: str) -> bool:
    """Whether the torch of this environment has no GPU support.

    Raises:
        PDConnectorError: it has no torch, or is not a Python.
    """
    program = "import torch; print(torch.cuda.is_available())"
    try:
        ended = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
        why = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
    except OSError as error:
        ended, why = None, error.strerror or str(error)
    if ended is None or ended.returncode:
        raise PDConnectorError(
            f"{python}: cannot be used ({why}): name the Python of an environment with SGLang in {PYTHON_VARIABLE}"
        )
    return ended.stdout.strip() != "True"


class SglangEngine(Service):
    """One engine.

    Args:
        model: folder of the model.
        role: its part in disaggregation; None for an engine that works alone.
        backend: SGLang's name of the transfer backend.
        extra_config: PDConnector's config keys.
        page_size: tokens of a page.
        tp: tensor-parallel ranks.
        max_tokens: most tokens in its cache.
        args: further arguments of SGLang's server; a later argument overrides ours.
        env: further variables; they override ours.
        namespace: where it runs; None for here. There it listens on all addresses: its HTTP server is reached at
            the management address, and its registry and data on the limited link.
    """

    def __init__(
        self,
        model: str | Path,
        role: SglangRole | None = None,
        backend: str = "pd_connector",
        extra_config: Mapping[str, Any] | None = None,
        *,
        page_size: int = 16,
        tp: int = 1,
        max_tokens: int = 16384,
        name: str = "engine",
        port: int | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        namespace: Network | None = None,
    ) -> None:
        super().__init__(name, log_path, namespace, port=port)
        self.model = str(model)
        self.role = role
        self.backend = backend if role is not None else None
        self.extra_config = dict(extra_config or {})
        self.page_size = page_size
        self.tp = tp
        self.max_tokens = max_tokens
        self.args = list(args)
        self.env = dict(env or {})
        self.python = sglang_python()
        self.switches = SWITCH_ARG in self.args
        """Whether it can change its side while it runs: it is started for both."""
        registers = role == "prefill" or self.switches
        self.bootstrap_port = self.reserve() if registers else None

    def command(self) -> list[str]:
        command = [self.python, "-m", "sglang.launch_server", "--model-path", self.model]
        host = self.host if self.namespace is None else "0.0.0.0"
        command += ["--host", host, "--port", str(self.port), "--enable-metrics"]
        command += ["--page-size", str(self.page_size), "--tp-size", str(self.tp)]
        command += ["--max-total-tokens", str(self.max_tokens)]
        if sglang_on_cpu(self.python):
            command += [*CPU_ARGS, "--mem-fraction-static", "0.5"]
            if self.role == "decode" or self.switches:
                command += CPU_DECODE_ARGS
        if self.role is not None:
            command += ["--disaggregation-mode", self.role]
            command += ["--disaggregation-transfer-backend", str(self.backend)]
        if self.bootstrap_port is not None:
            command += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        return command + self.args

    def environment(self) -> dict[str, str]:
        # Its own health check would compute a token each time, which takes a second.
        environment = {"HF_HUB_OFFLINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        if sglang_on_cpu(self.python):
            environment |= CPU_ENVIRONMENT
            if self.tp > 1:
                environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(self.tp)))
        if self.namespace is not None:
            address = self.namespace.address
            environment |= {HOST_VARIABLE: address, "SGLANG_HOST_IP": address, **LINK_ONLY}
            environment["GLOO_SOCKET_IFNAME"] = LINK
        if self.extra_config:
            environment[CONFIG_VARIABLE] = json.dumps(self.extra_config)
        return environment | self.env
