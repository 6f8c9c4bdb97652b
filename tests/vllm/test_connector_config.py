# SPDX-License-Identifier: Apache-2.0
"""What the door takes from vLLM's own settings."""

from types import SimpleNamespace
from typing import Any

import pytest

from pd_connector.config import Config
from pd_connector.errors import ConfigError
from pd_connector.vllm.support import check_prefixes, check_supported, load_config


@pytest.mark.parametrize(
    ("part", "settings", "named"),
    [
        ("cache_config", {"calculate_kv_scales": True}, "calculate_kv_scales"),
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
    parts = {name: SimpleNamespace() for name in ("cache_config", "model_config")}
    check_supported(SimpleNamespace(**parts))
    with pytest.raises(ConfigError, match=named):
        check_supported(SimpleNamespace(**parts | {part: SimpleNamespace(**settings)}))


def test_a_pool_is_refused_where_kv_of_a_beginning_depends_on_what_follows() -> None:
    causal, other = SimpleNamespace(non_causal=False), SimpleNamespace(non_causal=True)
    mixed = SimpleNamespace(kv_cache_specs={"a": causal, "b": other})

    def check(
        *specs: SimpleNamespace,
        pool: bool = True,
        supported: bool = True,
        pooler: object = None,
        dcp: int = 1,
    ) -> None:
        parallel = SimpleNamespace(
            decode_context_parallel_size=dcp, prefill_context_parallel_size=1
        )
        model = SimpleNamespace(
            is_prefix_caching_supported=supported, pooler_config=pooler, attn_type="encoder_decoder"
        )
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        cache = SimpleNamespace(kv_cache_groups=groups)
        config = SimpleNamespace(model_config=model, parallel_config=parallel)
        check_prefixes(Config(pool=pool), config, cache)

    check(causal, SimpleNamespace())
    for specs in ((causal, other), (mixed,)):
        check(*specs, pool=False)
        with pytest.raises(ConfigError, match="pool: this model's prompts attend to what follows"):
            check(*specs)
    with pytest.raises(ConfigError, match="its pooling needs every token"):
        check(causal, supported=False, pooler=object())
    with pytest.raises(ConfigError, match=r"attention: encoder_decoder") as told:
        check(causal, supported=False)
    assert "pooling" not in str(told.value)
    check(causal, pool=False, dcp=2)
    with pytest.raises(ConfigError, match="pool: ranks of context parallelism"):
        check(causal, dcp=2)


def test_an_engine_with_a_pool_does_not_start_where_pooling_needs_every_token() -> None:
    pytest.importorskip("vllm")
    from support.vllm_steps import SteppedEngine
    from vllm.config.pooler import PoolerConfig

    class Pooling(SteppedEngine):
        def _transfer_config(self, config: Any, *told: Any) -> Any:
            config.model_config.pooler_config = PoolerConfig(pooling_type="MEAN")
            return super()._transfer_config(config, *told)

    with pytest.raises(ConfigError, match="its pooling needs every token"):
        Pooling(pool=True)


def test_vllms_own_address_of_this_host_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    assert load_config({"insecure": True}).host == "10.0.0.7"
    assert load_config({}).host == "127.0.0.1", "without a key only loopback"
