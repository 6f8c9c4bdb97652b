# SPDX-License-Identifier: Apache-2.0
"""The rewriting of requests, as properties over arbitrary bodies."""

import gc
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.kv.geometry import Shard
from pd_connector.protocol.wire import params
from pd_connector.protocol.wire.params import ProducerAddress
from pd_connector.protocol.wire.peers import Peer, Source
from scheduler_plugins.router.client.answers import (
    EventCutter,
    headers_to_client,
    headers_to_engine,
)
from scheduler_plugins.router.handoff import engine_bodies
from scheduler_plugins.router.prompt import body, transfer
from scheduler_plugins.router.prompt.pieces import MOST_PARTS, MOST_VALUES

ADDRESS = ProducerAddress("engine", (Peer(Source("host", 7000, "engine"), Shard(0, 4, 0, 1)),))

text = st.text(st.characters(categories=None), max_size=8)  # unpaired surrogates included
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text
values = st.recursive(
    leaves.filter(lambda value: value not in (float("inf"), float("-inf"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
known = st.sampled_from(
    [
        *transfer.NOT_FOR_PREFILL,
        *("stream", "max_tokens", "max_completion_tokens", "kv_transfer_params", "messages"),
        *("prompt", "tools", "tool_choice", "response_format", "chat_template_kwargs", "documents"),
        *("add_generation_prompt", "continue_final_message", "cache_salt", "model", "echo"),
    ]
)
bodies = st.dictionaries(known | text, values, max_size=8)
REWRITTEN = {"stream", "max_tokens", "max_completion_tokens", "kv_transfer_params"}


@given(bodies)
def test_json_survives_the_router(content: dict[str, Any]) -> None:
    assert json.loads(b"".join(body.encode(content))) == content


@given(bodies)
def test_the_decode_side_gets_the_request_unchanged_but_for_the_transfer(
    content: dict[str, Any],
) -> None:
    sent = transfer.decode_copy(content, ADDRESS, "t")
    assert sent.pop("kv_transfer_params")["remote_request_id"] == "t"
    assert sent == {k: v for k, v in content.items() if k != "kv_transfer_params"}


@given(bodies)
def test_the_prefill_side_gets_every_field_that_could_change_the_prompt(
    content: dict[str, Any],
) -> None:
    sent = transfer.prefill_copy(content, body.COMPLETIONS, "t")
    touched = REWRITTEN | set(transfer.NOT_FOR_PREFILL)
    assert {k: v for k, v in sent.items() if k not in touched} == {
        k: v for k, v in content.items() if k not in touched
    }
    assert not set(sent) & set(transfer.NOT_FOR_PREFILL)


@given(bodies)
def test_the_prefill_side_generates_one_token_and_keeps_its_kv(content: dict[str, Any]) -> None:
    sent = transfer.prefill_copy(content, body.COMPLETIONS, "t")
    assert (sent["max_tokens"], sent["stream"]) == (1, False)
    assert ("max_completion_tokens" in sent) == ("max_completion_tokens" in content)
    assert sent.get("max_completion_tokens", 1) == 1
    assert sent["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": "t",
    }


@given(bodies)
def test_rewriting_leaves_the_clients_body_alone(content: dict[str, Any]) -> None:
    before = json.dumps(content)
    transfer.prefill_copy(content, body.COMPLETIONS, "t")
    transfer.decode_copy(content, ADDRESS, "t")
    assert json.dumps(content) == before


@given(
    st.binary(max_size=40) | bodies.map(lambda content: b"".join(body.encode(content))),
    st.sampled_from([body.CHAT, body.COMPLETIONS]),
)
def test_any_bytes_are_parsed_or_refused(raw: bytes, route: str) -> None:
    try:
        parsed = body.parse(raw, route)
    except body.BadRequestError:
        return
    transfer.why_not_disaggregated(parsed)
    body.encode(parsed)


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("[1],", MOST_PARTS),
        ("1,", MOST_VALUES),
        ('{"a":1},', MOST_PARTS),
        ("[[[[1]]]],", MOST_PARTS),
    ],
)
def test_a_body_of_endless_small_values_is_refused_before_it_is_read(
    part: str, values: int
) -> None:
    """64 MiB of `[1],` took the router's only thread for eleven seconds, and a health check has five."""
    raw = '{"prompt": [%s 1]}' % (part * (values + 1))
    with pytest.raises(body.BadRequestError, match=r"too many values: .* at most"):
        body.parse(raw.encode(), body.COMPLETIONS)
    picture = '{"messages": [{"role": "user", "content": "%s"}]}' % ("aA+/" * (8 << 20))
    assert body.parse(picture.encode(), body.CHAT)["messages"]


def test_memory_is_looked_through_again_after_a_body_that_cannot_be_read() -> None:
    with pytest.raises(body.BadRequestError):
        body.parse(b"{", body.CHAT)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ({"max_tokens": 5.0}, {"max_tokens": 5}),
        ({"max_tokens": " 5 "}, {"max_tokens": 5}),
        ({"max_completion_tokens": "-1"}, {"max_completion_tokens": -1}),
        ({"n": 2.0, "best_of": "3"}, {"n": 2, "best_of": 3}),
        ({"stream": 1}, {"stream": True}),
        ({"stream": "True"}, {"stream": True}),
        ({"stream": 0.0}, {"stream": False}),
        ({"stream": "off"}, {"stream": False}),
        ({"n": None, "stream": None}, {"n": None, "stream": None}),
    ],
)
def test_numbers_and_flags_are_read_as_engines_read_them(
    sent: dict[str, Any], read: dict[str, Any]
) -> None:
    """vLLM answers them, alone; behind the router they were refused."""
    assert body.parse(json.dumps({"prompt": "a", **sent}).encode(), body.COMPLETIONS) == {
        "prompt": "a",
        **read,
    }


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ({"prompt": "a"}, None),
        ({"prompt": [1, 2]}, None),
        ({"prompt": ["a"]}, None),
        ({"prompt": [[1, 2]]}, None),
        ({"messages": []}, None),
        ({"prompt": "a", "n": 1, "best_of": None}, None),
        ({"prompt": ["a", "b"]}, "batch"),
        ({"prompt": [[1], [2]]}, "batch"),
        ({"prompt": "a", "n": 2}, "several_answers"),
        ({"messages": [], "n": 3}, "several_answers"),
        ({"prompt": "a", "best_of": 2}, "several_answers"),
        ({"prompt": "a", "use_beam_search": True}, "beam_search"),
        ({"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": "a", "echo": True}, "prompt_logprobs"),
        ({"prompt": ""}, "no_tokens"),
        ({"prompt": []}, "no_tokens"),
        ({"prompt_embeds": "x"}, "no_tokens"),
    ],
)
def test_which_requests_one_transfer_id_can_name(
    content: dict[str, Any], cause: str | None
) -> None:
    assert transfer.why_not_disaggregated(content) == cause


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"kv_transfer_params": None},
        {"kv_transfer_params": {"remote_engine_id": "e", "remote_host": "h"}},
        {"kv_transfer_params": {"remote_engine_id": "e", "remote_host": "h", "remote_port": "1"}},
        {"kv_transfer_params": {"remote_engine_id": 1, "remote_host": "h", "remote_port": 1}},
    ],
)
def test_an_answer_without_a_whole_address_has_none(answer: object) -> None:
    assert transfer.address_in(answer) is None


