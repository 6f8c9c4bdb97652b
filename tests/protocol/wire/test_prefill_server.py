# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of a prefill engine, as a router writes it into a request and a decode engine reads it."""

from __future__ import annotations

from typing import Any

import pytest

from pd_connector.protocol.wire.prefill_server import (
    PrefillServer,
    parse_server,
    without_server,
)


@pytest.mark.parametrize("rank", [None, 0, 3])
def test_what_was_written_is_read(rank: int | None) -> None:
    server = PrefillServer("http://10.0.0.1:8000", rank)
    params = {"qos": "a", **server.params()}
    assert parse_server(params) == server
    assert without_server(params) == {"qos": "a"}


@pytest.mark.parametrize(
    "params", [None, 5, {}, {"pd_prefill_server": 5}, {"pd_prefill_server": {"url": 5}}]
)
def test_what_is_not_a_server_names_none(params: Any) -> None:
    assert parse_server(params) is None


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.1:8000/", ("10.0.0.1", 8000)),
        ("http://[::1]:8000", ("::1", 8000)),
        ("http://p.svc", ("p.svc", 80)),
    ],
)
def test_its_address_is_that_of_its_url(url: str, address: tuple[str, int]) -> None:
    assert PrefillServer(url).address == address
