# SPDX-License-Identifier: Apache-2.0
"""What the door takes from vLLM's own settings."""

from types import SimpleNamespace

import pytest

from pd_connector.errors import ConfigError
from pd_connector.vllm.support import check_supported, load_config


@pytest.mark.parametrize(
    ("part", "settings", "named"),
    [
        ("cache_config", {"calculate_kv_scales": True}, "calculate_kv_scales"),
        ("parallel_config", {"decode_context_parallel_size": 2}, "decode_context_parallel_size 2"),
        ("model_config", {"enable_sleep_mode": True}, "enable_sleep_mode"),
        ("model_config", {"enable_return_routed_experts": True}, "enable_return_routed_experts"),
        (
            "aux_output_config",
            {"enable_return_routed_experts": True},
            "enable_return_routed_experts",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_at_start(
    part: str, settings: dict[str, int], named: str
) -> None:
    parts = {
        name: SimpleNamespace() for name in ("cache_config", "parallel_config", "model_config")
    }
    check_supported(SimpleNamespace(**parts))
    with pytest.raises(ConfigError, match=named):
        check_supported(SimpleNamespace(**parts | {part: SimpleNamespace(**settings)}))


def test_vllms_own_address_of_this_host_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    assert load_config({"insecure": True}).host == "10.0.0.7"
    assert load_config({}).host == "127.0.0.1", "without a key only loopback"
