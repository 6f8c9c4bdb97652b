# SPDX-License-Identifier: Apache-2.0
"""docs/extending.md works as it stands: its files are a package, which is installed and tried."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
FILES = dict(
    re.findall(r'^```\w+ title="toy/(\S+)"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL)
)
TRIALS = sorted(name for name in FILES if name.startswith("try_"))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory, pip: list[str]) -> Path:
    """The folder that the toy package was installed to."""
    source = tmp_path_factory.mktemp("toy")
    for name, text in FILES.items():
        (source / name).write_text(text)
    target = tmp_path_factory.mktemp("site")
    command = [*pip, "install", "--no-deps", "--no-build-isolation", "--target", target, source]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return target


def run(toy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the toy beside pd-connector."""
    path = os.pathsep.join([str(toy), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "PYTHONPATH": path.strip(os.pathsep)}
    full = [sys.executable, *command]
    return subprocess.run(
        full, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_every_section_is_tried() -> None:
    sections = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(sections) == len(TRIALS) == 7


@pytest.mark.parametrize("trial", TRIALS)
def test_what_the_page_adds_works(trial: str, toy: Path) -> None:
    ended = run(toy, "-c", FILES[trial])
    assert ended.returncode == 0, ended.stderr


def test_the_command_that_the_page_adds_is_there(toy: Path) -> None:
    assert run(toy, "-m", "pd_connector", "hello", "--name", "you").stdout == "hello you\n"


@pytest.mark.parametrize(
    "name", ["toy_coding.py", "toy_policy.py", "toy_router.py", "toy_roles.py"]
)
def test_what_planners_and_policies_import_needs_no_torch(name: str, toy: Path) -> None:
    code = f"import sys, {name.removesuffix('.py')}; print('torch' in sys.modules)"
    assert run(toy, "-c", code).stdout == "False\n"
