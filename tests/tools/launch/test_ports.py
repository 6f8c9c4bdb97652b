# SPDX-License-Identifier: Apache-2.0
"""A reserved port is nobody else's, and its server's own."""

import socket

import pytest

from pd_connector.tools.launch.ports import Port


def test_reserved_ports_are_all_different():
    ports = [Port() for _ in range(50)]
    try:
        assert len({port.number for port in ports}) == 50
    finally:
        for port in ports:
            port.release()


@pytest.mark.parametrize("option", [None, socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_who_asks_for_any_free_port_does_not_get_a_reserved_one(option):
    ports = {port.number: port for port in (Port() for _ in range(100))}
    others = [socket.socket() for _ in range(300)]
    try:
        for other in others:
            if option is not None:
                other.setsockopt(socket.SOL_SOCKET, option, 1)
            other.bind(("127.0.0.1", 0))
        assert not ports.keys() & {other.getsockname()[1] for other in others}
    finally:
        for held in [*others, *(port._socket for port in ports.values())]:
            held.close()


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_the_server_it_is_meant_for_listens_on_it_and_gets_every_connection(option):
    with Port() as port, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, option, 1)
        server.bind(("127.0.0.1", port.number))
        server.listen()
        server.settimeout(10)
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port.number), timeout=10):
                server.accept()[0].close()


def test_a_reserved_port_without_its_server_refuses_connections():
    with Port() as port, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port.number), timeout=10)


def test_a_server_that_shares_nothing_gets_the_port_only_when_it_is_released():
    with Port() as port, socket.socket() as server:
        with pytest.raises(OSError, match="in use"):
            server.bind(("127.0.0.1", port.number))
        port.release()
        server.bind(("127.0.0.1", port.number))
