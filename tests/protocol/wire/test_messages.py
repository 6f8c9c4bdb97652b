# SPDX-License-Identifier: Apache-2.0
"""Every message survives the wire, and no bytes from a peer do harm."""

import contextlib
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.config_rules import MAX_SLOTS
from pd_connector.errors import MalformedMessageError
from pd_connector.kv.geometry import Geometry, Group, Section, Shard, state_group
from pd_connector.kv.model import LayerFacts, ModelFacts
from pd_connector.plan.rules import RULES
from pd_connector.protocol.wire import messages
from pd_connector.protocol.wire.fields import MAX_MESSAGE_BYTES
from pd_connector.protocol.wire.header import ChunkHeader, decode_header, encode_header

GROUP = Group("attention", (0, 1, 2, 3), 4, 64, 64, 32, 0, "bfloat16", "NHD", True)
GEOMETRY = Geometry(Shard(0, 4, 0, 1), (GROUP,))
SECTIONS = (Section("conv.q", 4, 3, 16, "bfloat16"), Section("ssm", 8, 16, 16, "float32"))
SPLIT = msgspec.structs.replace(GROUP, layers=(4,), state_tokens=4, interleave=8)
EXTENDED = Geometry(
    Shard(0, 8, 1, 2, cp_size=2, pcp_rank=1, pcp_size=2),
    (GROUP, state_group((5, 6), SECTIONS, table=1), SPLIT),
)
FACTS = ModelFacts(
    b"config", b"weights", layers=(LayerFacts((0, 1), "model/attention", "scale 1", b"rotation"),)
)
HELLO = messages.Hello(1, 1, "engine", "", FACTS, GEOMETRY, ["raw"], {"tcp": b"address"}, ["shm"])
EXTENDED_HELLO = msgspec.structs.replace(HELLO, newest=2, oldest=2, extended=EXTENDED)
HEADER = ChunkHeader("t", 1, 2, b"identity", 0, 0, 4, 0, 8, "raw", 65536, b"checksum")
OPEN = messages.Open("t", b"i", 0, 4, True, [0, 1], 65536)
OPEN_WITH_STATES = msgspec.structs.replace(OPEN, state_token=4)
CONSUMER_TYPES = get_args(messages.ConsumerMessage)
PRODUCER_TYPES = get_args(messages.ProducerMessage)
DECODERS = [
    messages.decode_consumer_message,
    messages.decode_producer_message,
    decode_header,
]


def _values(kind: Any) -> st.SearchStrategy[Any]:
    """Values that a field's annotation permits."""
    if kind is Geometry:
        return st.sampled_from([GEOMETRY, EXTENDED])
    if msgspec.UnsetType in get_args(kind):
        (said,) = set(get_args(kind)) - {msgspec.UnsetType}
        return st.one_of(st.just(msgspec.UNSET), _values(said))
    if kind is ModelFacts:
        return st.just(FACTS)
    return _of(msgspec.inspect.type_info(kind))


def _of(info: Any) -> st.SearchStrategy[Any]:
    if isinstance(info, msgspec.inspect.BoolType):
        return st.booleans()
    if isinstance(info, msgspec.inspect.IntType):
        return st.integers(info.ge, info.le)
    if isinstance(info, msgspec.inspect.StrType):
        return st.text(st.characters(codec="utf-8"), max_size=min(info.max_length or 30, 30))
    if isinstance(info, msgspec.inspect.BytesType):
        return st.binary(max_size=min(info.max_length or 30, 30))
    if isinstance(info, msgspec.inspect.ListType):
        return st.lists(_of(info.item_type), max_size=5)
    if isinstance(info, msgspec.inspect.FloatType):
        return st.floats(info.ge, info.le, allow_nan=False)
    if isinstance(info, msgspec.inspect.NoneType):
        return st.none()
    if isinstance(info, msgspec.inspect.UnionType):
        return st.one_of([_of(kind) for kind in info.types])
    if isinstance(info, msgspec.inspect.TupleType):
        return st.tuples(*(_of(kind) for kind in info.item_types))
    if isinstance(info, msgspec.inspect.StructType):
        return _messages(info.cls)
    assert isinstance(info, msgspec.inspect.DictType)
    return st.dictionaries(_of(info.key_type), _of(info.value_type), max_size=3)


