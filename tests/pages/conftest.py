# SPDX-License-Identifier: Apache-2.0
"""Agents whose pages kernels move."""

from collections.abc import Iterator
from typing import Any

import pytest
from support import agents

from pd_connector.pages.paged_cache import PagedCache


@pytest.fixture
def kernels_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Which of the caches made from now on are moved by the operators, in turn."""
    sides: list[bool] = []

    def make(*what: Any) -> PagedCache:
        return PagedCache(*what, by_kernels=sides.pop(0))

    monkeypatch.setattr(agents, "PagedCache", make)
    yield sides
    assert not sides
