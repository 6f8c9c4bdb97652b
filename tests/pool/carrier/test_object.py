# SPDX-License-Identifier: Apache-2.0
"""One object holds a chunk with all its parts; it can be read from any place, and nothing else is taken for it."""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from chunks import begin, chain, content
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.errors import Miss, PoolError
from pd_connector.pool.carrier.object import Packed, unpacked
from pd_connector.pool.store.base import Refusal
from pd_connector.pool.store.local import LocalStore, Space

KEY = chain("object", 1)[0]
PARTS = {"r0": 5000, "r1": 4096, "r2": 1}


@pytest.fixture(scope="module")
def store() -> Iterator[LocalStore]:
    with tempfile.TemporaryDirectory(prefix="pd-pool-test-", dir="/dev/shm") as folder:
        store = LocalStore(Space(Path(folder) / "pool", 64 << 20))
        for part, nbytes in PARTS.items():
            writing = begin(store, KEY, b"parent", part=part, parts=3, nbytes=nbytes, tenant="t")
            assert not isinstance(writing, Refusal)
            with writing:
                writing.write(0, memoryview(content(KEY, part, nbytes)))
                assert writing.publish()
        yield store
        store.close()


@pytest.fixture(scope="module")
def whole(store: LocalStore) -> bytes:
    (chunk,) = store.chunks([KEY])
    packed = Packed(store, chunk)
    data = bytearray(packed.nbytes)
    packed.into(memoryview(data), 0)
    packed.close()
    return bytes(data)


def test_all_parts_come_back(whole: bytes) -> None:
    opened = unpacked(KEY, bytearray(whole))
    assert (opened.table.key, opened.table.parent, opened.table.tenant) == (KEY, b"parent", "t")
    assert [name for name, _ in opened.table.parts] == list(PARTS)
    for (name, nbytes), data in zip(PARTS.items(), opened.parts, strict=True):
        assert data == content(KEY, name, nbytes)


def test_any_run_of_its_bytes_can_be_read(store: LocalStore, whole: bytes) -> None:
    (chunk,) = store.chunks([KEY])
    packed, rng = Packed(store, chunk), random.Random(1)
    for _ in range(300):
        start = rng.randrange(len(whole))
        data = bytearray(rng.randrange(1, len(whole) - start + 1))
        packed.into(memoryview(data), start)
        assert data == whole[start : start + len(data)]
    packed.close()


@given(data=st.binary(max_size=300))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PoolError) as raised:
        unpacked(KEY, bytearray(data))
    assert raised.value.cause is Miss.DAMAGED


def test_another_chunk_and_another_length_are_refused(whole: bytes) -> None:
    for key, data in ((b"x" * 32, whole), (KEY, whole + b"x"), (KEY, whole[:-1])):
        with pytest.raises(PoolError) as raised:
            unpacked(key, bytearray(data))
        assert raised.value.cause is Miss.DAMAGED
