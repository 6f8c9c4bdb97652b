# SPDX-License-Identifier: Apache-2.0
"""A wrong config ends the process that the operator started, before vLLM reads a model."""

import logging
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engines.recipes import MODEL
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from pd_connector.control.keys import new_key
from pd_connector.errors import ConfigError
from pd_connector.pool.settings import SHM_VARIABLE, load, memory_folder
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


def test_another_disk_folder_than_that_of_the_hosts_pool_is_told_before_the_model_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, two = ({"memory": "64MiB", "dir": str(tmp_path / name)} for name in ("one", "two"))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        monkeypatch.setenv(SHM_VARIABLE, shm)
        settings = load(one)
        assert settings is not None
        with (
            closing(settings.open()),
            pytest.raises(ConfigError, match=r"keeps its chunks in .*one already"),
        ):
            engine(kv_connector="PDConnector", kv_connector_extra_config={"pool": two})


def test_a_pool_that_nobody_uses_is_looked_at_and_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        monkeypatch.setenv(SHM_VARIABLE, shm)
        with pytest.raises(Exception, match=NOWHERE):
            engine(kv_connector="PDConnector", kv_connector_extra_config={"pool": True})
        assert not memory_folder().exists(), "commands would say that its books are gone"


def test_settings_of_vllm_that_cannot_be_kept_are_refused_as_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(config: Any) -> None:
        raise ConfigError(f"checked before an engine is made: {type(config).__name__}")

    monkeypatch.setattr(early_check, "check_supported", made)
    with pytest.raises(ConfigError, match="checked before an engine is made: VllmConfig"):
        engine(str(MODEL), kv_connector="PDConnector")


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU build only")
@pytest.mark.parametrize(
    ("space", "args", "warned"),
    [(None, {}, True), ("1", {}, False), (None, {"gpu_memory_utilization": 0.4}, False)],
)
def test_an_engine_on_cpus_that_takes_nearly_all_memory_says_how_much_and_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    space: str | None,
    args: dict[str, float],
    warned: bool,
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    if space is not None:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    monkeypatch.setattr(
        type(current_platform), "get_device_total_memory", classmethod(lambda cls: 16 << 30)
    )
    caplog.set_level("WARNING", "pd_connector.vllm")
    monkeypatch.setattr(logging.getLogger("pd_connector"), "propagate", True)
    config = KVTransferConfig(kv_role="kv_both", kv_connector="PDConnector")
    EngineArgs(str(MODEL), kv_transfer_config=config, **args).create_engine_config()
    said = [line for line in caplog.messages if "VLLM_CPU_KVCACHE_SPACE" in line]
    assert bool(said) is warned
    if warned:
        assert "92 % of the memory for this engine, 14.7 of 16.0 GiB" in said[0]


def test_the_check_is_put_in_place_once() -> None:
    before = EngineArgs.create_engine_config
    early_check.watch()
    assert EngineArgs.create_engine_config is before


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process before this one has checked where the engine listens."""
    monkeypatch.setenv(early_check._CHECKED, "")  # so that it is unset again at the end
    monkeypatch.delenv(early_check._CHECKED)
    monkeypatch.setattr(early_check, "_PATIENCE_S", 0.2)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def place(role: str = "kv_producer", args: Any = None, **extra: Any) -> object:
    config = KVTransferConfig(
        kv_connector="PDConnector", kv_role=role, kv_connector_extra_config=extra
    )
    return EngineArgs(NOWHERE, kv_transfer_config=config, **(args or {})).create_engine_config()


@pytest.mark.usefixtures("first")
@pytest.mark.parametrize("key", ["control_port", "data_port"])
def test_a_port_in_use_is_told_before_the_model_is_read(key: str, taken: int) -> None:
    with pytest.raises(ConfigError, match=f"{key} {taken}: 0 of these ports are free.*name others"):
        place(**{key: taken})


@pytest.mark.usefixtures("first")
@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.77"])
def test_a_host_that_is_not_this_machine_is_told_before_the_model_is_read(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"host '{host}': .* address of this machine"):
        place(host=host, key=new_key())


@pytest.mark.usefixtures("first")
def test_a_port_that_comes_free_is_waited_for(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    """An engine that is started again may meet the one before it."""
    freed: list[float] = []
    monkeypatch.setattr(early_check, "_free", lambda *_: freed.append(0.0) or len(freed) > 1)
    with pytest.raises(Exception, match=NOWHERE):
        place(control_port=taken)


@pytest.mark.usefixtures("first")
def test_a_decode_engine_listens_nowhere(taken: int) -> None:
    with pytest.raises(Exception, match=NOWHERE):
        place("kv_consumer", control_port=taken)


@pytest.mark.usefixtures("first")
def test_the_engines_own_children_find_their_ports_taken_and_go_on(taken: int) -> None:
    """vLLM's API servers make the config again, when the workers listen already."""
    with pytest.raises(Exception, match=NOWHERE):
        place()
    with pytest.raises(Exception, match=NOWHERE):
        place(control_port=taken)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.usefixtures("first")
def test_each_data_parallel_engine_needs_a_port_of_its_own(free_port: int) -> None:
    args = {"data_parallel_size": 2}
    wanted = f"control_port {free_port}: 1 of these ports are free, and this engine has 2 ranks"
    with pytest.raises(ConfigError, match=wanted):
        place(args=args, control_port=free_port)


@pytest.mark.usefixtures("first")
@pytest.mark.parametrize("more", [{"data_parallel_size_local": 1}, {"data_parallel_rank": 1}])
def test_a_data_parallel_engine_on_another_machine_needs_no_port_here(
    free_port: int, more: dict[str, int]
) -> None:
    with pytest.raises(Exception, match=NOWHERE):
        place(args={"data_parallel_size": 2, **more}, control_port=free_port)