def _messages(kind: Any) -> st.SearchStrategy[Any]:
    fields = msgspec.structs.fields(kind)
    return st.builds(kind, **{field.name: _values(field.type) for field in fields})


@given(st.one_of([_messages(kind) for kind in CONSUMER_TYPES]))
def test_what_a_consumer_says_arrives_as_it_was_said(message: messages.Message) -> None:
    assert messages.decode_consumer_message(messages.encode(message)) == message
    with pytest.raises(MalformedMessageError):
        messages.decode_producer_message(messages.encode(message))


@given(st.one_of([_messages(kind) for kind in PRODUCER_TYPES]))
def test_what_a_producer_says_arrives_as_it_was_said(message: messages.Message) -> None:
    assert messages.decode_producer_message(messages.encode(message)) == message
    with pytest.raises(MalformedMessageError):
        messages.decode_consumer_message(messages.encode(message))


@given(_messages(ChunkHeader))
def test_chunk_headers_arrive_as_they_were_sent(header: ChunkHeader) -> None:
    assert decode_header(encode_header(header)) == header
    for decode in DECODERS[:2]:
        with pytest.raises(MalformedMessageError):
            decode(encode_header(header))


def _decode_all(data: bytes) -> None:
    for decode in DECODERS:
        with contextlib.suppress(MalformedMessageError):
            decode(data)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_malformed(data: bytes) -> None:
    _decode_all(data)


