# SPDX-License-Identifier: Apache-2.0
"""Proxies of others, themselves, with PDConnector by its name only: NVIDIA Dynamo with its own workers, and vllm-router.

`ci/setup-proxies` makes the environment that they run in.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harness import url_of, wait_until
from pairs import Pair, Setup
from recipes import COMPILE_NOTHING, MODEL, OLDER
from test_handoff import prompt_of
from test_proxies import EARLY, PORTIONS, TRANSFERS
from tools import delta

from pd_bench.serve.stack import VllmRouterProcess
from pd_connector.tools.launch.engine import CPU_ENVIRONMENT
from pd_connector.tools.launch.service import Service, stop_services

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-proxies"
PYTHON = ENVIRONMENT / "bin" / "python"
LONG = 1500
TOKENS = 16
STARTS = (10, 30, 50)
SETUP = Setup.of(args=PORTIONS, lease_s=6)
_TAKEN = set[int]()


def low_port() -> int:
    """A free port for Dynamo's `DYN_SYSTEM_PORT`, which it reads as a signed number of 16 bits."""
    for number in range(20000 + os.getpid() % 10000, 32768):
        with socket.socket() as here, suppress(OSError):
            here.bind(("127.0.0.1", number))
            if number not in _TAKEN:
                _TAKEN.add(number)
                return number
    raise OSError("no port below 32768 is free")


class Part(Service):
    """One of Dynamo's processes. They find each other by files, and talk over TCP: no etcd, no NATS."""

    module = "dynamo.frontend"

    def __init__(self, name: str, folder: Path, port: int | None = None) -> None:
        super().__init__(name, folder / f"{name}.log", port=port)
        self.found_in = folder / "discovery"

    def command(self) -> list[str]:
        here = ["--http-host", self.host, "--http-port", str(self.port)]
        return [str(PYTHON), "-m", self.module, *here]

    def environment(self) -> dict[str, str]:
        return {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self.found_in),
            "DYN_REQUEST_PLANE": "tcp",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": f"{OLDER}:{ROOT}:{ROOT / 'kernels'}",
        }


class Worker(Part):
    """A vLLM engine in one of Dynamo's workers. Its `port` serves health and metrics."""

    module = "dynamo.vllm"

    def __init__(self, name: str, folder: Path, role: str, page: int) -> None:
        super().__init__(name, folder, low_port())
        self.transfer = {"kv_connector": "PDConnector", "kv_role": role}
        self.page = page

    def command(self) -> list[str]:
        args = ["--model", str(MODEL), "--served-model-name", "tiny", "--dtype", "float32"]
        args += ["--max-model-len", "4096", "--block-size", str(self.page), "--enforce-eager"]
        args += ["--max-num-batched-tokens", "256", "--disaggregation-mode", self.name]
        args += ["--kv-transfer-config", json.dumps(self.transfer)]
        return [str(PYTHON), "-m", self.module, *args]

    def environment(self) -> dict[str, str]:
        served = {"DYN_SYSTEM_HOST": self.host, "DYN_SYSTEM_PORT": str(self.port)}
        return super().environment() | CPU_ENVIRONMENT | COMPILE_NOTHING | served


@pytest.fixture(scope="module", autouse=True)
def _environment() -> None:
    if not PYTHON.exists():
        pytest.skip(f"no {ENVIRONMENT.name}: run ci/setup-proxies")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Part]]:
    """The frontend, and workers with unlike pages."""
    if not OLDER.is_dir():
        pytest.skip(f"no vLLM 0.31 in {OLDER.name} of the environment: run ci/setup-tests")
    folder = tmp_path_factory.mktemp("dynamo")
    (folder / "discovery").mkdir()
    found = {
        "prefill": Worker("prefill", folder, "kv_producer", 64),
        "decode": Worker("decode", folder, "kv_consumer", 32),
        "frontend": Part("frontend", folder),
    }
    for part in found.values():
        part.start()
    try:
        for part in found.values():
            part.wait_ready()
        models = found["frontend"].client
        wait_until(lambda: json.loads(models.get("/v1/models"))["data"], "the model is served")
        yield found
    finally:
        stop_services(found.values())


def asked(frontend: Service, start: int) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt_of(LONG, start=start), "max_tokens": TOKENS}
    answer = frontend.client.post("/v1/completions", {**body, "temperature": 0})
    assert isinstance(answer, dict)
    return answer


def test_dynamo_hands_over_and_shows_what_was_counted(parts: dict[str, Part], reference) -> None:
    """The first prompt is audited; the others come with their KV. Its prefill router asks one worker after the other."""
    frontend, prefill, decode = (parts[name] for name in ("frontend", "prefill", "decode"))
    for start in STARTS:
        wanted = reference(prompt_of(LONG, start=start), TOKENS)
        assert asked(frontend, start)["choices"][0]["text"] == wanted.text
        wait_until(
            lambda: decode.metrics().total("pd_connector:audits_total", cause="passed") == 1,
            "the audit of the first prompt has passed",
        )
    handed_over = "pd_connector:handoffs_total"
    wait_until(
        lambda: decode.metrics().total(handed_over, cause="handed_over") == len(STARTS) - 1,
        "the handoffs are counted",
    )
    assert decode.metrics().total("pd_connector:received_bytes_total") > 0
    sent = prefill.metrics()
    assert sent.total("pd_connector:sent_chunks_total") > 0
    assert sent.total("pd_connector:early_chunks_total") == 0
    wait_until(lambda: prefill.metrics().total("pd_connector:leased_pages") == 0, "no page is kept")


def test_vllm_router_hands_over(pair: Pair, reference) -> None:
    with VllmRouterProcess(
        ENVIRONMENT, url_of(pair.p), url_of(pair.d), pair.p.log_path.parent / "vllm-router.log"
    ) as router:
        router.wait_ready()
        with delta(pair.d, TRANSFERS) as moved, delta(pair.p, EARLY) as early:
            for start in STARTS:
                wanted = reference(prompt_of(LONG, start=start), TOKENS)
                assert asked(router, start)["choices"][0]["text"] == wanted.text
            wait_until(lambda: moved.so_far() == len(STARTS), "the transfers are counted")
    assert early.amount == 0
