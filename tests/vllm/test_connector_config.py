# SPDX-License-Identifier: Apache-2.0
"""What the door takes from vLLM's own settings."""

from types import SimpleNamespace

import pytest

from pd_connector.errors import ConfigError
from pd_connector.vllm.connector import _check_supported, load_config


@pytest.mark.parametrize(
    ("cache", "parallel", "named"),
    [
        ({"calculate_kv_scales": True}, {}, "calculate_kv_scales"),
        ({}, {"decode_context_parallel_size": 2}, "decode_context_parallel_size 2"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_start(
    cache: dict[str, bool], parallel: dict[str, int], named: str
) -> None:
    def made(cache: dict[str, bool], parallel: dict[str, int]) -> SimpleNamespace:
        return SimpleNamespace(
            cache_config=SimpleNamespace(**cache), parallel_config=SimpleNamespace(**parallel)
        )

    _check_supported(made({"calculate_kv_scales": False}, {}))
    with pytest.raises(ConfigError, match=named):
        _check_supported(made(cache, parallel))


def test_vllms_own_address_of_this_host_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    assert load_config({"insecure": True}).host == "10.0.0.7"
    assert load_config({}).host == "127.0.0.1", "without a key only loopback"
