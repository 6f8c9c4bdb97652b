# SPDX-License-Identifier: Apache-2.0
"""Records of made-up writers, without torch."""

from collections.abc import Sequence
from typing import Any

import xxhash
from hypothesis import strategies as st

from pd_connector.errors import Miss
from pd_connector.kv.geometry import Geometry, Group, Shard
from pd_connector.kv.model import LayerFacts, ModelFacts
from pd_connector.pool.chunk_layout import PagePlane, Run, View, places, wire_run
from pd_connector.pool.jobs import PromptChunk
from pd_connector.pool.keys import CHUNK_TOKENS, inputs_digest, link, root, salt_digest, token_bytes
from pd_connector.pool.record import (
    HEADER,
    MAGIC,
    PAYLOAD_ALIGNMENT,
    SCHEMA,
    LayerBytes,
    Record,
    Writer,
    layer_sum,
    record_problem,
)

FACTS = ModelFacts(
    config=b"c" * 16,
    weights=b"f" * 16,
    layers=(LayerFacts((0, 1, 2), "model/attention", "scale 1", b"r" * 16, "plain"),),
)
GEOMETRY = Geometry(
    Shard(0, 3, 0, 2),
    (
        Group("attention", (0, 2), 4, 8, 8, 32, 0, "bfloat16", "HND", heads_apart=True),
        Group("attention", (1,), 2, 8, 8, 96, 40, "fp8_e4m3", "", False, 1, ((0.5, 2.0),)),
    ),
)


def pages_run(layers: tuple[int, ...] = (0, 2), first_token: int = 0) -> Run:
    """Pages of 32 tokens, two heads that lie apart, `[head][token][K, V]`."""
    strides = (2 * 32 * 16, 32 * 16, 16, 1)
    shape = (2, 32, 8)
    planes = (PagePlane(2, 32 * 16 * 2),)
    return Run(
        layers, 32, first_token, planes, View(0, shape, strides, 0), View(0, shape, strides, 8)
    )


def record(
    tokens: range = range(CHUNK_TOKENS),
    *,
    parent: bytes = root(bytes(32)),
    number: int = 0,
    salt: str = "",
    form: tuple[Run, ...] = (pages_run(), wire_run((1,), GEOMETRY.groups[1], 1)),
    **fields: Any,
) -> Record:
    """A record of one of two ranks; the sums of its layers are zeros."""
    words, inputs = token_bytes(tokens), fields.pop("inputs", inputs_digest((), number))
    geometry = fields.pop("geometry", GEOMETRY)
    layers = tuple(LayerBytes(*place, bytes(16)) for place in places(form, geometry))
    fields = {
        "adapter": "",
        "facts": FACTS,
        "writer": Writer("vllm 0.32.0", "e1"),
        "parts": 2,
    } | fields
    return Record(
        key=link(parent, words, inputs),
        parent=parent,
        number=number,
        tokens=words,
        inputs=inputs,
        salt=salt_digest(salt),
        geometry=geometry,
        form=form,
        layers=layers,
        **fields,
    )


def sealed(form: Sequence[Run], geometry: Geometry, payload: memoryview) -> tuple[LayerBytes, ...]:
    """`Record.layers` of a payload that is complete."""
    return tuple(
        LayerBytes(*place, layer_sum(payload[place.offset : place.offset + place.nbytes]))
        for place in places(form, geometry)
    )


def wanted(found: Record) -> PromptChunk:
    """What a reader looks for to whom this record is right."""
    return PromptChunk(**{name: getattr(found, name) for name in PromptChunk._fields})


def problem_of(found: Record, **others: Any) -> tuple[Miss, str] | None:
    """As `record_problem`, for a reader to whom the record is right but for `others`."""
    reader = {"expected": wanted(found), "facts": FACTS, "codecs": (found.writer.codec,), **others}
    return record_problem(found, **reader)


def summed(found: Record, body: bytes, **told: int) -> bytes:
    """A head whose sum is right, whatever it says."""
    offset = -(-(HEADER.size + len(body)) // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
    fields = {
        "schema": SCHEMA,
        "record": len(body),
        "offset": offset,
        "payload": found.payload_bytes,
    } | told
    zeroed = HEADER.pack(MAGIC, *fields.values(), bytes(16))
    return HEADER.pack(MAGIC, *fields.values(), xxhash.xxh3_128_digest(zeroed + body)) + body


def mutated(data: st.DataObject, plain: Any) -> Any:
    """The same plain data with something else in one place."""
    if isinstance(plain, dict) and plain:
        key = data.draw(st.sampled_from(sorted(plain)))
        return plain | {key: mutated(data, plain[key])}
    if isinstance(plain, list) and plain and data.draw(st.integers(0, 3)):
        place = data.draw(st.integers(0, len(plain) - 1))
        return [*plain[:place], mutated(data, plain[place]), *plain[place + 1 :]]
    if isinstance(plain, list):
        return data.draw(st.sampled_from([[], plain * 2, plain[1:], plain[::-1]]))
    numbers = st.sampled_from(
        [0, 1, 2, 3, 7, 16, 31, 127, 128, 129, 1 << 20, 1 << 31, (1 << 63) - 1, 1 << 63]
    )
    others = st.sampled_from(
        [
            "",
            "x",
            "bfloat16",
            "fp8_e4m3",
            "odd",
            b"",
            bytes(16),
            bytes(32),
            None,
            0.5,
            float("nan"),
            True,
            [],
            {},
        ]
    )
    return data.draw(numbers | others)
