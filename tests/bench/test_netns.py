# SPDX-License-Identifier: Apache-2.0
"""Two namespaces joined by a link of limited rate: what passes, what does not, what is left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_bench import netns
from pd_bench.netns import Bed, Namespace, NetnsError, available, remove_stale
from pd_connector.tools.launch.engine import VllmEngine
from pd_connector.tools.launch.family import Family
from pd_connector.tools.launch.service import Service

RATE_MBIT = 200
SENT_BYTES = 20_000_000

SEND = f"""
import socket, sys
with socket.create_server((sys.argv[1], 9000)) as server:
    server.accept()[0].sendall(bytes({SENT_BYTES}))
"""
RECEIVE = """
import socket, sys, time
for attempt in range(100):
    try:
        connection = socket.create_connection((sys.argv[1], 9000), timeout=10)
        break
    except ConnectionRefusedError:
        time.sleep(0.1)
received, started = len(connection.recv(1 << 20)), time.perf_counter()
while data := connection.recv(1 << 20):
    received += len(data)
print(received, time.perf_counter() - started)
"""


class WebServer(Service):
    """Python's own, which says on which address it is asked."""

    def __init__(self, folder: Path, namespace: Namespace) -> None:
        super().__init__("web", folder / "log", namespace)
        (folder / "health").write_text("well")
        self.folder = folder

    def command(self) -> list[str]:
        bind = ["--bind", self.host, "--directory", str(self.folder)]
        return [sys.executable, "-m", "http.server", str(self.port), *bind]


def ours() -> list[str]:
    """Namespaces and devices that beds of this process have made."""
    names = os.listdir("/run/netns") if os.path.isdir("/run/netns") else []
    return [n for n in names if n.startswith(f"pd-{os.getpid()}-")]


def devices() -> set[str]:
    return {name for name in os.listdir("/sys/class/net") if name.startswith("pdm")}


@pytest.fixture
def allowed() -> None:
    if reason := available():
        pytest.skip(f"no namespaces: {reason}")


@pytest.fixture
def bed(allowed) -> Iterator[Bed]:
    with Bed(RATE_MBIT) as made:
        yield made


@pytest.mark.quiet
@pytest.mark.netns
def test_bytes_between_the_namespaces_pass_at_the_set_rate_in_both_directions(bed):
    for sender, receiver in (bed.namespaces, bed.namespaces[::-1]):
        python = [sys.executable, "-c"]
        with Family([*sender.prefix, *python, SEND, sender.address]):
            answer = subprocess.run(
                [*receiver.prefix, *python, RECEIVE, sender.address],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            ).stdout.split()
        assert int(answer[0]) == SENT_BYTES
        rate_mbit = SENT_BYTES * 8 / float(answer[1]) / 1e6
        assert 0.5 * RATE_MBIT <= rate_mbit <= 1.1 * RATE_MBIT


@pytest.mark.netns
def test_the_other_side_is_reached_over_the_limited_link_only(bed):
    left, right = bed.namespaces

    def reaches(address: str) -> bool:
        code = "import socket, sys; s = socket.socket(type=socket.SOCK_DGRAM); s.connect((sys.argv[1], 9))"
        command = [*left.prefix, sys.executable, "-c", code, address]
        return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0

    assert reaches(right.address)
    assert reaches("127.0.0.1")
    assert not reaches(right.management)
    assert not reaches("192.0.2.1")


@pytest.mark.netns
def test_a_service_in_a_namespace_is_asked_from_outside_and_ends_as_one_family(bed, tmp_path):
    with WebServer(tmp_path, bed.namespaces[1]) as server:
        server.wait_ready(timeout_s=60)
        assert server.client.get("/health") == "well"
        family = server.family
        assert family is not None
        assert family.pid in {process.pid for process in family.members()}
        inside = f"/proc/{family.pid}/ns/net"
        assert os.readlink(inside) != os.readlink("/proc/self/ns/net")
    assert family.members() == []


@pytest.mark.netns
def test_nothing_is_left_after_a_bed(allowed):
    before = devices()
    with Bed() as bed:
        assert len(ours()) == 2
        assert len(devices() - before) == 2
        names = {side.name for side in bed.namespaces}
        assert names <= set(ours())
    assert ours() == []
    assert devices() <= before
    with pytest.raises(RuntimeError, match="only inside"):
        _ = bed.namespaces


@pytest.mark.netns
def test_a_bed_that_fails_half_way_leaves_nothing(allowed, monkeypatch):
    real = netns._attempt
    monkeypatch.setattr(
        netns, "_attempt", lambda *command: "no tbf here" if command[0] == "tc" else real(*command)
    )
    before = devices()
    with pytest.raises(NetnsError, match=r"tc .*no tbf here"), Bed():
        pass
    assert ours() == []
    assert devices() <= before


@pytest.mark.netns
def test_two_beds_at_once_have_different_addresses(bed):
    with Bed() as other:
        addresses = [side.management for b in (bed, other) for side in b.namespaces]
        assert len(set(addresses)) == 4


@pytest.mark.netns
def test_the_next_bed_removes_what_a_killed_owner_left_and_nothing_else(bed):
    code = (
        "import os, signal, sys\n"
        "from pd_bench.netns import Bed\n"
        "bed = Bed(); bed.__enter__()\n"
        "print(*(side.name for side in bed.namespaces), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    left = killed.stdout.split()
    assert len(left) == 2, killed.stderr
    assert set(left) <= set(os.listdir("/run/netns"))
    assert remove_stale() == sorted(left)
    assert not set(left) & set(os.listdir("/run/netns"))
    assert {side.name for side in bed.namespaces} <= set(os.listdir("/run/netns"))


def test_a_missing_tool_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(NetnsError, match="`ip` is missing: install iproute2"), Bed():
        pass


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(ValueError, match="rate_mbit 0"):
        Bed(0)


def test_an_engine_in_a_namespace_serves_outside_and_hands_over_on_the_link(tmp_path):
    place = Namespace("x", "198.19.0.1", "198.18.0.2")
    engine = VllmEngine("m", "kv_both", "NixlConnector", log_path=tmp_path / "log", namespace=place)
    environment = engine.environment()
    assert engine.base_url == f"http://198.18.0.2:{netns.FIRST_PORT}"
    assert engine.command()[engine.command().index("--host") + 1] == "198.18.0.2"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "198.19.0.1"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(netns.FIRST_PORT + 1)
    assert environment["PD_CONNECTOR_HOST"] == "198.19.0.1"
    assert environment["UCX_TLS"] == "tcp"
