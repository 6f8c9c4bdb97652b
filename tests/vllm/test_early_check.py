# SPDX-License-Identifier: Apache-2.0
"""A wrong config ends the process that the operator started, before vLLM reads a model."""

from typing import Any

import pytest

pytest.importorskip("vllm")

from engines.recipes import MODEL
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from pd_connector.errors import ConfigError
from pd_connector.vllm import early_check

NOWHERE = "/no/such/model"
"""vLLM would fail on it next: whatever is told before was told before anything was read."""


@pytest.fixture(autouse=True)
def watched() -> None:
    early_check.watch()


def engine(model: str = NOWHERE, /, **transfer: Any) -> object:
    config = KVTransferConfig(kv_role="kv_producer", **transfer)
    return EngineArgs(model, kv_transfer_config=config).create_engine_config()


def test_a_misspelt_key_is_told_before_the_model_is_read() -> None:
    with pytest.raises(ConfigError, match="unknown config key 'codc': did you mean 'codec'"):
        engine(kv_connector="PDConnector", kv_connector_extra_config={"codc": "int8"})


def test_a_right_config_lets_vllm_go_on() -> None:
    with pytest.raises(Exception, match=NOWHERE) as caught:
        engine(kv_connector="PDConnector", kv_connector_extra_config={"codec": "int8"})
    assert not isinstance(caught.value, ConfigError)


def test_a_part_of_a_multi_connector_is_checked_too() -> None:
    parts = [
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
        {
            "kv_connector": "PDConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"slots": "16"},
        },
    ]
    with pytest.raises(ConfigError, match=r"slots '16': Expected `int`"):
        engine(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": parts})


def test_a_name_that_differs_in_case_is_told() -> None:
    with pytest.raises(ConfigError, match="'PdConnector': did you mean 'PDConnector'"):
        engine(kv_connector="PdConnector")


def test_dynamos_pd_connector_is_not_taken_for_ours() -> None:
    with pytest.raises(Exception, match=NOWHERE):
        engine(kv_connector="PdConnector", kv_connector_module_path="kvbm.vllm_integration")


def test_other_connectors_may_have_any_keys() -> None:
    with pytest.raises(Exception, match=NOWHERE) as caught:
        engine(kv_connector="NixlConnector", kv_connector_extra_config={"codc": 1})
    assert not isinstance(caught.value, ConfigError)


def test_settings_of_vllm_that_cannot_be_kept_are_refused_as_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(config: Any) -> None:
        raise ConfigError(f"checked before an engine is made: {type(config).__name__}")

    monkeypatch.setattr(early_check, "check_supported", made)
    with pytest.raises(ConfigError, match="checked before an engine is made: VllmConfig"):
        engine(str(MODEL), kv_connector="PDConnector")


def test_the_check_is_put_in_place_once() -> None:
    before = EngineArgs.create_engine_config
    early_check.watch()
    assert EngineArgs.create_engine_config is before
