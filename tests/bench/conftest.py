# SPDX-License-Identifier: Apache-2.0
"""UCX uses loopback alone here. An agent of NIXL names every interface of its host to its peers, and a peer cannot meet it
once one of them has gone: other tests make and remove interfaces meanwhile."""

import pytest


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
