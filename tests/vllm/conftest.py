# SPDX-License-Identifier: Apache-2.0
"""Pools of these tests are never full. They fit into the 64 MiB that Docker gives /dev/shm, also while other tests use some."""

import importlib.util

import pytest

from pd_connector.pool import settings
from pd_connector.pool.room import Room


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "memory_rooms", lambda shm, own: [Room(8 << 30, "", "")])


@pytest.fixture(scope="session", autouse=True)
def _model_classes_are_looked_at_here() -> None:
    """Not in a new interpreter, which imports vLLM, so that this process does not touch a GPU."""
    if importlib.util.find_spec("vllm"):
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda look: look()
