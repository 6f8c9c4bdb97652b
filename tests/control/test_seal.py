# SPDX-License-Identifier: Apache-2.0
"""A client cannot make a decode engine dial what it likes."""

import json
from typing import Any

import msgspec
import pytest

from pd_connector.config import Config
from pd_connector.control.keys import new_key
from pd_connector.control.seal import UntrustedAddressError, sealed, trusted_peers
from pd_connector.kv.geometry import Shard
from pd_connector.protocol.wire.params import (
    ProducerAddress,
    decode_params,
    description,
    parse,
    parse_address,
    response,
)
from pd_connector.protocol.wire.peers import Peer, Source

KEY = new_key()
CONFIG = Config(key=KEY)
PEERS = tuple(
    Peer(Source("192.0.2.1", 5000 + rank, "engine"), Shard(0, 4, rank, 2)) for rank in range(2)
)
ADDRESS = sealed(ProducerAddress("engine", PEERS), KEY)


def trusted(params: dict[str, Any], config: Config = CONFIG) -> tuple[Peer, ...]:
    parsed = parse(json.loads(json.dumps(params)))
    assert parsed is not None
    return trusted_peers(parsed, config)


def test_what_a_producer_answers_is_dialled_whichever_way_it_was_passed_on():
    assert trusted(response(ADDRESS, transfer="t", pages=[[1]], tokens=4)) == PEERS
    described = parse_address(json.loads(json.dumps(description(ADDRESS))))
    assert described is not None
    assert trusted(decode_params(described, "t")) == PEERS


@pytest.mark.parametrize(
    "change",
    [
        {"remote_ranks": [["203.0.113.9", 5000, 0, 4, 0], ["192.0.2.1", 5001, 0, 4, 1]]},
        {"remote_ranks": [["192.0.2.1", 22, 0, 4, 0], ["192.0.2.1", 5001, 0, 4, 1]]},
        {"remote_ranks": [], "remote_host": "203.0.113.9"},
        {"remote_engine_id": "another"},
        {"tp_size": 4},
        {"remote_seal": "0" * 32},
        {"remote_seal": ""},
    ],
)
def test_what_a_client_has_changed_is_not_dialled(change: dict[str, Any]):
    with pytest.raises(UntrustedAddressError, match="config key peers"):
        trusted(decode_params(ADDRESS, "t") | change)


@pytest.mark.parametrize("seal", ["\u00e9" * 32, "\ud800", "0\0", "0\n"])
def test_a_seal_that_is_no_text_of_ours_stops_nobody(seal: str):
    with pytest.raises(ValueError, match="remote_seal"):
        trusted(decode_params(ADDRESS, "t") | {"remote_seal": seal})
    parsed = parse(decode_params(ADDRESS, "t"))
    assert parsed is not None
    with pytest.raises(UntrustedAddressError, match="its seal is not ours"):
        trusted_peers(msgspec.structs.replace(parsed, remote_seal="\u00e9"), CONFIG)


def test_another_key_seals_nothing_here():
    with pytest.raises(UntrustedAddressError, match="its seal is not ours"):
        trusted(decode_params(ADDRESS, "t"), Config(key=new_key()))


def test_without_a_seal_only_peers_are_dialled():
    params = decode_params(ADDRESS._replace(seal=""), "t")
    for config in (
        CONFIG,
        Config(insecure=True),
        Config(insecure=True, peers=("198.51.100.0/24",)),
    ):
        with pytest.raises(UntrustedAddressError, match="it has no seal"):
            trusted(params, config)
    assert trusted(params, Config(insecure=True, peers=("192.0.2.0/24",))) == PEERS
    assert trusted(params, Config(key=KEY, peers=("192.0.2.1",))) == PEERS


def test_with_a_key_a_client_cannot_have_local_ports_dialled():
    """Every engine with the key seals its address, also where all are on one machine."""
    here = tuple(p._replace(source=p.source._replace(host="127.0.0.1")) for p in PEERS)
    config = Config.load({"key": KEY}, {})
    assert trusted(decode_params(sealed(ProducerAddress("engine", here), KEY), "t"), config) == here
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        local = tuple(p._replace(source=p.source._replace(host=host)) for p in PEERS)
        with pytest.raises(UntrustedAddressError, match="it has no seal"):
            trusted(decode_params(ProducerAddress("engine", local), "t"), config)
        chosen = Config.load({"key": KEY, "peers": [host]}, {})
        assert trusted(decode_params(ProducerAddress("engine", local), "t"), chosen) == local


def test_on_one_machine_nothing_need_be_configured():
    here = tuple(p._replace(source=p.source._replace(host="127.0.0.1")) for p in PEERS)
    address = sealed(ProducerAddress("engine", here), "")
    assert "remote_seal" not in address.fields()
    assert trusted(decode_params(address, "t"), Config.load({}, {})) == here
