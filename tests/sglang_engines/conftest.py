# SPDX-License-Identifier: Apache-2.0
"""Engines of a session, and a loud skip where SGLang could not be installed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_engines.sglang_harness import EnginePool

from pd_connector.errors import PDConnectorError
from pd_connector.tools.launch.sglang import sglang_python

_HERE = Path(__file__).parent
LOG_LINES = 40
_pools: list[EnginePool] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this folder starts engines."""
    ours = [item for item in items if item.path.parent == _HERE]
    try:
        sglang_python()
    except PDConnectorError as error:
        if ours:
            warnings.warn(f"{len(ours)} tests of SGLang are SKIPPED: {error}", stacklevel=1)
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=str(error)))
    for item in ours:
        item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """All engines of this session."""
    pool = EnginePool(tmp_path_factory.mktemp("sglang"))
    _pools.append(pool)
    yield pool
    pool.stop()
    _pools.remove(pool)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        for pool in _pools:
            for service in pool.services:
                title = f"end of the log of {service.name} ({service.log_path})"
                report.sections.append((title, service.log_tail(LOG_LINES)))
    return report
