# SPDX-License-Identifier: Apache-2.0
"""What a proxy writes into `kv_transfer_params`, and what the engines read of it."""

import json

import pytest

from pd_connector.kv.geometry import MAX_LAYERS, Shard
from pd_connector.protocol.wire import params
from pd_connector.protocol.wire.peers import Peer, Source

ADDRESS = params.ProducerAddress(
    "engine",
    tuple(
        Peer(Source("10.0.0.1", 5000 + rank, "engine"), Shard(first, first + 8, rank, 2))
        for first in (0, 8)
        for rank in (0, 1)
    ),
)


def sent(fields):
    """The same as a proxy passes it on."""
    return json.loads(json.dumps(fields))


def test_a_decode_engine_finds_every_rank_that_the_prefill_engine_described():
    seen = params.parse_address(sent(params.description(ADDRESS)))
    assert seen == ADDRESS
    asked = params.parse(sent(params.decode_params(seen, "t")))
    assert asked.do_remote_prefill
    assert asked.peers() == ADDRESS.peers
    assert (asked.remote_request_id, asked.wait) == ("t", True)


def test_a_prefill_engine_says_that_it_takes_no_kv():
    only_produces = ADDRESS._replace(consumes=False)
    assert params.parse_address(sent(params.description(only_produces))) == only_produces


@pytest.mark.parametrize("left", [None, 0, 3])
def test_a_decode_engine_that_is_asked_at_once_reads_how_many_tokens_are_left_to_it(left):
    seen = params.parse_address(sent(params.description(ADDRESS._replace(left_tokens=left))))
    assert seen.left_tokens == left
    assert params.parse(sent(params.decode_params(seen, "t"))).left_tokens == left
    assert ("left_tokens" in params.decode_params(seen, "t")) is (left is not None)


def test_an_answer_names_the_place_that_the_description_named():
    """Otherwise a router would take each answer of an engine that takes no KV for a new address."""
    only_produces = ADDRESS._replace(consumes=False)
    described = params.parse_address(sent(params.description(only_produces)))
    answer = params.response(only_produces, transfer="t", pages=[[3]], tokens=40)
    answered = params.parse_address(sent(answer))
    assert answered.same_place(described)
    assert not answered.same_place(described._replace(seal="00"))


def test_a_prefill_engine_reads_the_transfer_that_the_proxy_chose():
    asked = params.parse(sent(params.prefill_params("t")))
    assert (asked.do_remote_decode, asked.transfer_id, asked.describe) == (True, "t", False)
    assert params.parse(sent(params.prefill_params())).transfer_id is None


def test_a_question_for_the_address_asks_for_nothing_else():
    asked = params.parse(sent(params.describe_params()))
    assert asked.describe
    assert asked.transfer_id is None


def test_a_prefills_answer_can_be_put_into_a_decode_request_as_it_is():
    answer = params.response(ADDRESS, transfer="t", pages=[[3, 4], [5]], tokens=40)
    asked = params.parse(sent(answer))
    assert asked.peers() == ADDRESS.peers
    assert not asked.wait
    assert params.parse_address(sent(answer)) == ADDRESS
    assert (answer["tp_size"], answer["pp_size"], answer["remote_num_tokens"]) == (2, 2, 40)


def test_an_address_without_ranks_is_one_rank_that_holds_the_model():
    seen = params.parse_address({"remote_engine_id": "e", "remote_host": "h", "remote_port": 1})
    assert seen.peers == (Peer(Source("h", 1, "e"), Shard(0, MAX_LAYERS, 0, 1)),)
    assert (seen.host, seen.port) == ("h", 1)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "a string",
        [],
        {},
        {"remote_engine_id": "e", "remote_host": "h"},
        {"remote_engine_id": "e", "remote_host": "h", "remote_port": "1"},
        {"remote_engine_id": "e", "remote_host": "h", "remote_port": 70000},
        {"remote_engine_id": None, "remote_host": "h", "remote_port": 1},
        {"remote_engine_id": "e", "remote_host": "h", "remote_port": 1, "remote_ranks": [[1]]},
    ],
)
def test_what_is_no_address_is_none(answer):
    assert params.parse_address(answer) is None


def test_null_is_a_field_that_is_not_there():
    """Proxies in typed languages write it for everything that they do not set."""
    unset = dict.fromkeys(params.TransferParams.__struct_fields__)
    assert params.parse(unset) is None
    asked = params.parse(unset | {"do_remote_decode": True})
    assert asked == params.TransferParams(do_remote_decode=True)
    address = {"remote_engine_id": "p", "remote_host": "h", "remote_port": 1}
    assert params.parse_address(unset | address) == params.parse_address(address)
    fetch = address | {"do_remote_prefill": True, "remote_request_id": "t"}
    assert params.parse(unset | fetch) == params.parse(fetch)


def test_parameters_that_ask_for_nothing_are_none():
    assert params.parse(None) is None
    assert params.parse({"do_remote_decode": False}) is None


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"do_remote_prefill": True, "do_remote_decode": True}, "both true"),
        ({"do_remote_prefill": True, "remote_host": "h"}, "remote_request_id"),
        ({"do_remote_decode": True, "transfer_id": "x" * 300}, "transfer_id"),
        ({"do_remote_decode": True, "transfer_id": "half a pair: \ud83d"}, "transfer_id"),
        ({"do_remote_prefill": True, "remote_host": "\udc00"}, "remote_host"),
    ],
)
def test_parameters_that_cannot_be_followed_name_the_field(wrong, named):
    with pytest.raises(ValueError, match=named):
        params.parse(wrong)


def test_only_a_proxy_that_names_the_kv_is_told_that_it_may_start_both_sides_at_once() -> None:
    answers = [
        params.response(ADDRESS, transfer="t", pages=[[3]], tokens=40, push=push)
        for push in (False, True)
    ]
    assert [one.get("transfer_mode") for one in answers] == [None, "push"]
