# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the engine tests: `pair`, `reference`, and the engines' logs when a test fails.

A test module says which setup it wants with a constant `SETUP`, or a test with
`@pytest.mark.parametrize("setup", [...], indirect=True)`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from harness import (
    Answer,
    Prompt,
)
from pairs import (
    EnginePool,
    Pair,
    Setup,
)
from support.engine_pools import mark_engine_tests, pytest_runtest_makereport, running
from support.worker_files import files_together

__all__ = ["pytest_runtest_makereport"]

os.environ.setdefault("PD_CONNECTOR_CHECK", "1")  # every engine inherits it
_HERE = Path(__file__).parent
MANY_ENGINES = (
    "test_pool_changes",
    "test_pool_live",
    "test_role_kills",
    "test_printed_commands",
    "test_demo",
    "test_plan_live",
)
"""Files with up to six engines at a time, of 1.6 GiB each, or with two or three as users start them, of up to 3 GiB each,
beside those that their worker keeps: one of these files at a time fits into 24 GiB."""
FIRST = (*MANY_ENGINES, "test_unlike", "test_audit_live", "test_versions")
"""Files that take the longest. A worker that began one last would be alone with it."""


class Reference(Protocol):
    """Asks the engine that answers are held to."""

    def __call__(self, prompt: Prompt, max_tokens: int = 32, **extra: object) -> Answer: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this folder starts engines."""
    mark_engine_tests(items, _HERE, FIRST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file stays with one worker, which has its pair."""
    return files_together(config, log, MANY_ENGINES)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """All engines of this session."""
    with running(EnginePool(tmp_path_factory.mktemp("engines"))) as pool:
        yield pool


@pytest.fixture(scope="module")
def setup(request: pytest.FixtureRequest) -> Setup:
    """How the pair is configured: the test's parameter, the module's SETUP, or the defaults."""
    chosen = getattr(request, "param", None) or getattr(request.module, "SETUP", None)
    return chosen or Setup()


@pytest.fixture
def pair(engines: EnginePool, setup: Setup, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A running pair; after the test everything it used has come home."""
    pair = engines.pair(setup, with_reference="reference" in request.fixturenames)
    yield pair
    pair.assert_idle()


@pytest.fixture(scope="session")
def reference(engines: EnginePool) -> Reference:
    """Answers of one engine without a connector."""
    return engines.reference
