# SPDX-License-Identifier: Apache-2.0
"""Objects that pass together are bounded, whatever sizes a stranger gives them."""

import itertools
import os
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.redis_servers import RedisServer
from support.waits import until

from pd_connector.pool.carrier import client as client_module
from pd_connector.pool.carrier.client import _GET_BYTES, _HALF_BYTES, FarClient, SilentError, split


@given(st.lists(st.integers(1, 512 << 20), max_size=40))
def test_each_object_passes_once_and_few_bytes_at_a_time(sizes: list[int]) -> None:
    calls = split(sizes)
    assert [place for call in calls for place in range(call.first, call.stop)] == list(
        range(len(sizes))
    )
    for call in calls:
        assert call.nbytes == sum(sizes[call.first : call.stop])
        assert call.stop == call.first + 1 or call.nbytes <= _GET_BYTES
        assert call.start + call.nbytes <= max(call.nbytes, 2 * _HALF_BYTES)


@given(st.lists(st.sampled_from([1, 3 << 20, 4 << 20, 50 << 20, 65 << 20]), max_size=40))
def test_calls_that_are_under_way_at_once_have_memory_of_their_own(sizes: list[int]) -> None:
    calls = split(sizes)
    for one, other in itertools.pairwise(calls):
        if not (one.is_alone or other.is_alone):
            assert one.start + one.nbytes <= other.start or other.start + other.nbytes <= one.start


def test_objects_of_all_sizes_pass_the_memory_that_is_shared_with_the_client(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows, is cut off after large calls, and stays mapped on both sides."""
    monkeypatch.setattr(client_module, "_KEPT_BYTES", 1 << 20)
    monkeypatch.setattr(client_module, "_GET_BYTES", 2 << 20)
    client = FarClient("test", redis.address, 60.0)
    try:
        until(lambda: client.is_ready, "the client", 60)
        for number, sizes in enumerate([[10], [1 << 20] * 7, [5, 70_000], [1 << 20] * 3, [1]]):
            names = [f"{number}-{place}" for place in range(len(sizes))]

            def fill(place: int, room: memoryview, number: int = number) -> None:
                room[:] = bytes([number + 1, place + 1]) * (len(room) // 2) + bytes(len(room) % 2)

            assert client.put(names, sizes, fill) == [True] * len(names)
            got: dict[int, bytes] = {}
            client.get(names, sizes, lambda place, data, got=got: got.update({place: bytes(data)}))  # type: ignore[misc]
            for place, size in enumerate(sizes):
                wanted = bytearray(size)
                fill(place, memoryview(wanted))
                assert got[place] == wanted
    finally:
        client.close()


def test_a_call_after_the_end_touches_no_other_file() -> None:
    """A carrier that ends closes its clients while its threads may still put. The number of their memory is another file's then."""
    client = FarClient("test", "redis://127.0.0.1:1", 1.0)
    client.close()
    with ExitStack() as opened:
        files = [os.memfd_create("another") for _ in range(16)]
        for file in files:
            opened.callback(os.close, file)
        with pytest.raises(SilentError):
            client.put(["name"], [100], lambda place, room: None)
        assert [os.fstat(file).st_size for file in files] == [0] * len(files)
