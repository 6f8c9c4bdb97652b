# SPDX-License-Identifier: Apache-2.0
"""What must be importable where there is no torch (a router, a planner, a simulator)."""

import subprocess
import sys

import pytest

_PROGRAM = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numba", "vllm", "triton"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize(
    "module",
    [
        "pd_connector.compiler",
        "pd_connector.extensions",
        "pd_connector.telemetry",
        "pd_connector.memory.buffers",
        "pd_connector.memory.pieces",
        "pd_connector.memory.pins",
        "pd_connector.memory.slab",
        "pd_connector.control.addresses",
        "pd_connector.control.keys",
        "pd_connector.control.sockets",
        "pd_connector.remedies",
        "pd_connector.transport.registry",
        "pd_connector.transport.shm.transport",
    ],
)
def test_it_is_imported_without_torch_numba_and_engines(module: str) -> None:
    command = [sys.executable, "-c", _PROGRAM, module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
