# SPDX-License-Identifier: Apache-2.0
"""What conftest files of engine tests share: the marker, pools that end with the session, and the
engines' logs when a test fails.

A conftest file imports `pytest_runtest_makereport` by name; pytest then calls it for its tests.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from pd_connector.tools.launch.start_log import tail

LOG_LINES = 40


class _Service(Protocol):
    """One process of an engine."""

    name: str
    log_path: Path


class _Pool(Protocol):
    """Engines that tests share."""

    @property
    def services(self) -> Sequence[_Service]: ...

    def stop(self) -> None: ...


P = TypeVar("P", bound=_Pool)
_pools: list[_Pool] = []


def mark_engine_tests(
    items: list[pytest.Item], folder: Path, first: Sequence[str]
) -> list[pytest.Item]:
    """Every test in this folder starts engines: mark them. Files of `first`, by their stems, go before its others. Returns these tests."""
    places = [place for place, item in enumerate(items) if item.path.parent == folder]
    found = [items[place] for place in places]
    order = {name: place for place, name in enumerate(first)}
    found.sort(key=lambda item: order.get(item.path.stem, len(first)))
    for place, item in zip(places, found, strict=True):
        item.add_marker(pytest.mark.engine)
        items[place] = item
    return found


@contextlib.contextmanager
def running(pool: P) -> Iterator[P]:
    """A pool whose logs are shown when tests fail; at the end its engines are stopped."""
    _pools.append(pool)
    try:
        yield pool
        pool.stop()
    finally:
        _pools.remove(pool)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    report = yield
    if report.failed:
        for pool in _pools:
            for service in pool.services:
                title = f"end of the log of {service.name} ({service.log_path})"
                report.sections.append((title, "\n".join(tail(service.log_path, LOG_LINES))))
    return report
