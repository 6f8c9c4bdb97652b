# SPDX-License-Identifier: Apache-2.0
"""`transports: auto`: what is offered on which machine, and what is said of it."""

from pathlib import Path

import pytest

from pd_connector.config import Config
from pd_connector.errors import ConfigError
from pd_connector.transport.choice import Machine, choose, this_machine

DEVICE = Machine(("mlx5_0",), has_nixl=True)


@pytest.mark.parametrize(
    ("machine", "settings", "names", "without", "advice"),
    [
        (Machine((), True), {"insecure_data": True}, ("shm", "tcp"), "device", "no RDMA device"),
        (Machine(("mlx5_0",), False), {}, ("shm", "tcp"), "library", "pd-connector[nixl]"),
        (DEVICE, {}, ("shm", "tcp"), "insecure_data", "`insecure_data: true`"),
        (DEVICE, {"insecure_data": True}, ("shm", "nixl", "tcp"), "", ""),
        (DEVICE, {"transports": ["tcp"]}, ("tcp",), "", ""),
    ],
)
def test_nixl_is_offered_where_there_is_a_device_and_plaintext_is_allowed(
    machine: Machine, settings: dict[str, object], names: tuple[str, ...], without: str, advice: str
) -> None:
    choice = choose(Config.load(settings, {}), machine)
    assert (choice.names, choice.without) == (names, without)
    assert advice in choice.advice
    assert choice.describe().startswith(",".join(names))


def test_devices_are_those_that_the_kernel_shows(tmp_path: Path) -> None:
    assert this_machine(tmp_path).devices == ()
    (tmp_path / "sys/class/infiniband/mlx5_1").mkdir(parents=True)
    (tmp_path / "dev/nvidia-caps-imex-channels/channel0").mkdir(parents=True)
    assert this_machine(tmp_path).devices == ("mlx5_1", "channel0")


@pytest.mark.parametrize("value", ["auto", ["auto"]])
def test_auto_is_the_default_and_may_be_written_as_a_word(value: object) -> None:
    assert Config.load({"transports": value}, {}) == Config.load({}, {})


def test_auto_stands_alone() -> None:
    with pytest.raises(ConfigError, match="must be the only item"):
        Config.load({"transports": ["auto", "tcp"]}, {})
