# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine with its OpenAI server, on this machine's GPU or on its CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pd_connector.config import HOST_VARIABLE
from pd_connector.tools.launch.service import LINK, Network, Service

Role = Literal["kv_producer", "kv_consumer", "kv_both"]

PAGE_TOKENS = 32
"""Tokens per page. vLLM's CPU attention takes only multiples of 32."""

CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # Without these each engine claims and pins all cores, and two engines compete for them.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

GPU_ARGS = ("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(4 << 30))
"""Several engines share a GPU here. An engine that is given its cache size does not measure free memory, which
changes while its neighbours start."""

LINK_ONLY = {
    # UCX would find the shared memory that joins both namespaces, and the management link.
    "UCX_TLS": "tcp",
    "UCX_NET_DEVICES": LINK,
}


def on_cpu() -> bool:
    """Whether the installed vLLM is a CPU build; vLLM's own choice of a platform uses the same rule."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return distribution == "vllm-cpu" or "cpu" in metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return False


class VllmEngine(Service):
    """One engine.

    Args:
        model: folder of the model.
        role: its part in disaggregation; None for an engine that works alone.
        connector: vLLM's name of the connector; None for an engine that works alone.
        extra_config: the connector's own config (`kv_connector_extra_config`).
        kv_transfer: further keys of `--kv-transfer-config`, such as `kv_load_failure_policy`.
        args: further arguments of vLLM's server; a later argument overrides ours.
        env: further variables; they override ours.
        namespace: where it runs; None for here. There it serves HTTP on the management address, and
            hands KV over on the limited link.
        python: interpreter of the environment that has the engine.
    """

    def __init__(
        self,
        model: str | Path,
        role: Role | None = None,
        connector: str | None = "PDConnector",
        extra_config: Mapping[str, Any] | None = None,
        kv_transfer: Mapping[str, Any] | None = None,
        *,
        name: str = "engine",
        max_model_len: int = 4096,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        python: str = sys.executable,
        namespace: Network | None = None,
    ) -> None:
        super().__init__(name, log_path, namespace)
        if (role is None) != (connector is None) and role is not None:
            raise ValueError(f"role {role!r} without a connector: give both, or neither")
        self.model = str(model)
        self.role = role
        self.connector = connector if role is not None else None
        self.extra_config = dict(extra_config or {})
        self.kv_transfer = dict(kv_transfer or {})
        self.max_model_len = max_model_len
        self.args = list(args)
        self.env = dict(env or {})
        self.python = python
        # NixlConnector does not find a free port itself.
        self._side_channel = self.reserve() if self.connector == "NixlConnector" else None

    def command(self) -> list[str]:
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--host", self.host, "--port", str(self.port), "--dtype", "bfloat16"]
        command += ["--block-size", str(PAGE_TOKENS), "--max-model-len", str(self.max_model_len)]
        if on_cpu():
            command.append("--enforce-eager")
        else:
            command += GPU_ARGS
        if self.connector is not None:
            command += ["--kv-transfer-config", json.dumps(self._kv_transfer_config())]
        return command + self.args

    def environment(self) -> dict[str, str]:
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if on_cpu():
            environment |= CPU_ENVIRONMENT
        data_host = self.namespace.address if self.namespace else self.host
        if self.namespace is not None:
            environment |= {"VLLM_HOST_IP": data_host, HOST_VARIABLE: data_host} | LINK_ONLY
        if self._side_channel is not None:
            environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = data_host
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self._side_channel)
        return environment | self.env

    def _kv_transfer_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"kv_connector": self.connector, "kv_role": self.role}
        if self.connector == "NixlConnector" and on_cpu():
            config["kv_buffer_device"] = "cpu"
        if self.extra_config:
            config["kv_connector_extra_config"] = self.extra_config
        return config | self.kv_transfer
