# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes on this machine, a Serve application in it, and what tests ask of both."""

from __future__ import annotations

import contextlib
import os
import signal
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import ray
from harness import Answer, completion, wait_until
from ray import serve
from ray._private import state
from ray.cluster_utils import Cluster
from ray.llm._internal.serve.core.configs.openai_api_models import CompletionRequest
from ray.serve._private.common import DeploymentID
from ray_application import DECODE, PREFILL, ROOT, application
from support.free_ports import free_ports

from pd_connector.config import KEY_VARIABLE
from pd_connector.tools.launch import Client, Samples, proc
from pd_connector.tools.launch.engine import CPU_ENVIRONMENT

APP = "default"
REQUESTS = "serve_requests"
PROMPT = "def quicksort(items):\n    " * 45  # about 1,200 tokens: five steps of a prefill
TOLERANCE = 2e-4
"""Pages of another size are added up in another order."""


def grown(now: Samples, before: Samples, name: str, **labels: str) -> float:
    """How much our counts of this name have grown. Those of a replica that has ended may be gone."""
    wanted = Samples({key: value for key, value in now.since(before).items() if value > 0})
    return wanted.total(f"ray_pd_connector_{name}_total", **labels)


def ask(rig: Rig, prompt: str = PROMPT, max_tokens: int = 16, **extra: Any) -> Answer:
    """A completion through the application."""
    return completion(rig.url, prompt, max_tokens, **extra)


def hand_over(rig: Rig, **extra: Any) -> None:
    """Ask until KV is received: the first prompt of a producer is computed on both sides (audit)."""
    before = rig.metrics()

    def received() -> float:
        ask(rig, max_tokens=2, **extra)
        return grown(rig.metrics(), before, "received_transfers")

    wait_until(received, "a prefill replica hands KV over")


