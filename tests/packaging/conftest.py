# SPDX-License-Identifier: Apache-2.0
"""The repository, and a wheel built from a copy of it."""

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def pip() -> list[str]:
    """How pip is called."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository."""
    source = tmp_path_factory.mktemp("wheel") / "source"
    source.mkdir()
    for file in ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    # With tests beside the packages, as in a clone: they must stay out.
    for folder_name in (
        "pd_connector",
        "scheduler_plugins",
        "kernels",
        "tests",
        "docs",
        "examples",
    ):
        shutil.copytree(ROOT / folder_name, source / folder_name, ignore=unwanted)
    return source


@pytest.fixture(scope="session")
def wheel(source: Path, pip: list[str]) -> Path:
    """The wheel `pip install .` would install. Built with the setuptools that is here: no network."""
    folder = source.parent
    command = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def contents(wheel: Path) -> set[str]:
    """Names of the wheel's files."""
    with ZipFile(wheel) as archive:
        return set(archive.namelist())
