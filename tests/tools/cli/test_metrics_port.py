# SPDX-License-Identifier: Apache-2.0
"""The port on which a carrier answers Prometheus: what it answers, and strangers who are silent or many."""

import http.client
import socket
from collections.abc import Iterator

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pd_connector.errors import ConfigError
from pd_connector.tools.cli import metrics_port
from pd_connector.tools.cli.metrics_port import MetricsPort


class One(Collector):
    """A gauge."""

    def collect(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily("pd_connector:one", "One.")
        gauge.add_metric([], 1.0)
        yield gauge


@pytest.fixture
def port() -> Iterator[MetricsPort]:
    made = MetricsPort("127.0.0.1:0", One())
    yield made
    made.close()


def asked(port: MetricsPort, method: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port.port, timeout=60)
    connection.request(method, path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_it_shows_metrics_and_nothing_else(port: MetricsPort) -> None:
    status, text = asked(port, "GET", "/metrics")
    assert status == 200
    assert "pd_connector:one 1.0" in text.splitlines()
    assert asked(port, "GET", "/metrics?name=x")[0] == 200
    assert asked(port, "GET", "/")[0] == 404
    assert asked(port, "POST", "/metrics")[0] == 405


def test_bytes_that_are_no_request_end_their_connection_only(port: MetricsPort) -> None:
    for data in (b"\r\n\r\n", b"GET\r\n\r\n", b"\xff" * 100_000):
        with socket.create_connection(("127.0.0.1", port.port), timeout=60) as stranger:
            try:
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
            except OSError:
                pass  # it hung up before all was sent
    assert asked(port, "GET", "/metrics")[0] == 200


def test_a_silent_connection_is_closed_and_holds_nobody_up(
    port: MetricsPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_port, "_WITHIN_S", 600.0)
    with socket.create_connection(("127.0.0.1", port.port), timeout=60) as patient:
        assert asked(port, "GET", "/metrics")[0] == 200
        patient.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert patient.recv(4096).startswith(b"HTTP/1.1 200")
    monkeypatch.setattr(metrics_port, "_WITHIN_S", 0.1)
    with socket.create_connection(("127.0.0.1", port.port), timeout=60) as silent:
        silent.sendall(b"GET /metrics")
        assert silent.recv(1) == b"", "it is closed at its deadline"


def test_more_connections_than_there_are_places_are_closed(
    port: MetricsPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_port, "_WITHIN_S", 600.0)
    held = [
        socket.create_connection(("127.0.0.1", port.port), timeout=60)
        for _ in range(metrics_port._MOST_CONNECTIONS)
    ]
    with socket.create_connection(("127.0.0.1", port.port), timeout=60) as further:
        assert further.recv(1) == b""
    held[0].sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert held[0].recv(4096).startswith(b"HTTP/1.1 200")
    for each in held:
        each.close()


@pytest.mark.parametrize("address", ["", "9105", "127.0.0.1", "127.0.0.1:x", "h:70000", ":9105"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--metrics .*: must be HOST:PORT"):
        MetricsPort(address, One())


def test_a_port_that_is_taken_is_refused(port: MetricsPort) -> None:
    with pytest.raises(ConfigError, match=f"--metrics 127.0.0.1:{port.port}: cannot listen there"):
        MetricsPort(f"127.0.0.1:{port.port}", One())
