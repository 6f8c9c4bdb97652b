# SPDX-License-Identifier: Apache-2.0
"""The repository, and a wheel built from a copy of it."""

from pathlib import Path
from zipfile import ZipFile

import pytest
from support.wheels import PIP, ROOT, build, copy_source


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def pip() -> list[str]:
    """How pip is called."""
    return PIP


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository."""
    return copy_source(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def wheel(source: Path) -> Path:
    """The wheel `pip install .` would install."""
    return build(source)


@pytest.fixture(scope="session")
def contents(wheel: Path) -> set[str]:
    """Names of the wheel's files."""
    with ZipFile(wheel) as archive:
        return set(archive.namelist())
