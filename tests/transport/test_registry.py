# SPDX-License-Identifier: Apache-2.0
"""Transports are made by name, those of other packages too."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.distributions import add_distribution

from pd_connector.config import TRANSPORTS
from pd_connector.transport import registry

GROUP = "pd_connector.transports"
MODULE = """
from pd_connector.transport.tcp import TcpTransport

class Pigeon(TcpTransport):
    name = "pigeon"

class Falcon(Pigeon):
    name = "falcon"
    one_sided = True
    reaches_devices = True

another = object()
"""
PROGRAM = """
import sys
sys.path[:0] = sys.argv[2:]
from support.agents import LONG, Rank, assert_pages
from pd_connector.config import Config

if __name__ == "__main__":
    settings = dict(LONG, transports=(sys.argv[1],))
    Config.load(settings, {})
    producer, consumer = Rank(settings, consumes=False), Rank(settings, seed=1, produces=False)
    producer.offer("t", [5, 3])
    consumer.load(producer.source, "t", [2, 9])
    assert consumer.loaded("t").cause is None
    assert_pages(producer, [5, 3], consumer, [2, 9])
    for rank in (producer, consumer):
        rank.agent.close()
    print("moved by", sys.argv[1])
"""


SLOTS = """
import sys
sys.path.insert(0, sys.argv[2])
import torch
from pd_connector.config import Config
from pd_connector.memory.buffers import Buffers
from pd_connector.transport.registry import slot_use

config, cpu = Config(slot_mib=1, slots=2, transports=(sys.argv[1],)), torch.device("cpu")
slots = Buffers(config, cpu, slot_use(config.transports), produces=True, consumes=True, slot_device=cpu)
print("on device:", len(slots.device_slots.slabs), "private:", slots.private_landing is not slots.landing, slots.why_host)
"""


def run(name: str, folder: Path, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    """Move pages between two agents that use this transport alone."""
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", program, name, str(folder), str(tests), str(tests.parent)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_every_transport_that_a_config_may_name_can_be_made():
    assert tuple(registry._BUILT_IN) == TRANSPORTS


def test_pages_are_moved_by_a_transport_that_another_package_adds(tmp_path):
    entry = {GROUP: {"pigeon": "pigeon_module:Pigeon"}}
    add_distribution(tmp_path, "pigeons", {"pigeon_module": MODULE}, entry)
    done = run("pigeon", tmp_path)
    assert "moved by pigeon" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("falcon", "on device: 2 private: True None"),
        ("pigeon", "on device: 0 private: False slots in host memory (transport: pigeon copy"),
    ],
)
def test_what_the_class_says_decides_about_slots_also_for_another_packages_transport(
    tmp_path: Path, name: str, slots: str
) -> None:
    entry = {GROUP: {name: f"pigeon_module:{name.title()}"}}
    add_distribution(tmp_path, "pigeons", {"pigeon_module": MODULE}, entry)
    done = run(name, tmp_path, SLOTS)
    assert slots in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("dove", "pigeon_module:Pigeon", "whose `name` is 'dove'"),
        ("pigeon", "pigeon_module:another", "is <object object"),
        ("pigeon", "pigeon_module:none", "cannot be loaded"),
    ],
)
def test_what_is_no_such_transport_is_refused_with_its_package(tmp_path, name, value, said):
    add_distribution(tmp_path, "pigeons", {"pigeon_module": MODULE}, {GROUP: {name: value}})
    done = run(name, tmp_path)
    assert done.returncode != 0
    assert said in done.stderr
    assert "package 'pigeons'" in done.stderr
