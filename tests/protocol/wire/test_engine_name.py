# SPDX-License-Identifier: Apache-2.0
"""An engine's name carries its address through proxies that keep texts and numbers only."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.config import Config
from pd_connector.control.keys import new_key
from pd_connector.control.seal import UntrustedAddressError, sealed, trusted_peers
from pd_connector.kv.geometry import Shard
from pd_connector.protocol.wire import engine_name, params
from pd_connector.protocol.wire.engine_name import MARK, NamedEngine
from pd_connector.protocol.wire.peers import Peer, Source

KEY = new_key()
PEERS = tuple(
    Peer(Source("10.0.0.1", 5000 + rank, "engine"), Shard(first, first + 8, rank, 2))
    for first in (0, 8)
    for rank in (0, 1)
)
ADDRESS = sealed(params.ProducerAddress("engine", PEERS), KEY)
KEPT = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size", "transfer_mode")
"""What llm-d's routing sidecar keeps of a prefill's answer for the requests after it."""


def built(**changes: Any) -> dict[str, Any]:
    """A decode request's parameters, built from an earlier answer."""
    answer = json.loads(
        json.dumps(params.response(ADDRESS, transfer="a", pages=[[1]], tokens=9, push=True))
    )
    kept = {name: answer[name] for name in KEPT}
    asks = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "xfer-1"}
    return {**kept, **asks, "remote_request_id": "the request's own", **changes}


def parsed(fields: dict[str, Any]) -> params.TransferParams:
    found = params.parse(fields)
    assert found is not None
    return found


def test_what_is_kept_are_texts_and_numbers_that_no_request_changes() -> None:
    kept = [built()[name] for name in KEPT]
    assert all(isinstance(value, str | int) for value in kept)
    other = params.response(ADDRESS, transfer="b", pages=[[7, 8]], tokens=40, push=True)
    assert [other[name] for name in KEPT] == kept


def test_a_request_built_from_an_earlier_answer_finds_all_ranks_and_their_seal() -> None:
    asked = parsed(built())
    assert asked.peers() == PEERS
    assert asked.remote_engine_id == "engine"
    assert asked.wait, "the prefill may not have ended"
    assert trusted_peers(asked, Config(key=KEY)) == PEERS


def test_without_the_address_in_the_name_it_would_not_be_dialled() -> None:
    with pytest.raises(UntrustedAddressError, match="it has no seal"):
        trusted_peers(parsed(built(remote_engine_id="engine")), Config(key=KEY))


def test_the_transfers_name_is_the_one_that_the_prefill_engine_was_told() -> None:
    assert parsed(built()).remote_request_id == "xfer-1"
    assert parsed(built(transfer_id=None)).remote_request_id == "the request's own"


def test_an_address_in_the_name_that_another_key_sealed_is_not_dialled() -> None:
    with pytest.raises(UntrustedAddressError, match="its seal is not ours"):
        trusted_peers(parsed(built()), Config(key=new_key()))


@pytest.mark.parametrize("changes", [{"tp_size": 4}, {"remote_ranks": [["10.0.0.9", 1, 0, 9, 0]]}])
def test_what_a_client_changes_beside_the_name_is_not_dialled(changes: dict[str, Any]) -> None:
    with pytest.raises(UntrustedAddressError):
        trusted_peers(parsed(built(**changes)), Config(key=KEY))


def test_an_answer_is_an_address_of_its_engine_alone() -> None:
    answer = params.response(ADDRESS, transfer="a", pages=[[1]], tokens=9, push=True)
    assert params.parse_address(answer) == ADDRESS


@pytest.mark.parametrize(
    "text", ["", "!!", "gA", "kpGhaJE", "k5GhaJGVAQ", "k5GhaJGVBQEAAADEAA", "\u00e9"]
)
def test_an_address_that_cannot_be_read_names_the_field(text: str) -> None:
    with pytest.raises(ValueError, match="remote_engine_id"):
        params.parse(built(remote_engine_id=f"engine{MARK}{text}"))
    answer = {"remote_engine_id": f"e{MARK}{text}", "remote_host": "h", "remote_port": 1}
    assert params.parse_address(answer) is None


RANK = st.tuples(st.text("abc.:0123", min_size=1, max_size=9), *[st.integers(0, 70_000)] * 4)


@given(st.text(max_size=9), st.lists(RANK, max_size=20), st.binary(max_size=16))
def test_what_is_written_is_read(engine: str, ranks: list[Any], seal: bytes) -> None:
    named = NamedEngine(engine, tuple(ranks), seal.hex())
    assert engine_name.read(engine_name.write(named)) == named


@given(st.text())
def test_any_text_is_a_name_or_refused(text: str) -> None:
    try:
        found = engine_name.read(text)
    except ValueError:
        assert MARK in text
    else:
        assert found == NamedEngine(text) or MARK in text


def test_ranks_in_a_name_obey_the_limits_of_the_field() -> None:
    name = engine_name.write(NamedEngine("engine", (("h", 70_000, 0, 1, 0),)))
    with pytest.raises(ValueError, match="remote_ranks"):
        params.parse(built(remote_engine_id=name))


def test_many_ranks_on_one_host_make_a_short_name() -> None:
    ranks = tuple(("10.0.0.1", 7100 + rank, 0, 128, rank) for rank in range(8))
    assert len(engine_name.write(NamedEngine("e" * 36, ranks, "00" * 16))) < 250


CONTEXT = tuple(
    Peer(Source("10.0.0.1", 5000 + 4 * rank + place, "engine"), Shard(0, 8, rank, 2, 4, place, 2))
    for rank in (0, 1)
    for place in (0, 1)
)


def test_context_parallelism_comes_through_fields_and_through_the_name() -> None:
    address = sealed(params.ProducerAddress("engine", CONTEXT), KEY)
    answer = json.loads(json.dumps(params.response(address, transfer="a", pages=[[1]], tokens=9)))
    kept = {name: answer[name] for name in KEPT if name in answer}
    asks = {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": "a"}
    for fields in (answer, {**kept, **asks}):
        told = parsed(fields)
        assert told.peers() == CONTEXT
        assert [shard.cp_rank for _, shard in told.peers()] == [0, 1, 2, 3]
        assert trusted_peers(told, Config(key=KEY)) == CONTEXT
    lie = parsed({**answer, "cp_size": 2})
    with pytest.raises(UntrustedAddressError):
        trusted_peers(lie, Config(key=KEY))


def test_an_engine_without_context_parallelism_says_nothing_of_it() -> None:
    answer = params.response(ADDRESS, transfer="a", pages=[[1]], tokens=9)
    assert not {"cp_size", "pcp_size", "remote_pcp_ranks"} & set(answer)
    plain = NamedEngine("engine", (("10.0.0.1", 1, 0, 8, 0),), "00")
    context = engine_name.Context(2, 1, ())
    assert len(engine_name.write(plain)) < len(engine_name.write(plain._replace(context=context)))


def test_places_of_other_ranks_are_refused() -> None:
    address = params.ProducerAddress("engine", CONTEXT)
    fields = {**params.decode_params(address, "t"), "remote_pcp_ranks": [0, 1]}
    with pytest.raises(ValueError, match="2 places for 4 ranks"):
        params.parse(fields)
    assert params.parse_address(fields) is None
