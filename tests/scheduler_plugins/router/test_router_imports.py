# SPDX-License-Identifier: Apache-2.0
"""The router runs on a machine that has neither torch nor an engine."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"numba", "torch", "transformers", "triton", "vllm"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import MODULE
"""


def imports(module: str) -> bool:
    command = [sys.executable, "-c", PROGRAM.replace("MODULE", module)]
    return subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize(
    "module", ["scheduler_plugins.router.endpoints.app", "scheduler_plugins.router.__main__"]
)
def test_the_router_needs_neither_torch_nor_an_engine(module: str) -> None:
    assert imports(module)


def test_the_check_sees_what_is_blocked() -> None:
    assert not imports("torch")
