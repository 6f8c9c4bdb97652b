# SPDX-License-Identifier: Apache-2.0
"""The book of writers that are believed, and of those that are not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.pool_records import FACTS, GEOMETRY, pages_run, record

from pd_connector.errors import Cause
from pd_connector.kv.geometry import Shard
from pd_connector.pool.chunk_layout import coded_run
from pd_connector.pool.record import Writer
from pd_connector.pool.trust import MOST_WRITERS, WriterTrust, writer_of

RECORD = record()


def writer(number: int) -> bytes:
    return number.to_bytes(16, "big")


def groups(**fields: Any) -> Any:
    """The geometry with another first group."""
    first, *others = GEOMETRY.groups
    return msgspec.structs.replace(
        GEOMETRY, groups=(msgspec.structs.replace(first, **fields), *others)
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"writer": Writer("vllm 0.31.0", "e1")},
        {"writer": Writer("vllm 0.32.0 on another accelerator", "e1")},
        {"writer": Writer("vllm 0.32.0", "e1", "int8")},
        {"geometry": msgspec.structs.replace(GEOMETRY, shard=Shard(0, 3, 0, 1))},
        {"geometry": groups(page_size=64)},
        {"geometry": groups(dtype="float16")},
        {"geometry": groups(layout="NHD")},
        {"facts": msgspec.structs.replace(FACTS, weights=b"g" * 16)},
        {"adapter": "an adapter"},
        {"form": (coded_run((0, 2), "int8"),)},
    ],
    ids=[
        "engine's version",
        "accelerator",
        "codec",
        "tensor parallelism",
        "page size",
        "dtype",
        "layout",
        "weights",
        "adapter",
        "codec at rest",
    ],
)
def test_another_kind_of_writer_passes_an_audit_of_its_own(fields: dict[str, Any]) -> None:
    assert writer_of(msgspec.structs.replace(RECORD, **fields)) != writer_of(RECORD)


@pytest.mark.parametrize(
    "fields",
    [
        {"writer": Writer("vllm 0.32.0", "e2")},
        {"geometry": msgspec.structs.replace(GEOMETRY, shard=Shard(0, 3, 1, 2))},
        {"geometry": msgspec.structs.replace(GEOMETRY, shard=Shard(3, 6, 0, 2))},
        {"geometry": groups(layers=(3, 5))},
        {"geometry": groups(scales=((2.0, 2.0), (3.0, 3.0)))},
        {"geometry": groups(table=5)},
        {"form": (pages_run(),)},
        {"number": 7},
        {"tokens": RECORD.tokens[::-1]},
    ],
    ids=["engine", "rank", "stage", "layers", "scales", "table", "form", "chunk", "tokens"],
)
def test_all_ranks_of_an_engine_and_others_like_it_are_one_writer(fields: dict[str, Any]) -> None:
    assert writer_of(msgspec.structs.replace(RECORD, **fields)) == writer_of(RECORD)


def cause(trust: WriterTrust, number: int, engine: str = "other") -> Cause | None:
    problem = trust.problem(engine, writer(number))
    return None if problem is None else problem[0]


def test_a_writer_is_believed_once_it_has_passed_and_the_engine_itself_always() -> None:
    trust = WriterTrust("own", audits=True)
    assert cause(trust, 1) is Cause.UNAUDITED
    assert cause(trust, 1, "own") is None
    trust.passed(writer(1))
    assert cause(trust, 1) is None
    assert cause(trust, 2) is Cause.UNAUDITED


def test_without_audits_all_are_believed() -> None:
    assert cause(WriterTrust("own", audits=False), 1) is None


@pytest.mark.parametrize("audits", [True, False])
def test_a_writer_that_differed_is_not_believed_any_more_not_even_the_engine_itself(
    audits: bool,
) -> None:
    trust = WriterTrust("own", audits=audits)
    trust.passed(writer(1))
    trust.distrust(writer(1), "it differs")
    trust.passed(writer(1))
    assert cause(trust, 1) is Cause.AUDIT
    assert cause(trust, 1, "own") is Cause.AUDIT


def test_with_other_weights_all_are_compared_again() -> None:
    trust = WriterTrust("own", audits=True)
    trust.passed(writer(1))
    trust.distrust(writer(2), "it differs")
    trust.forget()
    assert cause(trust, 1) is Cause.UNAUDITED
    assert cause(trust, 2) is Cause.UNAUDITED


def test_the_book_forgets_the_oldest_writers_and_compares_them_again() -> None:
    trust = WriterTrust("own", audits=True)
    for number in range(MOST_WRITERS + 1):
        trust.passed(writer(number))
    assert trust.problem("other", writer(0)) is not None
    assert trust.problem("other", writer(1)) is None
    for number in range(MOST_WRITERS + 2):
        trust.distrust(writer(number), "it differs")
    assert len(trust._distrusted) == MOST_WRITERS
    assert len(trust._passed) == 0
    found = trust.problem("own", writer(MOST_WRITERS + 1))
    assert found is not None
    assert "it differs" in found[1]