@given(
    st.lists(st.sampled_from(["data: a\n\n", ": comment\n\n", "data: b\r\n\r\n"]), max_size=6),
    st.booleans(),
    st.data(),
)
def test_events_are_cut_only_at_their_ends_and_no_byte_changes(
    events: list[str], ends: bool, data: st.DataObject
) -> None:
    sent = "".join(events + ["data: [DONE]\n\n"] * ends).encode()
    cuts = data.draw(st.lists(st.integers(0, len(sent)), max_size=6).map(sorted))
    cutter, got = EventCutter(), b""
    for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        whole = cutter.feed(sent[start:end])
        assert not whole or whole.endswith((b"\n\n", b"\r\n\r\n"))
        got += whole
    assert got + cutter.rest() == sent
    assert cutter.finished == ends


def test_an_unclosed_end_mark_is_an_end_and_an_unclosed_event_is_not() -> None:
    closed, cut = EventCutter(), EventCutter()
    closed.feed(b"data: a\n\ndata: [DONE]\n")
    cut.feed(b'data: a\n\ndata: {"te')
    assert (closed.rest(), closed.finished) == (b"data: [DONE]\n", True)
    assert (cut.rest(), cut.finished) == (b"", False)


def test_headers_of_one_connection_stay_on_it() -> None:
    sent = [("Connection", "close, X-Hop"), ("X-Hop", "1"), ("Host", "r"), ("traceparent", "t")]
    forwarded = headers_to_engine([*sent, ("Content-Encoding", "gzip")], "id")
    assert dict(forwarded) == {
        "traceparent": "t",
        "X-Request-Id": "id",
        "Content-Type": "application/json",
        "Accept-Encoding": "identity",
    }
    answered = {"Transfer-Encoding": "chunked", "Content-Length": "3", "x-request-id": "engine's"}
    assert dict(headers_to_client(answered, "id")) == {"x-request-id": "engine's"}


def test_what_a_client_says_of_transfers_reaches_no_engine() -> None:
    for route in (body.COMPLETIONS, body.CHAT, "/v1/responses"):
        sent = {
            "messages": [],
            "kv_transfer_params": {"do_remote_prefill": True},
            "ec_transfer_params": {"a": 1},
            "vllm_xargs": {"kv_transfer_params": "text", "ec_transfer_params": [1], "kept": 1},
        }
        found = body.parse(json.dumps(sent).encode(), route)
        assert "kv_transfer_params" not in found
        assert "ec_transfer_params" not in found
        assert found["vllm_xargs"] == {"kept": 1}


def test_wishes_about_the_kv_pool_are_all_that_a_client_may_set_of_a_transfer() -> None:
    wishes = {"tenant": "a", "pin_s": 5}
    told = {"do_remote_prefill": True, "remote_host": "h", "pool": wishes}
    sent = json.dumps({"messages": [], "prompt": "p", "kv_transfer_params": told}).encode()
    for route in (body.COMPLETIONS, body.CHAT):
        found = body.parse(sent, route)
        assert found["kv_transfer_params"] == {"pool": wishes}
        prefill = transfer.prefill_copy(found, route, "t")["kv_transfer_params"]
        assert prefill == {**params.prefill_params("t"), "pool": wishes}
        decode = transfer.decode_copy(found, ADDRESS, "t")["kv_transfer_params"]
        assert decode == {**params.decode_params(ADDRESS, "t"), "pool": wishes}
        assert engine_bodies.alone(found)["kv_transfer_params"] == {"pool": wishes}
    assert "kv_transfer_params" not in body.parse(sent, "/v1/responses")


@pytest.mark.parametrize("told", [None, [], "pool", {}, {"pool": None}])
def test_parameters_without_wishes_are_dropped(told: object) -> None:
    found = body.parse(json.dumps({"messages": [], "kv_transfer_params": told}).encode(), body.CHAT)
    assert "kv_transfer_params" not in found
    assert "kv_transfer_params" not in engine_bodies.alone(found)
