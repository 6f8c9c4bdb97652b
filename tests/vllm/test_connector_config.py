# SPDX-License-Identifier: Apache-2.0
"""What the door takes from vLLM's own settings."""

import pytest

from pd_connector.vllm.connector import load_config


def test_vllms_own_address_of_this_host_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    assert load_config({"insecure": True}).host == "10.0.0.7"
    assert load_config({}).host == "127.0.0.1", "without a key only loopback"