@given(
    st.sampled_from([HELLO, EXTENDED_HELLO, HEADER, OPEN, OPEN_WITH_STATES]),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 400),
)
def test_a_message_with_changed_bytes_is_a_message_or_malformed(
    message: messages.Message, changes: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(messages.encode(message))
    for place, value in changes:
        data[place % len(data)] = value
    _decode_all(bytes(data))
    _decode_all(bytes(data[:length]))


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 500_000,
        b"\x81\xa4type\x91" + b"\x91" * 500_000,
        b"\x81\xa1x" * 300_000,
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x82\xa4type\xa4Done\xa8transfer\xa2\xed\xa0",
        msgspec.msgpack.encode({"type": "Done"}),
        msgspec.msgpack.encode({"type": "Unheard", "transfer": "t"}),
        msgspec.msgpack.encode({"transfer": "t"}),
        msgspec.msgpack.encode([1, 2, 3]),
        messages.encode(messages.Done("t")) + b"trailing",
    ],
)
def test_hostile_messages_are_malformed(data: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(MalformedMessageError):
            decode(data)


@pytest.mark.parametrize(
    "message",
    [
        messages.Done("x" * 513),
        *(
            msgspec.structs.replace(OPEN, **wrong)
            for wrong in (
                {"identity": bytes(65)},
                {"first_token": -1},
                {"stop_token": 1 << 63},
                {"chunk_bytes": -1},
                {"readers": 0},
                {"readers": 1 << 17},
                {"bytes_per_s": -1},
            )
        ),
        messages.Taken(-1),
        messages.Cancel("t", "aborted", 0),
        msgspec.structs.replace(HELLO, codecs=["raw"] * 17),
        msgspec.structs.replace(HELLO, readable=["shm"] * 17),
        msgspec.structs.replace(HELLO, geometry=Geometry(Shard(0, 4, 0, 1), ())),
        msgspec.structs.replace(HELLO, geometry=Geometry(Shard(0, 4, 0, 1), (GROUP,) * 65)),
        messages.Credit("t", [0] * (MAX_SLOTS + 1)),
        messages.Credit("t", [-1]),
        messages.Heartbeat(["t"] * 4097),
        messages.Credit("t", [1 << 32]),
        msgspec.structs.replace(HELLO, transports={str(n): b"" for n in range(17)}),
    ],
)
def test_values_beyond_their_limits_are_malformed(message: messages.Message) -> None:
    with pytest.raises(MalformedMessageError):
        messages.decode_consumer_message(messages.encode(message))


def test_a_message_that_is_too_large_is_malformed_before_it_is_read() -> None:
    almost = {"tcp": bytes(MAX_MESSAGE_BYTES - 1000)}
    largest = msgspec.structs.replace(HELLO, transports=almost)
    assert messages.decode_consumer_message(messages.encode(largest)) == largest
    data = messages.encode(messages.Done("t")).ljust(MAX_MESSAGE_BYTES + 1, b"\0")
    with pytest.raises(MalformedMessageError, match=f"at most {MAX_MESSAGE_BYTES}"):
        messages.decode_consumer_message(data)


def test_as_many_slots_as_a_config_allows_fit_in_one_message() -> None:
    grant = messages.Credit("t" * 512, [MAX_SLOTS - 1] * MAX_SLOTS)
    assert messages.decode_consumer_message(messages.encode(grant)) == grant


def test_a_field_that_a_later_release_adds_is_passed_over() -> None:
    known = msgspec.msgpack.decode(messages.encode(messages.Done("t")))
    later = msgspec.msgpack.encode({**known, "reason": "new"})
    assert messages.decode_consumer_message(later) == messages.Done("t")
    header = msgspec.msgpack.decode(encode_header(HEADER))
    later = msgspec.msgpack.encode([*header, "extra"])
    assert decode_header(later) == HEADER


def test_a_geometry_with_a_field_we_do_not_know_is_malformed() -> None:
    """What one side cannot compare may be a difference."""
    hello = msgspec.msgpack.decode(messages.encode(HELLO))
    hello["geometry"]["interleaving"] = 2
    with pytest.raises(MalformedMessageError):
        messages.decode_consumer_message(msgspec.msgpack.encode(hello))


@pytest.mark.parametrize(
    ("mine", "theirs", "common"),
    [
        ((1, 1), (1, 1), 1),
        ((3, 2), (3, 2), 3),
        ((3, 2), (2, 1), 2),
        ((3, 2), (4, 3), 3),
        ((3, 2), (1, 1), None),
        ((3, 2), (5, 4), None),
        ((3, 2), (2, 3), None),
        ((3, 2), (9, 1), 3),
        ((3, 2), (0, 0), None),
    ],
)
def test_one_version_back_is_spoken_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
    mine: tuple[int, int],
    theirs: tuple[int, int],
    common: int | None,
) -> None:
    monkeypatch.setattr(messages, "SCHEMA", mine[0])
    monkeypatch.setattr(messages, "OLDEST_SCHEMA", mine[1])
    assert messages.common_schema(*theirs) == common


def test_this_release_accepts_one_version_back_at_most() -> None:
    assert messages.SCHEMA - 1 <= messages.OLDEST_SCHEMA <= messages.SCHEMA


def test_every_version_that_is_accepted_has_rules_for_its_plans() -> None:
    assert {*range(messages.OLDEST_SCHEMA, messages.SCHEMA + 1)} <= set(RULES)
    assert max(RULES) == messages.SCHEMA


DEFAULTS: dict[tuple[str, str], Any] = {
    ("Open", "coded"): True,
    ("Open", "readers"): 1,
    ("Cancel", "readers"): 1,
    ("Accept", "final_token"): None,
}


@pytest.mark.parametrize("kind", [*CONSUMER_TYPES, *PRODUCER_TYPES])
def test_what_a_peer_does_not_say_is_off(kind: type[msgspec.Struct]) -> None:
    """A default belongs to the schema: a peer that leaves a field out means this value."""
    for field in msgspec.structs.fields(kind):
        if field.required:
            continue
        made = field.default_factory is not msgspec.NODEFAULT
        value = field.default_factory() if made else field.default
        assert value == DEFAULTS.get((kind.__name__, field.name), type(value)()), field.name
