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
from pd_connector.transport.registry import TransportParts

class Pigeon(TcpTransport):
    name = "pigeon"

def make(parts: TransportParts) -> Pigeon:
    config, buffers = parts.config, parts.buffers
    return Pigeon(buffers.private_landing, buffers.private_sending, config.host, config.permits)

def make_another(parts):
    return object()
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


def run(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Move pages between two agents that use this transport alone."""
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", PROGRAM, name, str(folder), str(tests), str(tests.parent)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_every_transport_that_a_config_may_name_can_be_made():
    assert tuple(registry._MAKERS) == TRANSPORTS


def test_pages_are_moved_by_a_transport_that_another_package_adds(tmp_path):
    entry = {GROUP: {"pigeon": "pigeon_module:make"}}
    add_distribution(tmp_path, "pigeons", {"pigeon_module": MODULE}, entry)
    done = run("pigeon", tmp_path)
    assert "moved by pigeon" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("dove", "pigeon_module:make", "whose `name` is 'dove'"),
        ("pigeon", "pigeon_module:make_another", "makes <object object"),
        ("pigeon", "pigeon_module:make_none", "cannot be loaded"),
    ],
)
def test_what_is_no_such_transport_is_refused_with_its_package(tmp_path, name, value, said):
    add_distribution(tmp_path, "pigeons", {"pigeon_module": MODULE}, {GROUP: {name: value}})
    done = run(name, tmp_path)
    assert done.returncode != 0
    assert said in done.stderr
    assert "package 'pigeons'" in done.stderr
