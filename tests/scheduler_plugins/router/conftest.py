# SPDX-License-Identifier: Apache-2.0
"""The router's waits in these tests."""

import pytest
from router_fakes import PATIENT


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PATIENT.items():
        monkeypatch.setattr(f"scheduler_plugins.router.{name}", value)
