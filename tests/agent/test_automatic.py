# SPDX-License-Identifier: Apache-2.0
"""What agents decide for themselves: transports, and whether transfers are coded."""

import pytest
from support.agents import LONG, Ranks, assert_pages, geometry_of, ranks  # noqa: F401
from support.waits import until

from pd_connector.agent import loop
from pd_connector.config import Config
from pd_connector.errors import TransportError
from pd_connector.transport.base import Transport, TransportParts
from pd_connector.transport.choice import Machine, choose, this_machine

DEVICE = Machine(("mlx5_0",), has_nixl=True)
MANY = 150
WIDE = geometry_of(key_dim=64, value_dim=64)


def test_a_session_says_what_it_took_and_why_nothing_faster(
    ranks: Ranks,  # noqa: F811
) -> None:
    producer = ranks(LONG | {"transports": ("auto",)}, consumes=False)
    consumer = ranks(LONG | {"transports": ("tcp",)}, seed=1, produces=False)
    producer.offer("t", [5, 3])
    consumer.load(producer.source, "t", [2, 9])
    assert consumer.loaded("t").cause is None
    assert_pages(producer, [5, 3], consumer, [2, 9])
    assert producer.count("sessions", transport="tcp") == 1
    reason = choose(Config(), this_machine()).without or "peer"
    assert producer.count("slower_sessions", cause=reason) == 1
    assert producer.agent.transports.startswith("shm,tcp (auto")


def test_nixl_that_cannot_be_set_up_is_left_out_with_the_reason(
    ranks: Ranks,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = loop.make_transports

    def made(parts: TransportParts) -> list[Transport]:
        if "nixl" in parts.config.transports:
            raise TransportError("no memory can be registered")
        return make(parts)

    monkeypatch.setattr(loop, "make_transports", made)
    monkeypatch.setattr("pd_connector.agent.agent.this_machine", lambda: DEVICE)
    producer, _ = ranks.pair(LONG | {"transports": ("auto",), "insecure_data": True})
    told = "shm,tcp (auto; not nixl: no memory can be registered)"
    assert producer.agent.transports == told
    with pytest.raises(TransportError, match="no memory"):
        ranks.pair(LONG | {"transports": ("nixl",)})


@pytest.mark.parametrize("theirs", ["auto", "int8"])
def test_codec_auto_measures_both_ways_and_says_what_it_asks_for(
    ranks: Ranks,  # noqa: F811
    theirs: str,
) -> None:
    """Transfers in `raw` bring the very bytes, those with the codec bring others."""
    options = {"geometry": WIDE, "pages": 2 * MANY}
    settings = LONG | {"transports": ("tcp",)}
    producer = ranks(settings | {"codec": theirs}, consumes=False, **options)
    consumer = ranks(settings | {"codec": "auto"}, seed=1, produces=False, **options)
    pages, into = range(MANY), range(MANY, 2 * MANY)
    for number in range(6):
        plain = consumer.count("plain_transfers")
        transfer = f"t{number}"
        producer.offer(transfer, pages)
        until(lambda: producer.gauge("leased_pages"), "an offer that the load will find")
        consumer.load(producer.source, transfer, into)
        assert consumer.loaded(transfer).cause is None
        same = all(producer.page(a) == consumer.page(b) for a, b in zip(pages, into, strict=True))
        assert same == (consumer.count("plain_transfers") > plain)
        producer.freed(transfer)
        until(lambda: not producer.gauge("leased_pages"), "pages freed")
    assert consumer.count("coded_transfers") >= 1
    assert consumer.count("plain_transfers") >= 1
    assert consumer.count("coded_transfers") + consumer.count("plain_transfers") == 6
    coded, plain = (consumer.count("asked_transfers", codec=name) for name in ("int8", "raw"))
    assert (coded, plain) == (consumer.count("coded_transfers"), consumer.count("plain_transfers"))


def test_a_codec_that_is_named_is_never_left_out(
    ranks: Ranks,  # noqa: F811
) -> None:
    """Negative control: nobody left the choice to this consumer."""
    options = {"geometry": WIDE, "pages": 2 * MANY}
    settings = LONG | {"transports": ("tcp",), "codec": "int8"}
    producer = ranks(settings, consumes=False, **options)
    consumer = ranks(settings, seed=1, produces=False, **options)
    for number in range(4):
        producer.offer(f"t{number}", range(MANY))
        consumer.load(producer.source, f"t{number}", range(MANY, 2 * MANY))
        assert consumer.loaded(f"t{number}").cause is None
        assert producer.page(0) != consumer.page(MANY)
    assert consumer.count("plain_transfers") == 0
