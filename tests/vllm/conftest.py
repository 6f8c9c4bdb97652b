# SPDX-License-Identifier: Apache-2.0
"""Pools of these tests are never full. They fit into the 64 MiB that Docker gives /dev/shm, also while other tests use some."""

import pytest

from pd_connector.pool import settings
from pd_connector.pool.room import Room


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "memory_rooms", lambda shm, own: [Room(8 << 30, "", "")])
