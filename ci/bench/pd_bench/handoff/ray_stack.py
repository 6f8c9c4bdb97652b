# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes in two network namespaces, and one Serve application in it.

Prefill replicas run on one node, the ingress and decode replicas on the other, so that KV passes the
limited link. Clients and metrics are reached over the management links.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pd_bench.netns import Namespace
from pd_connector.config import HOST_VARIABLE, KEY_VARIABLE
from pd_connector.tools.launch import HttpError, Service, stop_services
from pd_connector.tools.launch.engine import CPU_ENVIRONMENT, LINK_ONLY, PAGE_TOKENS, on_cpu

MODEL_ID = "bench"
OURS = "pd_connector.ray:build_pd_app"
RAYS = "ray.serve.llm:build_pd_openai_app"
EXPORT_MS = 200
"""How often Ray's processes report their metrics to their node's endpoint."""
_GCS_PORT = 6379
_PREFILLED = re.compile(r" \S+_Prefill:\S+ \S+ \S+ -- CALL completions OK ([\d.]+)ms")


class RayNode(Service):
    """One node: a raylet, and on the first node also the cluster's own processes.

    Args:
        side: the side that runs there, `prefill` or `decode`; also the name of its resource.
        head: the first node; None if this is the first.
    """

    def __init__(
        self, side: str, namespace: Namespace, head: RayNode | None, logs: Path, key: str
    ) -> None:
        super().__init__(f"Ray {side}", logs / f"ray-{side}.log", namespace)
        self._side = side
        self._head = head
        self._key = key
        self.folder: Path = head.folder if head else Path(tempfile.mkdtemp(prefix="pd-ray-"))
        self.address = f"{namespace.address}:{_GCS_PORT}"

    def command(self) -> list[str]:
        assert self.namespace is not None
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        command += ["--node-ip-address", self.namespace.address, "--num-cpus", "3"]
        command += ["--resources", json.dumps({self._side: 8})]
        command += ["--object-store-memory", str(100 << 20)]
        command += ["--metrics-export-port", str(self.port), "--disable-usage-stats"]
        if self._head is not None:
            return [*command, "--address", self._head.address]
        config = json.dumps({"metrics_report_interval_ms": EXPORT_MS})
        command += ["--head", "--port", str(_GCS_PORT), "--include-dashboard=false"]
        return [*command, "--temp-dir", str(self.folder), "--system-config", config]

    def environment(self) -> dict[str, str]:
        assert self.namespace is not None
        address = self.namespace.address
        own = {
            KEY_VARIABLE: self._key,
            HOST_VARIABLE: address,
            "HF_HUB_OFFLINE": "1",
            "RAY_AUTH_MODE": "disabled",  # else each node needs the first node's token
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # default 15: every other program would come first
            "VLLM_HOST_IP": address,
            "VLLM_NO_USAGE_STATS": "1",
        }
        return own | LINK_ONLY | (CPU_ENVIRONMENT if on_cpu() else {})

    def ready(self) -> bool:
        """Whether its metrics can be read."""
        if not self.running:
            return super().ready()  # which says why
        try:
            self.metrics()
        except (HttpError, OSError):
            return False
        return True


class ServeApplication(Service):
    """`serve run` with a config file; it answers once its replicas are ready."""

    def __init__(self, config: Path, head: RayNode, logs: Path) -> None:
        super().__init__("Serve", logs / "serve.log", head.namespace)
        self._config = config
        self._head = head

    def command(self) -> list[str]:
        serve = [sys.executable, "-m", "ray.serve.scripts", "run", str(self._config)]
        return [*serve, "--address", self._head.address]

    def environment(self) -> dict[str, str]:
        return self._head.environment()

    def ready(self) -> bool:
        """Whether a model is served."""
        if not self.running:
            return super().ready()
        try:
            return self.client.model() == MODEL_ID
        except (HttpError, OSError, ValueError, LookupError):
            return False


class RayStack:
    """A cluster with one application, for a `with` block.

    Args:
        builder: import path of the function that builds the application.
        transfer: the connector's `kv_transfer_config`, the same for both sides.
        engine: further arguments of both engines.
        namespaces: of prefill and decode.
    """

    def __init__(
        self,
        builder: str,
        transfer: Mapping[str, Any],
        model: str,
        engine: Mapping[str, Any],
        namespaces: tuple[Namespace, Namespace],
        logs: Path,
        key: str,
    ) -> None:
        logs.mkdir(parents=True)
        self.head = RayNode("decode", namespaces[1], None, logs, key)
        self.prefill = RayNode("prefill", namespaces[0], self.head, logs, key)
        config = logs / "serve.yaml"
        self.serve = ServeApplication(config, self.head, logs)
        sides = {
            f"{side}_config": _side(side, model, transfer, engine) for side in ("prefill", "decode")
        }
        ingress = {"num_replicas": 1, "ray_actor_options": {"resources": {"decode": 1}}}
        application = {
            "name": "bench",
            "route_prefix": "/",
            "import_path": builder,
            "args": {**sides, "ingress_deployment_config": ingress},
        }
        http = {"host": "0.0.0.0", "port": self.serve.port}
        # JSON is YAML, too.
        config.write_text(
            json.dumps(
                {"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}
            )
        )

    def prefills_s(self) -> list[float]:
        """Seconds that each prefill took, from the replica's call to its answer, as Serve logs them.

        Ray's histograms would only tell a time's bucket.
        """
        seconds = []
        for log in self.head.folder.glob("session_2*/logs/worker-*.err"):
            seconds += [
                float(ms) / 1e3 for ms in _PREFILLED.findall(log.read_text(errors="replace"))
            ]
        return seconds

    @property
    def services(self) -> tuple[Service, ...]:
        """In the order in which they are started."""
        return self.head, self.prefill, self.serve

    def __enter__(self) -> Self:
        try:
            for service in self.services:
                service.start().wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        stop_services(reversed(self.services))


def _side(
    side: str, model: str, transfer: Mapping[str, Any], engine: Mapping[str, Any]
) -> dict[str, Any]:
    """An `LLMConfig` with one replica on the node of this side."""
    return {
        "model_loading_config": {"model_id": MODEL_ID, "model_source": model},
        **({"accelerator_config": {"kind": "cpu"}} if on_cpu() else {}),
        "engine_kwargs": {
            "dtype": "bfloat16",
            "block_size": PAGE_TOKENS,
            "enforce_eager": on_cpu(),
            **engine,
            "kv_transfer_config": transfer,
        },
        "placement_group_config": {"bundles": [{"CPU": 1, side: 1}]},
        "deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}},
    }
