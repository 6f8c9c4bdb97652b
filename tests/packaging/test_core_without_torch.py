# SPDX-License-Identifier: Apache-2.0
"""The core runs where there is no torch and no engine: a router, a planner or a simulator uses it."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import pd_connector

ABSENT = (
    "torch",
    "numba",
    "llvmlite",
    "triton",
    "vllm",
    "sglang",
    "ray",
    "transformers",
    "nixl",
    "ucxx",
)
ROOMS = ("kv", "plan", "protocol", "control")
POOL = tuple(
    f"pd_connector.pool.{name}"
    for name in ("keys", "record", "chunk_layout", "copy_plan", "load_breakeven")
)
ROUTER = ("scheduler_plugins.router.prompt.body", "scheduler_plugins.router.policies.registry")

BLOCK = f"""
import sys

ABSENT = {ABSENT!r}

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Block())
"""

TESTS = """
import sys
import hypothesis
import pytest

# Also where a test asks for more.
type.__setattr__(hypothesis.settings, "max_examples", property(lambda _: 5))

class Check:
    def pytest_sessionfinish(self, session):
        there = [name for name in ABSENT if name in sys.modules]
        assert not there, there

# The configuration sets no folder of this process' own: results must not mix with the outer run's.
sys.exit(pytest.main([*sys.argv[1:], "-q", "-p", "no:cacheprovider", "-p", "no:xdist"], [Check()]))
"""


def python(code: str, *arguments: str, root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK + code, *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def modules() -> list[str]:
    found = [*(f"pd_connector.{room}" for room in ROOMS), *POOL]
    found += ["pd_kernels.payload", "pd_kernels.checksum"]
    for room in ROOMS:
        folder = Path(pd_connector.__file__).parent / room
        found += [
            f"pd_connector.{room}.{each.name}" for each in pkgutil.iter_modules([str(folder)])
        ]
    return found


def test_every_module_of_the_core_and_the_router_imports(root):
    names = [*modules(), *ROUTER]
    assert len(names) > 20
    ended = python("".join(f"\nimport {name}" for name in names), root=root)
    assert ended.returncode == 0, ended.stderr


def test_what_works_on_tensors_does_not():
    """The block bites."""
    for name in ("torch", "pd_connector.codec", "pd_connector.pages.paged_cache"):
        ended = python(f"\nimport {name}", root=Path.cwd())
        assert "torch is blocked" in ended.stderr


def test_the_tests_of_the_core_pass(root):
    """In one process, and with few examples of each property: what they say is proved with more elsewhere."""
    rooms = [f"tests/{room}" for room in ROOMS]
    ended = python(TESTS, *rooms, "-m", "not engine", root=root)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert " passed" in ended.stdout
