# SPDX-License-Identifier: Apache-2.0
"""An operator's calls reach a worker's PDConnector, and no other connector."""

from __future__ import annotations

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state

from pd_connector.vllm.connector import PDConnector
from pd_connector.vllm.extension import Operated, WorkerExtension


class Counts(Operated):
    version = ""

    def set_weights_version(self, version: str) -> None:
        self.version = version

    def outgoing_transfers(self) -> int:
        return 3


def test_calls_reach_the_workers_connector(monkeypatch) -> None:
    connector = Counts()
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    WorkerExtension().set_weights_version("step 7")
    assert connector.version == "step 7"
    assert WorkerExtension().outgoing_transfers() == 3
    assert issubclass(PDConnector, Operated)


@pytest.mark.parametrize("other", [None, object()], ids=["no connector", "another connector"])
def test_without_a_pdconnector_a_version_is_refused(monkeypatch, other) -> None:
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", other)
    with pytest.raises(RuntimeError, match="no PDConnector"):
        WorkerExtension().set_weights_version("step 7")
    assert WorkerExtension().outgoing_transfers() == 0
