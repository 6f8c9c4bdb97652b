# SPDX-License-Identifier: Apache-2.0
"""An API server of Kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from router_fakes import run
from support.fake_kubernetes import FakeKubernetes, pod

from scheduler_plugins.router.engines.kubernetes import api as api_module


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a scenario with an API server that has two pods."""

    def play(scenario: Callable[[FakeKubernetes], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            async with FakeKubernetes() as server:
                monkeypatch.setenv(api_module.API_VARIABLE, server.url)
                await server.put(pod("a", "10.0.0.1"), pod("b", "10.0.0.2"))
                await scenario(server)

        run(whole())

    return play
