# SPDX-License-Identifier: Apache-2.0
"""Engines of this release and the one before it transfer over tcp, in either direction."""

from typing import Any

import pytest
from support.agents import KEY, LONG, Ranks, assert_pages, ranks  # noqa: F401

from pd_connector.agent import loop
from pd_connector.transport.base import Transport

each_key = pytest.mark.parametrize("key", ["", KEY], ids=["plain", "key"])


def transports_of_before(*args: Any) -> list[Transport]:
    """What `make_transports` made in the previous release."""
    made = MAKE(*args)
    for transport in made:
        if transport.name == "tcp2":
            transport.close()
    return [transport for transport in made if transport.name != "tcp2"]


MAKE = loop.make_transports


@each_key
@pytest.mark.parametrize("old", [{"producer"}, {"consumer"}, {"producer", "consumer"}, set()])
def test_a_rolling_upgrade_transfers(
    ranks: Ranks,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    key: str,
    old: set[str],
) -> None:
    caplog.set_level("INFO")
    settings = LONG | {"transports": ("tcp",), "key": key}
    sides = {}
    for number, side in enumerate(("producer", "consumer")):
        make = transports_of_before if side in old else MAKE
        monkeypatch.setattr(loop, "make_transports", make)
        roles = {"produces": side == "producer", "consumes": side == "consumer"}
        sides[side] = ranks(settings, seed=number, **roles)
    producer, consumer = sides["producer"], sides["consumer"]
    for name, into in (("a", [20, 1]), ("b", [2, 7])):
        producer.offer(name, [5, 3])
        consumer.load(producer.source, name, into)
        assert consumer.loaded(name).cause is None
        assert_pages(producer, [5, 3], consumer, into)
    assert "transport tcp," in caplog.text, "whatever its name on the wire"
    (path,) = [session.path for session in consumer.agent._loop.consumer_side._sessions]
    assert path.transport.name == ("tcp" if old else "tcp2")
