# SPDX-License-Identifier: Apache-2.0
"""A record is believed only if every byte of it is the one that was written, and it is of the chunk that is wanted."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pool_records import (
    FACTS,
    GEOMETRY,
    mutated,
    pages_run,
    problem_of,
    record,
    sealed,
    summed,
    wanted,
)

from pd_connector.errors import Miss, PoolError
from pd_connector.pool.chunk_layout import form_problem, places
from pd_connector.pool.keys import CHUNK_TOKENS, Input, inputs_digest
from pd_connector.pool.record import (
    HEADER,
    MAGIC,
    MAX_RECORD_BYTES,
    PAYLOAD_ALIGNMENT,
    SCHEMA,
    Record,
    decode,
    encode,
    layer_sum,
    payload_problem,
    read_header,
)

RECORD = record()
HEAD = encode(RECORD)
BODY_STOP = HEADER.size + read_header(HEAD).record_bytes


def test_a_record_is_read_as_it_was_written() -> None:
    assert decode(HEAD) == RECORD
    assert decode(memoryview(HEAD)[:BODY_STOP]) == RECORD
    header = read_header(HEAD)
    assert header.payload_offset == len(HEAD)
    assert len(HEAD) % PAYLOAD_ALIGNMENT == 0
    assert header.payload_bytes == RECORD.payload_bytes
    assert problem_of(RECORD) is None
    assert RECORD.part == "0-3.0of2"


def test_the_length_of_a_head_does_not_depend_on_the_sums() -> None:
    """So space can be reserved before the payload is read."""
    layers = tuple(msgspec.structs.replace(one, sum=layer_sum(b"x")) for one in RECORD.layers)
    assert len(encode(msgspec.structs.replace(RECORD, layers=layers))) == len(HEAD)


def refused(head: bytes) -> Miss:
    with pytest.raises(PoolError) as error:
        decode(head)
    assert str(error.value)
    return error.value.cause


def test_every_flipped_bit_of_a_head_is_found() -> None:
    for place in range(BODY_STOP):
        for bit in range(8):
            flipped = bytearray(HEAD)
            flipped[place] ^= 1 << bit
            assert refused(bytes(flipped)) in (Miss.DAMAGED, Miss.UNLIKE), (place, bit)


def test_every_cut_of_a_head_is_found() -> None:
    for stop in range(BODY_STOP):
        assert refused(HEAD[:stop]) is Miss.DAMAGED


@given(st.integers(0, BODY_STOP - 1), st.integers(0, BODY_STOP - 1))
def test_two_bytes_that_have_changed_places_are_found(one: int, other: int) -> None:
    swapped = bytearray(HEAD)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    if swapped != HEAD:
        refused(bytes(swapped))


@given(
    st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: HEAD[: HEADER.size] + tail)
)
def test_foreign_bytes_are_refused_with_a_cause(data: bytes) -> None:
    refused(data)


def test_the_head_of_one_file_before_the_body_of_another_is_found() -> None:
    other = encode(record(range(1, 1 + CHUNK_TOKENS)))
    refused(HEAD[: HEADER.size] + other[HEADER.size :])


def test_a_later_schema_is_another_cause_than_damage() -> None:
    assert refused(summed(RECORD, HEAD[HEADER.size : BODY_STOP], schema=SCHEMA + 1)) is Miss.UNLIKE
    assert refused(summed(RECORD, HEAD[HEADER.size : BODY_STOP], schema=0)) is Miss.UNLIKE


def test_a_record_with_a_field_that_is_not_known_is_refused() -> None:
    plain = msgspec.msgpack.decode(HEAD[HEADER.size : BODY_STOP])
    assert decode(summed(RECORD, msgspec.msgpack.encode(plain))) == RECORD
    assert refused(summed(RECORD, msgspec.msgpack.encode(plain | {"more": 1}))) is Miss.DAMAGED


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_record_that_contradicts_itself_is_refused_although_its_sum_is_right(
    data: st.DataObject,
) -> None:
    """What passes describes pages that lie within their bytes, so nothing reads or writes beyond them."""
    plain = msgspec.msgpack.decode(HEAD[HEADER.size : BODY_STOP])
    for _ in range(data.draw(st.integers(1, 3))):
        plain = mutated(data, plain)
    head = summed(RECORD, msgspec.msgpack.encode(plain))
    try:
        found = decode(head)
    except PoolError:
        assert refused(head) is Miss.DAMAGED
        return
    assert not form_problem(found.form, found.geometry)
    assert found.payload_bytes == RECORD.payload_bytes


def changed(**fields: Any) -> bytes:
    """A head whose sum is right, with another record."""
    plain = msgspec.msgpack.decode(HEAD[HEADER.size : BODY_STOP])
    return summed(RECORD, msgspec.msgpack.encode(plain | fields))


def test_a_key_that_is_not_that_of_the_tokens_is_found() -> None:
    for fields in ({"tokens": RECORD.tokens[::-1]}, {"parent": bytes(32)}, {"key": bytes(32)}):
        assert refused(changed(**fields)) is Miss.DAMAGED


def test_layers_that_do_not_lie_as_the_form_says_are_found() -> None:
    first, *others = ([one.layer, one.offset, one.nbytes, one.sum] for one in RECORD.layers)
    number, offset, nbytes, found = first
    for wrong in ([number + 1, offset, nbytes, found], [number, offset, nbytes - 64, found]):
        assert refused(changed(layers=[wrong, *others])) is Miss.DAMAGED
    assert refused(changed(layers=others)) is Miss.DAMAGED


def test_a_payload_that_does_not_begin_behind_the_record_or_ends_elsewhere_is_found() -> None:
    body = HEAD[HEADER.size : BODY_STOP]
    assert decode(summed(RECORD, body)) == RECORD
    for told in (
        {"offset": 0},
        {"offset": len(HEAD) + 8},
        {"payload": RECORD.payload_bytes + 1},
        {"payload": 0},
    ):
        assert refused(summed(RECORD, body, **told)) is Miss.DAMAGED, told


def test_a_header_names_no_record_that_is_too_large_to_be_read() -> None:
    head = HEADER.pack(MAGIC, SCHEMA, MAX_RECORD_BYTES + 1, 0, 0, bytes(16))
    with pytest.raises(PoolError) as error:
        read_header(head)
    assert error.value.cause is Miss.DAMAGED


def test_a_short_record_is_named_as_such() -> None:
    with pytest.raises(PoolError, match=f"{BODY_STOP - HEADER.size} wanted"):
        decode(HEAD[: BODY_STOP - 1])


@pytest.mark.parametrize("start", [0, 64])
def test_each_layer_has_a_sum_of_its_own_wherever_the_buffer_begins(start: int) -> None:
    payload = bytearray(place % 251 for place in range(RECORD.payload_bytes))
    layers = sealed(RECORD.form, GEOMETRY, memoryview(payload))
    found = msgspec.structs.replace(RECORD, layers=layers)
    every = places(RECORD.form, GEOMETRY)
    needed = [place for place in every if place.offset >= start]
    buffer = memoryview(payload)[start:]
    assert payload_problem(found, needed, buffer, start) == ""
    for place in needed:
        for byte in (place.offset, place.offset + place.nbytes - 1):
            payload[byte] ^= 1
            assert f"layer {place.layer} " in payload_problem(found, needed, buffer, start)
            payload[byte] ^= 1
    assert payload_problem(found, needed, buffer[:-1], start), "it is short"
    whole = len(buffer) - needed[-1].nbytes
    assert payload_problem(found, needed, buffer[:whole], start), "a layer is missing"


def test_a_short_layer_is_not_believed_even_if_its_sum_is_right() -> None:
    """Else the pages behind its end would be what the buffer held before."""
    payload = memoryview(bytearray(RECORD.payload_bytes))
    layers = sealed(RECORD.form, GEOMETRY, payload)
    last = msgspec.structs.replace(layers[-1], sum=layer_sum(payload[layers[-1].offset : -1]))
    found = msgspec.structs.replace(RECORD, layers=(*layers[:-1], last))
    assert payload_problem(found, places(RECORD.form, GEOMETRY)[-1:], payload[:-1])


@pytest.mark.parametrize(
    "form",
    [
        (pages_run((0, 1)),),
        (pages_run((2, 0)),),
        (pages_run((0,)), pages_run((0, 2))),
        (pages_run((5,)),),
        (pages_run(first_token=16),),
        (msgspec.structs.replace(pages_run(), page_size=64),),
        (msgspec.structs.replace(pages_run(), planes=()),),
        (msgspec.structs.replace(pages_run(), value=None),),
        (
            msgspec.structs.replace(
                pages_run(), value=msgspec.structs.replace(pages_run().key, offset=9)
            ),
        ),
        (
            msgspec.structs.replace(
                pages_run(), value=msgspec.structs.replace(pages_run().key, plane=1)
            ),
        ),
        (msgspec.structs.replace(pages_run(), planes=(*pages_run().planes, *pages_run().planes)),),
    ],
    ids=[
        "two groups",
        "order",
        "twice",
        "no such layer",
        "within a page",
        "page size",
        "no planes",
        "no V",
        "beyond",
        "no such plane",
        "too many bytes",
    ],
)
def test_a_form_that_is_not_of_the_geometry_is_named(form: Any) -> None:
    assert form_problem(form, GEOMETRY)


def test_a_record_that_is_too_large_is_not_written() -> None:
    with pytest.raises(PoolError) as error:
        encode(record(facts=msgspec.structs.replace(FACTS, held="x" * MAX_RECORD_BYTES)))
    assert error.value.cause is Miss.REFUSED


def test_a_text_that_is_no_utf8_is_not_written() -> None:
    with pytest.raises(PoolError) as error:
        encode(record(adapter="\ud83d"))
    assert error.value.cause is Miss.REFUSED


def written_by(codec: str) -> Record:
    return record(writer=msgspec.structs.replace(RECORD.writer, codec=codec))


def test_kv_that_came_in_a_codec_is_read_only_where_that_codec_is_permitted() -> None:
    found = decode(encode(written_by("int8")))
    assert problem_of(found) is None
    problem = problem_of(found, codecs=("raw",))
    assert problem is not None
    assert problem[0] is Miss.CODEC
    assert found.part == "0-3.0of2.int8", "a look-up sees it without opening a file"


@pytest.mark.parametrize("codec", ["fp8_e4m3", "of_another_package"])
def test_kv_that_came_in_fp8_is_neither_written_nor_read(codec: str) -> None:
    with pytest.raises(PoolError) as error:
        encode(written_by(codec))
    assert error.value.cause is Miss.REFUSED
    plain = msgspec.msgpack.decode(HEAD[HEADER.size : BODY_STOP])
    plain["writer"]["codec"] = codec
    assert refused(summed(RECORD, msgspec.msgpack.encode(plain))) is Miss.DAMAGED


def other_than(found: Record, **fields: Any) -> tuple[Miss, str] | None:
    return problem_of(msgspec.structs.replace(found, **fields), expected=wanted(found))


@pytest.mark.parametrize(
    "fields",
    [
        {"parent": bytes(32)},
        {"number": 1},
        {"tokens": RECORD.tokens[::-1]},
        {"inputs": inputs_digest([Input("x", 1)], 0)},
        {"adapter": "other"},
        {"salt": bytes(32)},
        {"facts": msgspec.structs.replace(FACTS, config=b"d" * 16)},
        {"facts": msgspec.structs.replace(FACTS, weights=b"g" * 16)},
        {"facts": msgspec.structs.replace(FACTS, weights=b"")},
        {"facts": msgspec.structs.replace(FACTS, updates=1)},
        {
            "facts": msgspec.structs.replace(
                FACTS, layers=(msgspec.structs.replace(FACTS.layers[0], rotation=b"s" * 16),)
            )
        },
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_chunk_of_another_prompt_or_model_is_unlike_even_under_the_same_key(
    fields: dict[str, Any],
) -> None:
    problem = other_than(RECORD, **fields)
    assert problem is not None
    assert problem[0] is Miss.UNLIKE


def test_a_name_of_the_model_is_not_enough_to_read() -> None:
    """`model_problem` passes it, in handoffs."""
    named = msgspec.structs.replace(FACTS, weights=b"", model_id="named")
    problem = problem_of(record(facts=named), facts=named)
    assert problem is not None
    assert problem[0] is Miss.UNLIKE


def test_a_file_under_the_name_of_another_is_damaged() -> None:
    problem = problem_of(record(range(1, 129)), expected=wanted(RECORD))
    assert problem is not None
    assert problem[0] is Miss.DAMAGED
