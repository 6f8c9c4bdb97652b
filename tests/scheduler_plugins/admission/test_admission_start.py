# SPDX-License-Identifier: Apache-2.0
"""The middleware as a server makes it: loaded by its name, set up when the server starts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from admission_fakes import SETTINGS, Clock, Server

from scheduler_plugins.middleware.middleware import AdmissionMiddleware


def config(settings: Path | None) -> Any:
    """As much of vLLM's configuration as is read."""
    return SimpleNamespace(
        additional_config={"pd_scheduler": str(settings)} if settings else {},
        instance_id="nobody",
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_size_local=1,
            data_parallel_external_lb=False,
            data_parallel_hybrid_lb=False,
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=True, num_gpu_blocks=10, block_size=16, kv_cache_size_tokens=None
        ),
    )


def start(settings: Path | None) -> tuple[AdmissionMiddleware, list[Any]]:
    """Begin the lifespan of a server with these settings."""
    state = SimpleNamespace(vllm_config=config(settings), args=SimpleNamespace(api_key=None))
    middleware = AdmissionMiddleware(Server(Clock()))
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "lifespan", "app": SimpleNamespace(state=state)}
    asyncio.run(middleware(scope, receive, send))
    return middleware, sent


def test_vllm_finds_it_by_its_dotted_name() -> None:
    """As vLLM's server imports what `--middleware` names."""
    flag = "scheduler_plugins.vllm.AdmissionMiddleware"
    module, name = flag.rsplit(".", 1)
    assert getattr(import_module(module), name) is AdmissionMiddleware


def test_settings_that_can_be_used_let_the_server_start(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(SETTINGS)
    middleware, sent = start(tmp_path / "settings.yaml")
    assert sent == []  # left to the application
    assert not middleware._loads, "there is no KV connector"


def test_settings_that_cannot_be_used_stop_it_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("scheduler: {policy: best}")
    _, sent = start(tmp_path / "settings.yaml")
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]
    assert "policy 'best'" in sent[0]["message"]


def test_importing_it_imports_no_engine() -> None:
    code = (
        "import sys, scheduler_plugins.middleware.middleware\n"
        "assert 'vllm' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


_SEVERAL = """
import sys
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from scheduler_plugins.admission.metrics import metrics
metrics().rejected.labels("free", "ttft").inc()
metrics()._waiting.labels("free").set(int(sys.argv[1]))
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_several_api_servers_add_up_and_show_the_newest_report(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for waiting in ("7", "4"):
        shown = subprocess.run(
            [sys.executable, "-c", _SEVERAL, waiting],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    assert 'pd_scheduler:rejected_total{cause="ttft",qos="free"} 2.0' in shown
    assert 'pd_scheduler:waiting{qos="free"} 4.0' in shown
