# SPDX-License-Identifier: Apache-2.0
"""Engines of a session, and a loud skip where SGLang could not be installed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_engines.sglang_harness import EnginePool
from support.engine_pools import mark_engine_tests, pytest_runtest_makereport, running
from support.worker_files import files_together

from pd_connector.errors import PDConnectorError
from pd_connector.tools.launch.sglang import sglang_python

__all__ = ["pytest_runtest_makereport"]

_HERE = Path(__file__).parent
SHARING = (
    "test_sglang_alike",
    "test_sglang_cross",
    "test_sglang_faults",
    "test_sglang_ranks",
    "test_sglang_unlike",
)
"""Files that take each other's engines: one worker has them all, in this order."""
FIRST = (*SHARING, "test_sglang_states", "test_sglang_pool_live")
"""Then those that take the longest. A worker that began one last would be alone with it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this folder starts engines."""
    ours = mark_engine_tests(items, _HERE, FIRST)
    try:
        sglang_python()
    except PDConnectorError as error:
        if ours:
            warnings.warn(f"{len(ours)} tests of SGLang are SKIPPED: {error}", stacklevel=1)
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=str(error)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file stays with one worker, which has its engines."""
    return files_together(config, log, SHARING)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """All engines of this session."""
    with running(EnginePool(tmp_path_factory.mktemp("sglang"))) as pool:
        yield pool