class Rig:
    """The cluster; ended with everything in it."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        here = Path(__file__).parent
        paths = [ROOT, ROOT / "kernels", ROOT / "tests/engines", ROOT / "tests", here]
        os.environ.update(
            {
                **CPU_ENVIRONMENT,
                KEY_VARIABLE: os.urandom(32).hex(),
                "HF_HUB_OFFLINE": "1",
                "PD_RAY_RIG": self.id,
                "PYTHONPATH": os.pathsep.join(map(str, paths)),
                # vLLM's engine does not notice that its replica was killed. Ray ends it with this.
                "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true",
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_worker_niceness": "0",  # 15 otherwise: the last on a busy machine
                "RAY_METRICS_REPORT_INTERVAL_MS": "500",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a worker may live in its engine core's process
                "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles its sampler at an engine's first request
                "SPT_NOENV": "1",  # what ends its processes by their environment can read it
            }
        )
        self.url = f"http://127.0.0.1:{free_ports(1)[0]}"
        self.client = Client(self.url, timeout_s=120.0)

    def __enter__(self) -> Self:
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 3,  # number of idle workers that are started at once
                "include_dashboard": False,
                "resources": {"decode": 8},
                "object_store_memory": 80 << 20,
                "_system_config": {"metrics_report_interval_ms": 500},
            },
        )
        self.other = self._cluster.add_node(
            num_cpus=2, resources={"prefill": 8}, object_store_memory=80 << 20
        )
        ray.init(address=self._cluster.address, log_to_driver=False)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.end_serve()
        finally:
            ray.shutdown()
            self._cluster.shutdown()
            left = self.processes("")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def deploy(self) -> None:
        """Serve the demo's model with a replica on each side, and wait until they are there."""
        port = int(self.url.rpartition(":")[2])
        # With one on each node they would share this machine's port, and requests go with a lost node.
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        serve.run(application(), name=APP, external_scaler_enabled=True)
        self.wait_for(1, 1)

    def want(self, deployment: str, replicas: int) -> None:
        """Ask Serve for this many replicas, as a scaler does."""
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        wanted = DeploymentID(name=deployment, app_name=APP)
        ray.get(controller.update_deployment_replicas.remote(wanted, replicas))

    def scale(self, prefill: int, decode: int) -> None:
        """Have this many replicas, and wait until they are there."""
        self.want(PREFILL, prefill)
        self.want(DECODE, decode)
        self.wait_for(prefill, decode)

    def end_serve(self) -> None:
        """End Serve. A replica that has no node to start on is ended first: Serve would wait for it for the
        whole `graceful_shutdown_timeout_s`."""
        with contextlib.suppress(ValueError):  # ended already
            self.want(PREFILL, 0)
            for name in self._actors(PREFILL, lambda state: "PENDING" in state):
                with contextlib.suppress(ValueError):
                    ray.kill(ray.get_actor(name, namespace="serve"))
        serve.shutdown()

    def wait_for(self, prefill: int, decode: int) -> None:
        """Wait until exactly these replicas are there, and running."""
        wanted = {PREFILL: {"RUNNING": prefill}, DECODE: {"RUNNING": decode}}
        wait_until(
            lambda: self.replicas() == wanted,
            lambda: f"{wanted}: {self.replicas()}",
            400.0,
            every_s=0.5,  # the controller has something else to do
        )

    def replicas(self) -> dict[str, dict[str, int]]:
        """For each deployment, how many replicas are in which state."""
        found = serve.status().applications[APP].deployments
        return {
            name: {str(state): n for state, n in found[name].replica_states.items()}
            for name in (PREFILL, DECODE)
            if name in found
        }

    def pids(self, deployment: str) -> dict[str, int]:
        """Processes of a deployment's living replicas, by the replicas' names."""
        found = self._actors(deployment, lambda state: state == "ALIVE")
        return {name.rpartition("#")[2]: pid for name, pid in found.items()}

    def _actors(self, deployment: str, wanted: Callable[[str], bool]) -> dict[str, int]:
        """Names and processes of a deployment's replicas in states of Ray's."""
        prefix = f"SERVE_REPLICA::{APP}#{deployment}#"
        return {
            actor["Name"]: actor["Pid"]
            for actor in state.actors().values()
            if actor["Name"].startswith(prefix) and wanted(actor["State"])
        }

    def alone(self, prompt: str, max_tokens: int, salt: str) -> Answer:
        """What a prefill replica's engine answers without any connector's doing: the reference."""
        request = CompletionRequest(
            model="demo",
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            logprobs=5,
            return_tokens_as_token_ids=True,
            cache_salt=salt,
        )
        handle = serve.get_deployment_handle(PREFILL, APP).options(stream=True)
        (answer,) = list(handle.completions.remote(request))
        raw = answer.model_dump()
        found = raw["choices"][0]["logprobs"]
        return Answer(
            tuple(found["tokens"]),
            tuple(found["token_logprobs"]),
            tuple(found["top_logprobs"]),
            raw["choices"][0]["text"],
            raw,
        )

    def metrics(self) -> Samples:
        """What all living nodes export. Ray lists a node for some time after it was lost."""
        text = ""
        for node in ray.nodes():
            url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            with (
                contextlib.suppress(ConnectionError, urllib.error.URLError),
                urllib.request.urlopen(url, timeout=10.0) as answer,
            ):
                text += answer.read().decode()
        return Samples.parse(text)

    @contextlib.contextmanager
    def counts(self, name: str, least: float, **labels: str) -> Iterator[None]:
        """Within, a count of replicas grows by `least` at least; Ray exports it some time later."""
        before = self.metrics()
        yield
        found, seen = 0.0, before

        def enough() -> bool:
            nonlocal found, seen
            seen = self.metrics()
            found = grown(seen, before, name, **labels)
            return found >= least

        def what() -> str:
            others = {key: value for key, value in seen.since(before).items() if name in str(key)}
            return f"{least} more of {name} {labels}: {found}; all that has changed: {others}"

        wait_until(enough, what, 180.0, 0.25)

    def idle(self) -> None:
        """Wait until no living engine holds anything for another."""
        wait_until(lambda: not any(self.held()), lambda: f"no transfer left: {self.held()}")

    def held(self) -> list[int]:
        """For each prefill replica, the transfers that decode replicas have yet to fetch."""
        handle = serve.get_deployment_handle(PREFILL, APP)
        found = handle.broadcast("collective_rpc", "outgoing_transfers").results()
        return [sum(ranks) for ranks in found]

    def processes(self, name: str) -> list[int]:
        """Living processes of this cluster whose title has `name` in it."""
        found = []
        marker = f"PD_RAY_RIG={self.id}".encode()
        table = proc.table()
        ours = proc.descendants(table, {os.getpid()})
        for pid in table.keys() - {os.getpid()}:
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                known = pid in ours or marker in Path(f"/proc/{pid}/environ").read_bytes()
                if known and name in title:
                    found.append(pid)
        return found

    def logged(self, deployment: str, text: str) -> int:
        """How many lines with this text the replicas of a deployment have logged."""
        logs = Path(self._cluster.head_node.get_logs_dir_path())
        # vLLM sends to stderr what its process logs.
        lines = (
            line for file in logs.glob("worker-*.err") for line in file.read_text().split("\n")
        )
        return sum(text in line and f"{APP}_{deployment}" in line for line in lines)

    def engine_of(self, pid: int) -> list[int]:
        """Processes of a replica's engine."""
        return sorted(proc.descendants(proc.table(), {pid}) - {pid})

    def engines(self, deployment: str) -> list[int]:
        """Processes of all engines of a deployment."""
        return [p for pid in self.pids(deployment).values() for p in self.engine_of(pid)]

    def asked(self, deployment: str) -> set[str]:
        """Names of the replicas of a deployment that have requests now."""
        wanted = ("ray_serve_replica_processing_queries", ("deployment", deployment))
        return {
            dict(labels)["replica"]
            for (name, labels), value in self.metrics().items()
            if name == wanted[0] and wanted[1] in labels and value
        }

    def routes(self) -> list[list[tuple[str, str, str]]]:
        """For each decode replica what it remembers: user, decided, used."""
        handle = serve.get_deployment_handle(DECODE, APP)
        found: list[list[tuple[str, str, str]]] = handle.broadcast("routes").results()
        return found

    def lose_node(self) -> None:
        """End everything on the node with the prefill replicas, without a farewell."""
        raylets = {info.process.pid for info in self.other.all_processes["raylet"]}
        for pid in proc.descendants(proc.table(), raylets):
            os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(self.other, allow_graceful=False)
