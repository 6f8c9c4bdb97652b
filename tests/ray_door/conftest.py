# SPDX-License-Identifier: Apache-2.0
"""One cluster for all tests; everything here runs in .venv-ray only (`make ray`)."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_*.py"]

if importlib.util.find_spec("ray"):
    from ray_rig import Rig

os.environ.setdefault("PD_CONNECTOR_CHECK", "1")  # every engine inherits it
_HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def rig() -> Iterator[Rig]:
    """A cluster of two nodes on this machine, with one prefill and one decode replica."""
    with Rig() as rig:
        rig.deploy()
        yield rig


_status = 0


def pytest_sessionfinish(exitstatus: int) -> None:
    global _status
    _status = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End without Python's own teardown, if Ray ran: its native threads outlive that, and have crashed there once after all
    tests had passed."""
    if "ray" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)
